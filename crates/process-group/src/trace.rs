//! What a flight recorder writes down, as JSON.
//!
//! The names are those of PyTorch's flight recorder (format 2.10) where the meaning is the same,
//! so that its readers find what they look for. Ours are `error`, `arrivals`, `rank`,
//! `world_size`, `hostname` and `pid`; stack frames are not recorded.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::call::CallKind;
use crate::dtype::DType;

/// The format of PyTorch's whose names are used.
pub const TRACE_VERSION: &str = "2.10";

/// One rank's recording.
///
/// Plain data: `Send`, `Sync`, and unconnected to the recorder it came from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Trace {
    /// [`TRACE_VERSION`].
    pub version: String,
    /// Rank in the world.
    pub rank: usize,
    /// Ranks in the world.
    pub world_size: usize,
    /// Where the process runs.
    pub hostname: String,
    /// Its number there.
    pub pid: u32,
    /// The groups, by id.
    pub pg_config: BTreeMap<usize, GroupConfig>,
    /// How far each group came, by id.
    pub pg_status: BTreeMap<usize, GroupStatus>,
    /// The operations, oldest first.
    pub entries: Vec<TraceEntry>,
}

/// A recorded group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GroupConfig {
    /// Its name.
    pub name: String,
    /// Its backend.
    pub desc: String,
    /// Its members' ranks in the world, as text, for example `[0, 1]`.
    pub ranks: String,
}

/// How far a group came: the newest collective in each state, -1 if there was none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GroupStatus {
    /// Handed to the backend.
    pub last_enqueued_collective: i64,
    /// Begun.
    pub last_started_collective: i64,
    /// Finished well.
    pub last_completed_collective: i64,
    /// What broke the group; an abort may have no operation to show its reason in.
    #[serde(default)]
    pub error: Option<String>,
}

impl Default for GroupStatus {
    fn default() -> Self {
        Self {
            last_enqueued_collective: -1,
            last_started_collective: -1,
            last_completed_collective: -1,
            error: None,
        }
    }
}

/// One operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TraceEntry {
    /// Its number among all that were recorded, also those that were overwritten since.
    pub record_id: u64,
    /// The group, as in [`Trace::pg_config`].
    pub pg_id: usize,
    /// The group's name and backend.
    pub process_group: (String, String),
    /// The sequence number of a collective, as in errors; for point-to-point calls, that of the
    /// collective that came next.
    pub collective_seq_id: u64,
    /// Number of point-to-point calls of the group before and with this one.
    pub p2p_seq_id: u64,
    /// Number of operations of the group before and with this one.
    pub op_id: u64,
    /// Whether it matches by peer and tag.
    pub is_p2p: bool,
    /// Backend and operation, for example `native:all_reduce` or `native:send 0->1`.
    pub profiling_name: String,
    /// Lengths in elements, one shape for each buffer read.
    pub input_sizes: Vec<[usize; 1]>,
    /// Element types in PyTorch's words, for example `Float`.
    pub input_dtypes: Vec<String>,
    /// Lengths in elements, one shape for each buffer written.
    pub output_sizes: Vec<[usize; 1]>,
    /// Element types in PyTorch's words.
    pub output_dtypes: Vec<String>,
    /// When it was submitted, since the Unix epoch.
    pub time_created_ns: u64,
    /// When the backend began with it.
    pub time_discovered_started_ns: Option<u64>,
    /// When it ended, well or not.
    pub time_discovered_completed_ns: Option<u64>,
    /// From start to end.
    pub duration_ms: Option<f64>,
    /// What it was allowed to take.
    pub timeout_ms: u64,
    /// How it stands.
    pub state: TraceState,
    /// Whether it has ended.
    pub retired: bool,
    /// The thread that submitted it.
    pub thread_name: String,
    /// Why it failed.
    pub error: Option<String>,
    /// When each peer was seen to have reached it, where the backend can tell.
    pub arrivals: Vec<Arrival>,
}

/// How a recorded operation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum TraceState {
    /// Waiting for its turn.
    Scheduled,
    /// In progress.
    Started,
    /// Finished well.
    Completed,
    /// Finished with an error, or refused. (PyTorch has no such state.)
    Failed,
}

/// A peer reached an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Arrival {
    /// The peer's rank in the group.
    pub rank: usize,
    /// When, since the Unix epoch.
    pub time_ns: u64,
}

impl Arrival {
    pub(crate) fn new(rank: usize, time_ns: u64) -> Self {
        Self { rank, time_ns }
    }
}

/// An operation in PyTorch's words, as readers of its recordings know them.
pub(crate) fn torch_operation(kind: CallKind) -> &'static str {
    match kind {
        CallKind::AllReduce => "all_reduce",
        CallKind::Broadcast => "broadcast",
        CallKind::Reduce => "reduce",
        CallKind::AllGather => "_all_gather_base",
        CallKind::Gather => "gather",
        CallKind::Scatter => "scatter",
        CallKind::ReduceScatter => "_reduce_scatter_base",
        CallKind::AllToAll => "all_to_all",
        CallKind::Barrier => "barrier",
        CallKind::Send => "send",
        CallKind::Recv => "recv_any_source",
        CallKind::Batch => "coalesced",
    }
}

/// A batch of such operations.
pub(crate) fn torch_batch(of: CallKind) -> &'static str {
    match of {
        CallKind::AllReduce => "allreduce_coalesced",
        CallKind::AllGather => "all_gather_into_tensor_coalesced",
        CallKind::ReduceScatter => "reduce_scatter_tensor_coalesced",
        CallKind::Broadcast => "broadcast_coalesced",
        _ => "coalesced",
    }
}

/// An element type in PyTorch's words.
pub(crate) fn torch_dtype(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "Half",
        DType::BF16 => "BFloat16",
        DType::F32 => "Float",
        DType::F64 => "Double",
        DType::I8 => "Char",
        DType::U8 => "Byte",
        DType::I16 => "Short",
        DType::I32 => "Int",
        DType::I64 => "Long",
        DType::Bool => "Bool",
        DType::Complex64 => "ComplexFloat",
    }
}
