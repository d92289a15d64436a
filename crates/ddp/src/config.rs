//! What [`Ddp`](crate::Ddp) can be told.

use phalanx_reducer::{BucketCaps, ReducerConfig};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Options with PyTorch's names and defaults. All ranks give the same, which is checked.
///
/// ```
/// use phalanx_ddp::DdpConfig;
///
/// let config = DdpConfig {
///     find_unused_parameters: true,
///     ..DdpConfig::default()
/// };
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DdpConfig {
    /// Cap of all buckets in MiB. `None` is 25, with a first bucket of 1.
    pub bucket_cap_mb: Option<f64>,
    /// Caps bucket by bucket in MiB, the last repeating; goes before `bucket_cap_mb`.
    pub bucket_cap_mb_list: Vec<f64>,
    /// Some parameters may have no gradient in some backwards.
    pub find_unused_parameters: bool,
    /// Rebuilds buckets in ready order with `find_unused_parameters` too; not in PyTorch.
    pub rebuild_with_unused: bool,
    /// PyTorch's option against a copy of all gradients, which is hardly needed here: averages are
    /// read-only, and a bucket that somebody looks at is not written to. So the builtin model and burn
    /// hand out views in any case; it is for front ends whose tensors can be written to in place.
    pub gradient_as_bucket_view: bool,
    /// Every backward has the same gradients.
    pub static_graph: bool,
    /// Buckets whose parameters no rank has used are not sent.
    pub skip_all_reduce_unused_params: bool,
    /// Verifies parameters across ranks and broadcasts rank 0's at construction. Without it, equal
    /// replicas are the caller's business.
    pub init_sync: bool,
    /// Broadcasts rank 0's buffers before each forward.
    pub forward_sync_buffers: bool,
    /// Names of parameters and buffers that are left alone: not verified, not broadcast, not
    /// averaged.
    pub ignore: Vec<String>,
}

impl Default for DdpConfig {
    fn default() -> Self {
        Self {
            bucket_cap_mb: None,
            bucket_cap_mb_list: Vec::new(),
            find_unused_parameters: false,
            rebuild_with_unused: false,
            gradient_as_bucket_view: false,
            static_graph: false,
            skip_all_reduce_unused_params: false,
            init_sync: true,
            forward_sync_buffers: true,
            ignore: Vec::new(),
        }
    }
}

impl DdpConfig {
    /// The bucket caps in bytes.
    pub fn caps(&self) -> BucketCaps {
        let bytes = |mib: f64| (mib * f64::from(1 << 20)) as usize;
        match (&self.bucket_cap_mb_list[..], self.bucket_cap_mb) {
            ([], None) => BucketCaps::default(),
            ([], Some(cap)) => BucketCaps::uniform(bytes(cap)),
            (list, _) => BucketCaps::list(list.iter().copied().map(bytes).collect::<Vec<_>>()),
        }
    }

    /// Whether caps are sizes.
    pub(crate) fn check(&self) -> Result<()> {
        let mut caps = self.bucket_cap_mb_list.iter().chain(&self.bucket_cap_mb);
        match caps.find(|&&cap| cap.is_nan() || cap < 0.0) {
            None => Ok(()),
            Some(cap) => Err(Error::invalid(format!(
                "a bucket cap of {cap} MiB is none; give a size, or leave it out for PyTorch's"
            ))),
        }
    }

    /// The part that concerns the reducer.
    pub fn reducer(&self) -> ReducerConfig {
        ReducerConfig {
            caps: self.caps(),
            find_unused_parameters: self.find_unused_parameters,
            rebuild_with_unused: self.rebuild_with_unused,
            static_graph: self.static_graph,
            skip_all_reduce_unused_params: self.skip_all_reduce_unused_params,
        }
    }

    /// What ranks compare: all that changes which calls are made.
    pub(crate) fn card(&self) -> Vec<(&'static str, String)> {
        let caps = self
            .bucket_cap_mb
            .map_or_else(|| "default".into(), |cap| cap.to_string());
        vec![
            ("bucket_cap_mb", caps),
            (
                "bucket_cap_mb_list",
                format!("{:?}", self.bucket_cap_mb_list),
            ),
            (
                "find_unused_parameters",
                self.find_unused_parameters.to_string(),
            ),
            ("rebuild_with_unused", self.rebuild_with_unused.to_string()),
            ("static_graph", self.static_graph.to_string()),
            (
                "skip_all_reduce_unused_params",
                self.skip_all_reduce_unused_params.to_string(),
            ),
            (
                "forward_sync_buffers",
                self.forward_sync_buffers.to_string(),
            ),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn limits(config: &DdpConfig) -> (Vec<usize>, Vec<usize>) {
        let gradual = config.find_unused_parameters && !config.static_graph;
        let caps = config.caps();
        (caps.initial_limits(gradual), caps.rebuilt_limits())
    }

    #[test]
    fn options_that_are_not_there_have_their_defaults() {
        let config: DdpConfig = serde_json::from_str(r#"{"static_graph": true}"#).unwrap();
        let expected = DdpConfig {
            static_graph: true,
            ..DdpConfig::default()
        };
        assert_eq!(config, expected);
    }

    #[test]
    fn a_cap_that_is_no_size_is_refused() {
        for cap in [-1.0, f64::NAN] {
            let one = DdpConfig {
                bucket_cap_mb: Some(cap),
                ..DdpConfig::default()
            };
            let listed = DdpConfig {
                bucket_cap_mb_list: vec![1.0, cap],
                ..DdpConfig::default()
            };
            for config in [one, listed] {
                let err = config.check().unwrap_err().to_string();
                assert!(err.contains("give a size"), "{err}");
            }
        }
        DdpConfig::default().check().unwrap();
    }

    #[test]
    fn caps_are_pytorchs() {
        let base = DdpConfig::default();
        assert_eq!(limits(&base), (vec![usize::MAX], vec![MIB, 25 * MIB]));
        let finding = DdpConfig {
            find_unused_parameters: true,
            ..base.clone()
        };
        let both = (vec![MIB, 25 * MIB], vec![MIB, 25 * MIB]);
        assert_eq!(limits(&finding), both);
        let fixed = DdpConfig {
            static_graph: true,
            ..finding.clone()
        };
        assert_eq!(limits(&fixed), (vec![usize::MAX], vec![MIB, 25 * MIB]));
        // Any cap, even the default one, is the first bucket's too.
        let capped = DdpConfig {
            bucket_cap_mb: Some(25.0),
            ..finding.clone()
        };
        let both = (vec![25 * MIB], vec![25 * MIB, 25 * MIB]);
        assert_eq!(limits(&capped), both);
        let listed = DdpConfig {
            bucket_cap_mb_list: vec![2.0, 0.5, 2.0],
            ..capped
        };
        let list = vec![2 * MIB, MIB / 2, 2 * MIB];
        assert_eq!(limits(&listed), (list.clone(), list));
        assert_eq!(listed.caps().largest(), 2 * MIB);
        assert_eq!(base.caps().largest(), 25 * MIB);
    }
}
