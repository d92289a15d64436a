//! What a reducer tells about itself.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::params::Slot;

/// The state and the times of a [`Reducer`](crate::Reducer), for people and for JSON.
///
/// Names are those of PyTorch's logging data where the thing is the same.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ReducerStats {
    /// Passes that were synchronised.
    pub iteration: u64,
    /// Number of parameters.
    pub num_parameter_tensors: usize,
    /// Their bytes.
    pub total_parameter_size_bytes: usize,
    /// Their types, each once.
    pub dtypes: Vec<String>,
    /// Bytes of the buckets of the first layout.
    pub bucket_sizes: Vec<usize>,
    /// Cap of most buckets.
    pub bucket_cap_bytes: usize,
    /// As configured.
    pub find_unused_parameters: bool,
    /// As configured.
    pub static_graph: bool,
    /// Whether the layout follows the ready order now.
    pub has_rebuilt_buckets: bool,
    /// Bytes of the buckets in ready order.
    pub rebuilt_bucket_sizes: Vec<usize>,
    /// Slots of the buckets in ready order.
    pub rebuilt_per_bucket_param_indices: Vec<Vec<Slot>>,
    /// The order in which gradients came in the last synchronised pass.
    pub prev_iteration_grad_ready_order_indices: Vec<Slot>,
    /// Bytes of the parameters without a gradient on this rank in the last synchronised pass.
    pub unused_parameter_size: usize,
    /// Buckets that were reduced in the last synchronised pass.
    pub num_buckets_reduced: usize,
    /// Whether the same parameters had gradients in all passes so far: `static_graph` would do.
    pub can_set_static_graph: bool,
    /// Name of the comm hook.
    pub comm_hook: Option<String>,
    /// Times of the last synchronised pass.
    pub last: PassTimes,
    /// Averages over all synchronised passes.
    pub average: PassTimes,
    /// The buckets of the last synchronised pass.
    pub timeline: Vec<BucketTimes>,
    /// The first error in this group.
    pub error: Option<String>,
    /// In which iteration it came.
    pub error_iteration: Option<u64>,
}

impl ReducerStats {
    /// Another group starts with the first layout again, and without the old one's error.
    pub(crate) fn forget_group(&mut self) {
        self.has_rebuilt_buckets = false;
        self.rebuilt_bucket_sizes.clear();
        self.rebuilt_per_bucket_param_indices.clear();
        self.error = None;
        self.error_iteration = None;
    }
}

/// How long the parts of a pass took, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PassTimes {
    /// From `begin` to the start of backward.
    pub forward_ns: u64,
    /// From the start of backward to the last gradient.
    pub backward_compute_ns: u64,
    /// From the first launch to the last completion.
    pub communication_ns: u64,
    /// How much of that was before the last gradient.
    pub overlap_ns: u64,
}

/// What happened to a bucket, in nanoseconds since `begin`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BucketTimes {
    /// Its index.
    pub bucket: usize,
    /// Its bytes.
    pub bytes: usize,
    /// Its last gradient came.
    pub ready_ns: u64,
    /// Its reduction was started; `None` if it was skipped.
    pub launched_ns: Option<u64>,
    /// Its reduction was finished.
    pub done_ns: Option<u64>,
}

/// Instants of a pass.
#[derive(Debug, Clone)]
pub(crate) struct Clock {
    pub(crate) begun: Instant,
    pub(crate) backward: Option<Instant>,
}

impl Clock {
    pub(crate) fn since_begin(&self, at: Instant) -> u64 {
        nanos(at.saturating_duration_since(self.begun))
    }

    /// The parts of a pass, from when its last gradient came and what its buckets did.
    pub(crate) fn times(&self, last_grad: Instant, timeline: &[BucketTimes]) -> PassTimes {
        let backward = self.since_begin(self.backward.unwrap_or(self.begun));
        let computed = self.since_begin(last_grad);
        let launched = timeline
            .iter()
            .filter_map(|bucket| bucket.launched_ns)
            .min();
        let done = timeline.iter().filter_map(|bucket| bucket.done_ns).max();
        let (launched, done) = (launched.unwrap_or(computed), done.unwrap_or(computed));
        PassTimes {
            forward_ns: backward,
            backward_compute_ns: computed.saturating_sub(backward),
            communication_ns: done.saturating_sub(launched),
            overlap_ns: computed.min(done).saturating_sub(launched),
        }
    }
}

impl PassTimes {
    /// The average with one more value, the `n`th.
    pub(crate) fn with(self, new: Self, n: u64) -> Self {
        let mean = |old: u64, new: u64| {
            (old as f64 + (new as f64 - old as f64) / n.max(1) as f64).round() as u64
        };
        Self {
            forward_ns: mean(self.forward_ns, new.forward_ns),
            backward_compute_ns: mean(self.backward_compute_ns, new.backward_compute_ns),
            communication_ns: mean(self.communication_ns, new.communication_ns),
            overlap_ns: mean(self.overlap_ns, new.overlap_ns),
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
