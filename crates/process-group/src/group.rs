//! The trait that a backend implements.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::buffer::Buffer;
use crate::call::{Call, CallKind, CallOptions};
use crate::dtype::{DType, Device, ReduceOp};
use crate::error::{Error, Result};
use crate::set::Set;
use crate::work::RawWork;

/// How long an operation may take unless the call or the group says otherwise: 30 minutes.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// Ranks that communicate.
///
/// This is what a backend implements; what callers use is [`ProcessGroupExt`], which is there for
/// every group. The heart is [`submit`](ProcessGroup::submit): one method for all operations, so a
/// wrapper is one method too and a new operation breaks nobody.
///
/// # What a backend owes
///
/// * **Order.** Collectives match by the order in which they are submitted; two threads that
///   submit to one group at the same time must agree on an order across ranks themselves.
///   Point-to-point calls match by peer and tag and do not wait for collectives, nor they for them.
/// * **Ownership.** The memory of a call belongs to the operation until it is finished, also when
///   its `Work` is dropped. After an error it is not handed back.
/// * **Time.** Every operation ends: with its result, or with an error at its timeout. After a
///   timeout, a lost peer or an abort the group is broken for good and every later call says so
///   with the first cause.
/// * **Bits.** All ranks get identical results, and they depend on the values and the ranks only:
///   not on sizes, timing or how a vector is cut into pieces, unless the backend says otherwise
///   ([`Capabilities::fixed_order`]).
///
/// [`Lane`](crate::Lane) does the queueing, the numbering and the broken state for backends whose
/// operations are host code.
///
/// # Dropping
///
/// Dropping the last handle without a [`shutdown`](ProcessGroup::shutdown) is an abort that takes
/// nothing back. Outstanding operations fail here. A peer's operation that needs more of this rank
/// fails with [`Aborted`](crate::ErrorKind::Aborted) and says who left. But what this rank's
/// finished operations have given stays: a slower peer's same operation succeeds.
///
/// # Threads
///
/// A group may be used from many threads.
///
/// [`ProcessGroupExt`]: crate::ProcessGroupExt
pub trait ProcessGroup: Send + Sync + fmt::Debug {
    /// Own rank in the group.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn size(&self) -> usize;

    /// Name of the backend, for example `native`.
    fn backend(&self) -> &str;

    /// Name of the group, the same on all its ranks; for errors and recordings.
    fn name(&self) -> &str;

    /// The members' ranks in the world, by group rank.
    fn global_ranks(&self) -> &[usize];

    /// What the backend can do. Calls outside it are refused before anything is sent.
    fn capabilities(&self) -> Capabilities;

    /// How long operations without a timeout of their own may take.
    fn timeout(&self) -> Duration;

    /// The device of this rank, whose memory [`allocate`](ProcessGroup::allocate) has: the host
    /// unless the backend is for devices.
    fn device(&self) -> Device {
        Device::Cpu
    }

    /// Memory that this backend handles best. Local, never a collective call.
    fn allocate(&self, device: Device, dtype: DType, len: usize) -> Result<Buffer> {
        match device {
            Device::Cpu => Ok(Buffer::zeroed(dtype, len)),
            other => Err(Error::unsupported(format!(
                "{} has no memory on {other}",
                self.backend()
            ))),
        }
    }

    /// Copies elements of `from` into `to`, from its element `at` on; for memory that the host
    /// cannot reach. Local, never a collective call.
    ///
    /// In the order of the buffers' streams: it sees what was put on `from`'s stream before, and
    /// what is put on `to`'s stream later sees it. To host memory it is done when this returns, and
    /// an error if what was put on `from`'s stream has failed meanwhile.
    /// From host memory, the caller may reuse the memory when this returns.
    fn copy(&self, from: &Buffer, range: Range<usize>, to: &mut Buffer, at: usize) -> Result<()> {
        check_copy(from, &range, to, at)?;
        let size = to.dtype().size();
        let source = &from.as_bytes()?[range.start * size..range.end * size];
        to.as_bytes_mut()?[at * size..][..source.len()].copy_from_slice(source);
        Ok(())
    }

    /// Starts an operation. The call has been validated against rank, size and capabilities.
    fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork>;

    /// The group of the given ranks of this one, in that order; `None` on ranks not among them.
    ///
    /// Called by every member, with the same `name`, which must be new in this group; others may
    /// call it too and return at once. Disjoint splits may happen at the same time.
    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>>;

    /// Breaks the group here and now, without asking anybody; peers' pending operations fail with
    /// the reason.
    fn abort(&self, reason: &str);

    /// Ends the group in order: a collective call that waits for outstanding work.
    fn shutdown(&self) -> Result<()>;

    /// Number of collectives issued so far: the sequence number of the next one.
    fn sequence(&self) -> u64;

    /// Number of point-to-point operations that this rank has issued so far: the number of the next
    /// one, which its errors carry. Counted apart from collectives and by each rank for itself.
    ///
    /// Is [`PointToPoint::sequence`](crate::PointToPoint::sequence), or zero if the backend has no
    /// point-to-point calls.
    fn p2p_sequence(&self) -> u64;
}

/// Whether the elements are there and fit into `to` from element `at` on, for backends that
/// [`copy`](ProcessGroup::copy).
pub fn check_copy(from: &Buffer, range: &Range<usize>, to: &Buffer, at: usize) -> Result<()> {
    if from.dtype() != to.dtype() {
        let what = format!("a copy from {} to {}", from.dtype(), to.dtype());
        return Err(Error::invalid(what));
    }
    if range.start > range.end || range.end > from.len() {
        let what = format!("elements {range:?} of a buffer of {}", from.len());
        return Err(Error::invalid(what));
    }
    if at.checked_add(range.len()).is_none_or(|end| end > to.len()) {
        let (len, room) = (range.len(), to.len());
        let what = format!("{len} elements do not fit into {room} from element {at} on");
        return Err(Error::invalid(what));
    }
    Ok(())
}

/// What a backend can do.
///
/// `Copy` and small: it is asked before every operation.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Capabilities {
    /// The calls it knows.
    pub calls: Set<CallKind>,
    /// The element types it knows.
    pub dtypes: Set<DType>,
    /// The operators it knows; factors do not count.
    pub ops: Set<ReduceOp>,
    /// Combinations of an element type and an operator that it lacks, although it knows both.
    pub lacks: &'static [(DType, ReduceOp)],
    /// Whether it works on host memory.
    pub cpu: bool,
    /// Whether it works on CUDA memory.
    pub cuda: bool,
    /// Whether receiving from anybody works.
    pub recv_any: bool,
    /// Whether sends and receives match by tag; otherwise by their order, and all tags are zero.
    pub tags: bool,
    /// Whether a reduction's bits depend on values and ranks only, and 16-bit floats are summed in
    /// `f32`. Where a library chooses its algorithm by size, the ranks still agree with each
    /// other, but a vector in pieces may be rounded otherwise than the whole.
    pub fixed_order: bool,
    /// Whether an [`allreduce_coalesced`](crate::ProcessGroupExt::allreduce_coalesced) of large
    /// buffers works on them where they are, in host memory of any kind, so that it costs less
    /// than to copy them into one buffer from [`allocate`](ProcessGroup::allocate) and out of it
    /// again. The same on all ranks.
    pub scattered: bool,
    /// Whether an asynchronous call returns before other ranks have made theirs. If not, a rank
    /// must not wait for another one between two calls that this one makes in its own time.
    pub asynchronous: bool,
    /// Whether `abort` fails operations that are in progress.
    pub abort: bool,
    /// What survivors see when a peer dies.
    pub on_peer_death: PeerDeath,
}

/// What survivors see when a peer dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerDeath {
    /// An error that names the peer, at once.
    Error,
    /// An error at the operation's timeout.
    Timeout,
    /// Nothing: the launcher ends the whole job.
    JobEnds,
}

impl Capabilities {
    /// Everything there is, on host memory.
    pub fn all_on_host() -> Self {
        Self {
            calls: CallKind::ALL.into_iter().collect(),
            dtypes: DType::ALL.into_iter().collect(),
            ops: ReduceOp::ALL.into_iter().collect(),
            lacks: &[],
            cpu: true,
            cuda: false,
            recv_any: true,
            tags: true,
            fixed_order: true,
            scattered: false,
            asynchronous: true,
            abort: true,
            on_peer_death: PeerDeath::Error,
        }
    }

    /// Whether it reduces elements of this type with this operator.
    pub fn reduces(&self, dtype: DType, op: ReduceOp) -> bool {
        let lacks = |(d, o): &(DType, ReduceOp)| *d == dtype && o.name() == op.name();
        self.dtypes.contains(dtype) && self.ops.contains(op) && !self.lacks.iter().any(lacks)
    }

    /// Whether `call` is among them; the error says what is missing.
    pub fn check(&self, call: &Call) -> Result<()> {
        let refuse = |what: String| Err(Error::unsupported(what));
        let kind = call.kind();
        if !self.calls.contains(kind) {
            return refuse(format!("the backend has no {kind}"));
        }
        if let Call::Batch(calls) = call {
            return calls.iter().try_for_each(|call| self.check(call));
        }
        if let Call::Recv { peer: None, .. } = call
            && !self.recv_any
        {
            return refuse("the backend cannot receive from anybody; name the peer".into());
        }
        if let Some(op) = call.op()
            && !self.ops.contains(op)
        {
            return refuse(format!("the backend has no {}", op.name()));
        }
        let Some(memory) = call.input().or(call.output()) else {
            return Ok(());
        };
        if !self.dtypes.contains(memory.dtype()) {
            return refuse(format!("the backend does not know {}", memory.dtype()));
        }
        if let Some(op) = call.op()
            && !self.reduces(memory.dtype(), op)
        {
            let dtype = memory.dtype();
            return refuse(format!("the backend has no {} of {dtype}", op.name()));
        }
        if let Call::Send { tag, .. } | Call::Recv { tag, .. } = call
            && *tag != 0
            && !self.tags
        {
            return refuse("the backend has no tags; messages match by order, use tag 0".into());
        }
        match memory.device() {
            Device::Cpu if !self.cpu => refuse("the backend has no host memory".into()),
            Device::Cuda(_) if !self.cuda => refuse("the backend has no CUDA memory".into()),
            _ => Ok(()),
        }
    }
}
