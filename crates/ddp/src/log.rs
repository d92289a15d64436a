//! Logging data.

use std::collections::BTreeMap;

use phalanx_reducer::ReducerStats;
use serde::{Deserialize, Serialize};

/// What [`Ddp`](crate::Ddp) tells about itself: figures for people, dashboards and bug reports.
///
/// Names are PyTorch's where the thing is the same. What is there only for several devices per
/// process or for one library is left out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DdpLog {
    /// Number of ranks.
    pub world_size: usize,
    /// Own rank.
    pub rank: usize,
    /// The model's type.
    pub module_name: String,
    /// The backend.
    pub backend_name: String,
    /// Whether buffers are synchronised.
    pub broadcast_buffers: bool,
    /// Whether gradients are views of the buckets.
    pub gradient_as_bucket_view: bool,
    /// Whether ranks were compared and made equal at construction.
    pub init_sync: bool,
    /// As configured.
    pub rebuild_with_unused: bool,
    /// As configured.
    pub skip_all_reduce_unused_params: bool,
    /// Whether a [`Join`](crate::Join) is going on or has been.
    pub join_uneven_inputs: bool,
    /// Variables of the environment that concern communication, those that are set.
    pub environment: BTreeMap<String, String>,
    /// Buckets, ready order, times, errors.
    #[serde(flatten)]
    pub reducer: ReducerStats,
}

/// Prefixes and names of variables that concern communication. Tokens are secrets.
const PREFIXES: [&str; 4] = ["PHALANX_", "TORCHELASTIC_", "NCCL_", "GLOO_"];
const NAMES: [&str; 7] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
];
const SECRET: &str = "PHALANX_TOKEN";

pub(crate) fn environment() -> BTreeMap<String, String> {
    let concerns = |name: &str| {
        let known = NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix));
        known && name != SECRET
    };
    let text = std::env::vars_os().filter_map(|(name, value)| {
        let name = name.into_string().ok()?;
        Some((name, value.to_string_lossy().into_owned()))
    });
    text.filter(|(name, _)| concerns(name)).collect()
}
