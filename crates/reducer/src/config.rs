//! What a reducer can be told.

use serde::{Deserialize, Serialize};

use crate::plan::BucketCaps;

/// Options of a [`Reducer`](crate::Reducer), with PyTorch's defaults. All ranks give the same.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct ReducerConfig {
    /// How large buckets become.
    pub caps: BucketCaps,
    /// Some parameters may have no gradient in some passes, on some ranks. Costs one small
    /// all-reduce per pass, and buckets are not rebuilt in ready order.
    pub find_unused_parameters: bool,
    /// Rebuilds buckets with `find_unused_parameters` too, from the order of the first pass.
    ///
    /// PyTorch cannot: it takes the unused for ready before the first gradient. Here they are
    /// those that never came, known without walking a graph.
    pub rebuild_with_unused: bool,
    /// Every pass has the same gradients, in the same number. The first pass learns which, and
    /// reduces at its end; in all others unused parameters cost nothing, and a parameter may have
    /// several gradients, which are summed.
    pub static_graph: bool,
    /// Buckets whose parameters no rank has used are not sent. With `find_unused_parameters`. Has no
    /// effect in groups whose calls are not
    /// [`asynchronous`](phalanx_pg::Capabilities::asynchronous), such as `Checked` ones.
    pub skip_all_reduce_unused_params: bool,
}

impl ReducerConfig {
    /// Whether a rebuild in ready order will come.
    pub(crate) fn rebuilds(&self) -> bool {
        self.static_graph || !self.find_unused_parameters || self.rebuild_with_unused
    }

    /// Whether unused parameters are found anew in every pass.
    pub(crate) fn finds_unused(&self) -> bool {
        self.find_unused_parameters && !self.static_graph
    }
}
