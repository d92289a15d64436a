//! The one thing a backend is asked to do: a [`Call`].

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::buffer::{Buffer, Frozen};
use crate::dtype::{DType, Device, ReduceOp};
use crate::error::{Error, Result};

/// An operation with the memory it works on.
///
/// All ranks are ranks of the group. All lengths are in elements. Memory that the operation only
/// reads is [`Frozen`]: a caller who wants it back keeps a clone and thaws it afterwards.
///
/// `Send`: built on one thread, it may run on another.
#[derive(Debug)]
#[non_exhaustive]
pub enum Call {
    /// Every rank ends with the reduction of all ranks' buffers.
    AllReduce {
        /// Input and result.
        buf: Buffer,
        /// The operator.
        op: ReduceOp,
    },
    /// Every rank ends with the root's data.
    Broadcast {
        /// The data on the root, the destination elsewhere.
        data: Payload,
        /// The root.
        root: usize,
    },
    /// The root ends with the reduction of all ranks' buffers; the others get theirs back with
    /// unspecified contents.
    Reduce {
        /// Input, and the result on the root.
        buf: Buffer,
        /// The operator.
        op: ReduceOp,
        /// The root.
        root: usize,
    },
    /// Every rank ends with the inputs of all ranks, one after the other.
    AllGather {
        /// This rank's part; of equal length on all ranks.
        input: Frozen,
        /// Room for `size` parts.
        output: Buffer,
    },
    /// The root ends with the inputs of all ranks, one after the other.
    Gather {
        /// This rank's part; of equal length on all ranks.
        input: Frozen,
        /// Room for `size` parts, on the root only.
        output: Option<Buffer>,
        /// The root.
        root: usize,
    },
    /// Every rank gets its part of the root's input.
    Scatter {
        /// `size` parts of equal length, on the root only.
        input: Option<Frozen>,
        /// Room for one part.
        output: Buffer,
        /// The root.
        root: usize,
    },
    /// Every rank gets its part of the reduction of all ranks' inputs.
    ReduceScatter {
        /// `size` parts of equal length.
        input: Frozen,
        /// Room for one part.
        output: Buffer,
        /// The operator.
        op: ReduceOp,
    },
    /// Every rank sends a part of its input to every rank.
    AllToAll {
        /// The parts for rank 0, 1, ... one after the other.
        input: Frozen,
        /// The parts from rank 0, 1, ... one after the other.
        output: Buffer,
        /// Length of the part for each rank; empty if all are equal.
        send_counts: Vec<usize>,
        /// Length of the part from each rank; empty if all are equal.
        recv_counts: Vec<usize>,
    },
    /// Everybody arrives before anybody leaves, and all earlier work of the group is finished.
    Barrier,
    /// Sends to one rank. Matches by peer and tag, outside the order of collectives.
    Send {
        /// What to send.
        data: Frozen,
        /// To whom.
        peer: usize,
        /// Pairs it with the receive.
        tag: u32,
    },
    /// Receives from one rank, or from whoever sends first.
    Recv {
        /// Room for exactly what is sent.
        buf: Buffer,
        /// From whom; `None` is anybody.
        peer: Option<usize>,
        /// Pairs it with the send.
        tag: u32,
    },
    /// Several calls as one: collectives of one kind, or point-to-point calls.
    ///
    /// Takes one sequence number. All ranks of a batch of collectives list them in the same order.
    Batch(Vec<Call>),
}

/// Memory of a broadcast: the root only reads, the others write.
#[derive(Debug)]
pub enum Payload {
    /// Can be a source and a destination.
    Writable(Buffer),
    /// Can be a source only.
    ReadOnly(Frozen),
}

impl Payload {
    /// The memory, for reading.
    pub fn buffer(&self) -> &Buffer {
        match self {
            Self::Writable(buffer) => buffer,
            Self::ReadOnly(frozen) => frozen,
        }
    }
}

impl From<Buffer> for Payload {
    fn from(buffer: Buffer) -> Self {
        Self::Writable(buffer)
    }
}

impl From<Frozen> for Payload {
    fn from(frozen: Frozen) -> Self {
        Self::ReadOnly(frozen)
    }
}

/// Which operation a [`Call`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
#[non_exhaustive]
#[expect(missing_docs, reason = "see Call")]
pub enum CallKind {
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    Gather,
    Scatter,
    ReduceScatter,
    AllToAll,
    Barrier,
    Send,
    Recv,
    Batch,
}

impl CallKind {
    /// Every kind, for tests and tables.
    pub const ALL: [CallKind; 12] = [
        CallKind::AllReduce,
        CallKind::Broadcast,
        CallKind::Reduce,
        CallKind::AllGather,
        CallKind::Gather,
        CallKind::Scatter,
        CallKind::ReduceScatter,
        CallKind::AllToAll,
        CallKind::Barrier,
        CallKind::Send,
        CallKind::Recv,
        CallKind::Batch,
    ];

    /// Whether it matches by peer and tag instead of by order.
    pub fn is_point_to_point(self) -> bool {
        matches!(self, Self::Send | Self::Recv)
    }
}

impl fmt::Display for CallKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllReduce => "allreduce",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::AllGather => "allgather",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "alltoall",
            Self::Barrier => "barrier",
            Self::Send => "send",
            Self::Recv => "recv",
            Self::Batch => "batch",
        })
    }
}

/// Who runs an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// The backend's thread; the caller goes on. Ranks may differ in this.
    #[default]
    Async,
    /// The calling thread, if nothing is queued before it: the lowest latency.
    Blocking,
}

/// How to run a call.
#[derive(Debug, Clone, Default)]
pub struct CallOptions {
    /// Who runs it.
    pub mode: Mode,
    /// After this time the operation fails, and the group with it; `None` is the group's own.
    pub timeout: Option<Duration>,
}

impl CallOptions {
    /// Runs in the calling thread if nothing is queued.
    pub fn blocking() -> Self {
        Self {
            mode: Mode::Blocking,
            ..Self::default()
        }
    }

    /// With a time limit.
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self {
            timeout: Some(timeout),
            ..self
        }
    }
}

impl Call {
    /// Which operation it is.
    #[inline]
    pub fn kind(&self) -> CallKind {
        match self {
            Self::AllReduce { .. } => CallKind::AllReduce,
            Self::Broadcast { .. } => CallKind::Broadcast,
            Self::Reduce { .. } => CallKind::Reduce,
            Self::AllGather { .. } => CallKind::AllGather,
            Self::Gather { .. } => CallKind::Gather,
            Self::Scatter { .. } => CallKind::Scatter,
            Self::ReduceScatter { .. } => CallKind::ReduceScatter,
            Self::AllToAll { .. } => CallKind::AllToAll,
            Self::Barrier => CallKind::Barrier,
            Self::Send { .. } => CallKind::Send,
            Self::Recv { .. } => CallKind::Recv,
            Self::Batch(_) => CallKind::Batch,
        }
    }

    /// Whether it matches by peer and tag instead of by order: `Send`, `Recv`, batches of them.
    #[inline]
    pub fn is_point_to_point(&self) -> bool {
        match self {
            Self::Batch(calls) => calls.first().is_some_and(Call::is_point_to_point),
            other => other.kind().is_point_to_point(),
        }
    }

    /// The operator of a reduction.
    #[inline]
    pub fn op(&self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce { op, .. }
            | Self::Reduce { op, .. }
            | Self::ReduceScatter { op, .. } => Some(*op),
            _ => None,
        }
    }

    /// The root of a rooted collective, or the peer of a point-to-point call.
    #[inline]
    pub fn root_or_peer(&self) -> Option<usize> {
        match self {
            Self::Broadcast { root, .. }
            | Self::Reduce { root, .. }
            | Self::Gather { root, .. }
            | Self::Scatter { root, .. } => Some(*root),
            Self::Send { peer, .. } => Some(*peer),
            Self::Recv { peer, .. } => *peer,
            _ => None,
        }
    }

    /// The memory it reads from, for checking and recording. In-place calls read what they write.
    #[inline]
    pub fn input(&self) -> Option<&Buffer> {
        match self {
            Self::AllReduce { buf, .. } | Self::Reduce { buf, .. } => Some(buf),
            Self::Broadcast { data, .. } => Some(data.buffer()),
            Self::AllGather { input, .. }
            | Self::Gather { input, .. }
            | Self::ReduceScatter { input, .. }
            | Self::AllToAll { input, .. } => Some(input),
            Self::Scatter { input, .. } => input.as_deref(),
            Self::Send { data, .. } => Some(data),
            Self::Barrier | Self::Recv { .. } | Self::Batch(_) => None,
        }
    }

    /// The memory it writes to, for checking and recording.
    #[inline]
    pub fn output(&self) -> Option<&Buffer> {
        match self {
            Self::AllReduce { buf, .. } | Self::Reduce { buf, .. } | Self::Recv { buf, .. } => {
                Some(buf)
            }
            Self::Broadcast { data, .. } => Some(data.buffer()),
            Self::AllGather { output, .. }
            | Self::Scatter { output, .. }
            | Self::ReduceScatter { output, .. }
            | Self::AllToAll { output, .. } => Some(output),
            Self::Gather { output, .. } => output.as_ref(),
            Self::Barrier | Self::Send { .. } | Self::Batch(_) => None,
        }
    }

    /// Type of its elements, if it has any.
    #[inline]
    pub fn dtype(&self) -> Option<DType> {
        self.input().or(self.output()).map(Buffer::dtype)
    }

    /// Where its memory is, if it has any.
    #[inline]
    pub fn device(&self) -> Option<Device> {
        self.input().or(self.output()).map(Buffer::device)
    }

    /// Whether the arguments make sense for `rank` of `size` ranks.
    ///
    /// [`ProcessGroupExt`](crate::ProcessGroupExt) asks this before it submits anything, so
    /// backends meet valid calls only.
    pub fn validate(&self, rank: usize, size: usize) -> Result<()> {
        let checked = self.check(rank, size);
        checked.map_err(|problem| {
            let place = crate::error::Place {
                call: Some(self.kind()),
                ..Default::default()
            };
            Error::invalid(problem).at(place)
        })
    }

    /// Whether the arguments make sense whatever the group: nothing else can be wrong with the most
    /// frequent call.
    #[inline]
    pub(crate) fn is_valid_anywhere(&self) -> bool {
        matches!(self, Self::AllReduce { buf, op } if op.is_defined_for(buf.dtype()))
    }

    fn check(&self, rank: usize, size: usize) -> Result<(), String> {
        if let Some(peer) = self.root_or_peer()
            && peer >= size
        {
            return Err(format!("rank {peer} is not in a group of {size}"));
        }
        if let (Some(op), Some(dtype)) = (self.op(), self.dtype())
            && !op.is_defined_for(dtype)
        {
            return Err(format!("{} is not defined for {dtype}", op.name()));
        }
        if let (Some(input), Some(output)) = (self.input(), self.output()) {
            if input.dtype() != output.dtype() {
                return Err(format!(
                    "input is {}, output {}",
                    input.dtype(),
                    output.dtype()
                ));
            }
            if input.device() != output.device() {
                return Err(format!(
                    "input is on {}, output on {}",
                    input.device(),
                    output.device()
                ));
            }
        }
        self.check_shape(rank, size)
    }

    fn check_shape(&self, rank: usize, size: usize) -> Result<(), String> {
        match self {
            Self::Broadcast {
                data: Payload::ReadOnly(_),
                root,
            } if *root != rank => Err("only the root may broadcast from read-only memory".into()),
            Self::AllGather { input, output } => times(size, input, output, "output", "inputs"),
            Self::Gather {
                input,
                output: Some(output),
                root,
            } if *root == rank => times(size, input, output, "output", "inputs"),
            Self::Gather {
                output: None, root, ..
            } if *root != rank => Ok(()),
            Self::Gather { .. } => Err("exactly the root gives room for what is gathered".into()),
            Self::Scatter {
                input: Some(input),
                output,
                root,
            } if *root == rank => times(size, output, input, "input", "outputs"),
            Self::Scatter {
                input: None, root, ..
            } if *root != rank => Ok(()),
            Self::Scatter { .. } => Err("exactly the root gives what is scattered".into()),
            Self::ReduceScatter { input, output, .. } => {
                times(size, output, input, "input", "outputs")
            }
            Self::AllToAll {
                input,
                output,
                send_counts,
                recv_counts,
            } => {
                counts(size, input.len(), send_counts, "send_counts", "input")?;
                counts(size, output.len(), recv_counts, "recv_counts", "output")?;
                let own = |counts, len| explicit_counts(counts, len, size)[rank];
                let (sent, kept) = (
                    own(send_counts, input.len()),
                    own(recv_counts, output.len()),
                );
                match sent == kept {
                    true => Ok(()),
                    false => Err(format!(
                        "this rank sends {sent} elements to itself and expects {kept}"
                    )),
                }
            }
            Self::Send { peer, .. } if *peer == rank => Err("a rank cannot send to itself".into()),
            Self::Recv { peer, .. } if *peer == Some(rank) => {
                Err("a rank cannot receive from itself".into())
            }
            Self::Batch(calls) => self.check_batch(calls, rank, size),
            _ => Ok(()),
        }
    }

    fn check_batch(&self, calls: &[Call], rank: usize, size: usize) -> Result<(), String> {
        let Some(first) = calls.first() else {
            return Err("a batch of nothing".into());
        };
        for call in calls {
            let fits = match first.is_point_to_point() {
                true => call.kind().is_point_to_point(),
                false => call.kind() == first.kind(),
            };
            if !fits || matches!(call, Self::Batch(_) | Self::Barrier) {
                return Err(format!(
                    "{} and {} do not go together",
                    first.kind(),
                    call.kind()
                ));
            }
            call.check(rank, size)?;
        }
        Ok(())
    }
}

fn times(
    size: usize,
    part: &Buffer,
    whole: &Buffer,
    name: &str,
    parts: &str,
) -> Result<(), String> {
    match part.len().checked_mul(size) == Some(whole.len()) {
        true => Ok(()),
        false => Err(format!(
            "the {name} has {} elements, {size} {parts} of {} are needed",
            whole.len(),
            part.len()
        )),
    }
}

fn counts(
    size: usize,
    len: usize,
    counts: &[usize],
    name: &str,
    buffer: &str,
) -> Result<(), String> {
    let sum = || counts.iter().try_fold(0usize, |sum, &n| sum.checked_add(n));
    match counts {
        [] if len.is_multiple_of(size) => Ok(()),
        [] => Err(format!(
            "{len} elements do not divide into {size} equal parts"
        )),
        _ if counts.len() != size => {
            Err(format!("{name} has {} entries, not {size}", counts.len()))
        }
        _ if sum() != Some(len) => Err(format!("{name} do not sum to the {buffer}'s {len}")),
        _ => Ok(()),
    }
}

/// The counts of an all-to-all written out: equal parts if none are given.
pub fn explicit_counts(counts: &[usize], len: usize, size: usize) -> Vec<usize> {
    match counts {
        [] => vec![len / size; size],
        counts => counts.to_vec(),
    }
}
