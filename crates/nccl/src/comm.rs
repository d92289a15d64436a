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

/// One of NCCL's communicators, non-blocking: no call on it waits for a peer.
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

impl Comm {
    /// Joins the communicator of `size` ranks that `ids` name. The caller's thread has a device.
    pub(crate) fn join(
        nccl: &'static Nccl,
        ids: &mut [ncclUniqueId],
        rank: usize,
        size: usize,
        patience: Patience<'_>,
    ) -> Result<Self> {
        let mut config = ncclConfig_t::INITIALIZER;
        config.blocking = 0;
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
        let ready = nccl.check(call, code).map_err(|err| failure(&err));
        match ready.and_then(|()| comm.settle(call, patience)) {
            Ok(()) => Ok(comm),
            Err(err) => {
                comm.abort();
                Err(err)
            }
        }
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

    /// Puts the steps on `stream`, several as one group call.
    pub(crate) fn start(
        &self,
        steps: &[Step],
        stream: RawStream,
        patience: Patience<'_>,
    ) -> Result<()> {
        if steps.is_empty() {
            return Ok(());
        }
        let operators = self.make_operators(steps, patience)?;
        // SAFETY: no arguments.
        self.check("ncclGroupStart", unsafe { (self.nccl.ncclGroupStart)() })?;
        let called = steps
            .iter()
            .zip(&operators)
            .try_for_each(|(step, operator)| self.call(step, *operator, stream));
        // Also after a failure: the thread must not stay inside the group.
        // SAFETY: no arguments; a group is open.
        let ended = self.check("ncclGroupEnd", unsafe { (self.nccl.ncclGroupEnd)() });
        called.and(ended)?;
        self.settle("ncclGroupEnd", patience)?;
        for operator in operators.into_iter().flatten() {
            // SAFETY: made for this communicator, and no longer needed by what was enqueued.
            let freed = unsafe { (self.nccl.ncclRedOpDestroy)(operator, self.live()?) };
            self.check("ncclRedOpDestroy", freed)?;
        }
        Ok(())
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
