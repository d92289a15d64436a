//! A communicator: the thin layer over NCCL's handle.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

use nccl_sys::*;
use phalanx_pg::{Error, ErrorKind, RawStream, Result};

use crate::step::{Kind, Operator, Step};

/// How often to ask whether a call of a non-blocking communicator is done before giving way to
/// others: most are within microseconds.
const BUSY: usize = 100;
/// Between two questions after that.
const POLL: Duration = Duration::from_micros(50);

/// One of NCCL's communicators, non-blocking: no call on it waits for a peer. What it began may be
/// in progress until the peers come, as while transports are connected; [`settle`](Comm::settle)
/// waits for that, with the patience of whoever called.
///
/// All methods but [`abort`](Comm::abort) are for one thread at a time.
#[derive(Debug)]
pub(crate) struct Comm {
    nccl: &'static Nccl,
    /// Null once it has been freed.
    handle: AtomicPtr<ncclComm>,
}

/// Whether to go on waiting; an error is what the call fails with.
pub(crate) type Patience<'a> = &'a dyn Fn() -> Result<()>;

/// An NCCL failure as this crate's.
pub(crate) fn failure(err: &NcclError) -> Error {
    let kind = match err.code {
        ncclRemoteError => ErrorKind::PeerLost,
        ncclTimeout => ErrorKind::Timeout,
        _ => ErrorKind::Backend,
    };
    Error::new(kind, err.to_string())
}

/// What a communicator is to put on a stream.
pub(crate) struct Start<'a> {
    pub(crate) comm: &'a Comm,
    pub(crate) steps: &'a [Step],
    pub(crate) stream: RawStream,
}

/// Puts all steps on their streams, as one group call.
pub(crate) fn start(starts: &[Start<'_>], patience: Patience<'_>) -> Result<()> {
    let starts = starts.iter().filter(|start| !start.steps.is_empty());
    let starts: Vec<&Start<'_>> = starts.collect();
    let Some(nccl) = starts.first().map(|start| start.comm.nccl) else {
        return Ok(());
    };
    let operators: Result<Vec<_>> = starts
        .iter()
        .map(|start| start.comm.make_operators(start.steps, patience))
        .collect();
    let operators = operators?;
    let check = |call, code| nccl.check(call, code).map_err(|err| failure(&err));
    // SAFETY: no arguments.
    check("ncclGroupStart", unsafe { (nccl.ncclGroupStart)() })?;
    let called = starts.iter().zip(&operators).try_for_each(|(start, made)| {
        let mut steps = start.steps.iter().zip(made);
        steps.try_for_each(|(step, made)| start.comm.call(step, *made, start.stream))
    });
    // Also after a failure: the thread must not stay inside the group.
    // SAFETY: no arguments; a group is open.
    let ended = check("ncclGroupEnd", unsafe { (nccl.ncclGroupEnd)() });
    called.and(ended)?;
    for (start, made) in starts.iter().zip(operators) {
        start.comm.settle("ncclGroupEnd", patience)?;
        start.comm.free_operators(made)?;
    }
    Ok(())
}

/// A configuration with which no call waits for a peer.
fn non_blocking() -> ncclConfig_t {
    let mut config = ncclConfig_t::INITIALIZER;
    config.blocking = 0;
    config
}

impl Comm {
    /// Joins the communicator of `size` ranks that `ids` name. The caller's thread has a device.
    pub(crate) fn join(
        nccl: &'static Nccl,
        ids: &mut [ncclUniqueId],
        rank: usize,
        size: usize,
        patience: Patience<'_>,
    ) -> Result<Self> {
        let mut config = non_blocking();
        let mut handle: ncclComm_t = ptr::null_mut();
        let (rank, size, count) = (rank as c_int, size as c_int, ids.len() as c_int);
        let (call, code) = match (nccl.ncclCommInitRankScalable, count) {
            (Some(init), 2..) => {
                // SAFETY: room for a handle, `count` ids, an initialised configuration; all are
                // read during the call.
                let code = unsafe {
                    init(
                        &mut handle,
                        size,
                        rank,
                        count,
                        ids.as_mut_ptr(),
                        &mut config,
                    )
                };
                ("ncclCommInitRankScalable", code)
            }
            _ => {
                // SAFETY: as above, with one id.
                let code = unsafe {
                    (nccl.ncclCommInitRankConfig)(&mut handle, size, ids[0], rank, &mut config)
                };
                ("ncclCommInitRankConfig", code)
            }
        };
        let comm = Self {
            nccl,
            handle: AtomicPtr::new(handle),
        };
        // If it fails the drop of what there is aborts it.
        comm.check(call, code)?;
        comm.settle(call, patience)?;
        Ok(comm)
    }

    /// A communicator of the same ranks, in which this one has the number `rank`. All ranks call
    /// it, while nothing is in progress on this communicator.
    ///
    /// Nothing is shared with it (`splitShare`): the abort of one would be the end of both.
    pub(crate) fn split(&self, rank: usize, patience: Patience<'_>) -> Result<Self> {
        const CALL: &str = "ncclCommSplit";
        let (own, mut config) = (self.live()?, non_blocking());
        // The library writes the new handle when it has one, which may be after we have given up:
        // then its place must still be there, and neither it nor the communicator is ever freed.
        // That is once for a group that breaks so: nobody could say when it is safe to look.
        let place: *mut ncclComm_t = Box::into_raw(Box::new(ptr::null_mut()));
        // SAFETY: a live communicator, room for a handle for as long as it takes, an initialised
        // configuration that is read during the call.
        let code = unsafe { (self.nccl.ncclCommSplit)(own, 0, rank as c_int, place, &mut config) };
        self.check(CALL, code)?;
        self.settle(CALL, patience)?;
        // SAFETY: made from a box above; this communicator is ready again, so the library has
        // written and has no further use for it.
        let handle = *unsafe { Box::from_raw(place) };
        let comm = Self {
            nccl: self.nccl,
            handle: AtomicPtr::new(handle),
        };
        comm.settle(CALL, patience)?;
        Ok(comm)
    }

    /// Waits until the last call is on its way: a stream that is marked now marks its end.
    fn settle(&self, call: &'static str, patience: Patience<'_>) -> Result<()> {
        for asked in 0.. {
            match self.async_error()? {
                ncclSuccess => break,
                ncclInProgress if asked < BUSY => std::thread::yield_now(),
                ncclInProgress => {
                    patience()?;
                    std::thread::sleep(POLL);
                }
                code => return Err(failure(&self.nccl.error(call, code))),
            }
        }
        Ok(())
    }

    /// What went wrong since, or whether a call is in progress.
    pub(crate) fn async_error(&self) -> Result<ncclResult_t> {
        let mut code = ncclSuccess;
        // SAFETY: a live communicator, see `live`, and room for a code.
        let asked = unsafe { (self.nccl.ncclCommGetAsyncError)(self.live()?, &mut code) };
        self.check("ncclCommGetAsyncError", asked)?;
        Ok(code)
    }

    /// The failure that the library reports by itself, if any.
    pub(crate) fn broken(&self) -> Option<Error> {
        match self.async_error() {
            Ok(ncclSuccess | ncclInProgress) => None,
            Ok(code) => Some(failure(&self.nccl.error("an operation in progress", code))),
            Err(err) => Some(err),
        }
    }

    fn check(&self, call: &'static str, code: ncclResult_t) -> Result<()> {
        self.nccl.check(call, code).map_err(|err| failure(&err))
    }

    /// The handle, unless it has been freed.
    fn live(&self) -> Result<ncclComm_t> {
        let handle = self.handle.load(Ordering::Acquire);
        match handle.is_null() {
            true => Err(Error::new(
                ErrorKind::Aborted,
                "the communicator was aborted",
            )),
            false => Ok(handle),
        }
    }

    /// The operators of premultiplied sums, by step.
    fn make_operators(
        &self,
        steps: &[Step],
        patience: Patience<'_>,
    ) -> Result<Vec<Option<ncclRedOp_t>>> {
        let make = |step: &Step| {
            let Some(Operator::Premul { factor, dtype }) = step.operator() else {
                return Ok(None);
            };
            let (mut op, mut factor) = (ncclSum, *factor);
            // SAFETY: room for an operator; the factor has the type that `dtype` says and is read
            // during the call.
            let made = unsafe {
                (self.nccl.ncclRedOpCreatePreMulSum)(
                    &mut op,
                    factor.as_mut_ptr().cast::<c_void>(),
                    *dtype,
                    ncclScalarHostImmediate,
                    self.live()?,
                )
            };
            self.check("ncclRedOpCreatePreMulSum", made)?;
            self.settle("ncclRedOpCreatePreMulSum", patience)?;
            Ok(Some(op))
        };
        steps.iter().map(make).collect()
    }

    fn free_operators(&self, made: Vec<Option<ncclRedOp_t>>) -> Result<()> {
        for operator in made.into_iter().flatten() {
            // SAFETY: made for this communicator, and no longer needed by what was enqueued.
            let freed = unsafe { (self.nccl.ncclRedOpDestroy)(operator, self.live()?) };
            self.check("ncclRedOpDestroy", freed)?;
        }
        Ok(())
    }

    fn call(&self, step: &Step, made: Option<ncclRedOp_t>, stream: RawStream) -> Result<()> {
        let (nccl, comm, stream) = (self.nccl, self.live()?, stream as cudaStream_t);
        let (send, recv) = (step.send as *const c_void, step.recv as *mut c_void);
        let (count, dtype) = (step.count, step.dtype);
        let op = |operator: &Operator| match operator {
            Operator::Plain(op) => *op,
            Operator::Premul { .. } => made.unwrap_or(ncclSum),
        };
        // SAFETY: a live communicator and stream of one device. The addresses are those of the
        // call's buffers, which the operation owns until its end event has been reached, and the
        // counts were taken from them (`step.rs`).
        let (name, code) = unsafe {
            match &step.kind {
                Kind::AllReduce(operator) => (
                    "ncclAllReduce",
                    (nccl.ncclAllReduce)(send, recv, count, dtype, op(operator), comm, stream),
                ),
                Kind::Reduce(operator, root) => (
                    "ncclReduce",
                    (nccl.ncclReduce)(send, recv, count, dtype, op(operator), *root, comm, stream),
                ),
                Kind::ReduceScatter(operator) => (
                    "ncclReduceScatter",
                    (nccl.ncclReduceScatter)(send, recv, count, dtype, op(operator), comm, stream),
                ),
                Kind::Broadcast(root) => (
                    "ncclBroadcast",
                    (nccl.ncclBroadcast)(send, recv, count, dtype, *root, comm, stream),
                ),
                Kind::AllGather => (
                    "ncclAllGather",
                    (nccl.ncclAllGather)(send, recv, count, dtype, comm, stream),
                ),
                Kind::Send(peer) => (
                    "ncclSend",
                    (nccl.ncclSend)(send, count, dtype, *peer, comm, stream),
                ),
                Kind::Recv(peer) => (
                    "ncclRecv",
                    (nccl.ncclRecv)(recv, count, dtype, *peer, comm, stream),
                ),
                Kind::AllToAll(call) => {
                    ("ncclAlltoAll", call(send, recv, count, dtype, comm, stream))
                }
                Kind::Gather(call, root) => (
                    "ncclGather",
                    call(send, recv, count, dtype, *root, comm, stream),
                ),
                Kind::Scatter(call, root) => (
                    "ncclScatter",
                    call(send, recv, count, dtype, *root, comm, stream),
                ),
            }
        };
        self.check(name, code)
    }

    /// Begins an orderly end, which takes all ranks.
    pub(crate) fn begin_end(&self) -> Result<()> {
        // SAFETY: a live communicator.
        let code = unsafe { (self.nccl.ncclCommFinalize)(self.live()?) };
        self.check("ncclCommFinalize", code)
    }

    /// Waits for the end that [`begin_end`](Comm::begin_end) began.
    pub(crate) fn end(&self, patience: Patience<'_>) -> Result<()> {
        self.settle("ncclCommFinalize", patience)?;
        let handle = self.handle.swap(ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: taken out, so that nobody else frees it; a null handle is nothing to free.
        self.check("ncclCommDestroy", unsafe {
            (self.nccl.ncclCommDestroy)(handle)
        })
    }

    /// Ends what is going on and frees it; once, by whoever comes first.
    ///
    /// May run beside a call of another thread that does not come back, which this ends.
    pub(crate) fn abort(&self) {
        let handle = self.handle.swap(ptr::null_mut(), Ordering::AcqRel);
        if handle.is_null() {
            return;
        }
        // SAFETY: taken out, so that nobody else frees it. NCCL allows an abort beside a call
        // that is in progress.
        let code = unsafe { (self.nccl.ncclCommAbort)(handle) };
        if let Err(err) = self.check("ncclCommAbort", code) {
            tracing::warn!("{err}");
        }
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        self.abort();
    }
}
