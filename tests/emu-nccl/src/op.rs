//! Operations: collected in groups, run on streams.

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nccl_sys::*;

use crate::comm::Comm;
use crate::driver::driver;
use crate::fault::{self, Fault};
use crate::hub::element;
use crate::last_error::fail;
use crate::tally::GROUPS;
use crate::wire::{Failure, Request, What};

/// What to tell the hub, and which memory it reads and writes.
pub(crate) struct Op {
    pub(crate) what: What,
    /// Address and bytes.
    pub(crate) input: (u64, usize),
    pub(crate) output: u64,
}

struct Queued {
    comm: Arc<Comm>,
    stream: usize,
    op: Op,
}

/// The operations of one communicator and stream that a group call starts together.
struct Job {
    comm: Arc<Comm>,
    stream: usize,
    ops: Vec<Op>,
    fault: Option<Fault>,
}

#[derive(Default)]
struct Group {
    depth: usize,
    queued: Vec<Queued>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Bytes of `count` elements, if the emulator knows the type.
pub(crate) fn byte_len(dtype: ncclDataType_t, count: usize) -> Option<usize> {
    count.checked_mul(element(dtype)?.size())
}

/// Takes an operation; starts it unless a group is open.
pub(crate) fn add(comm: &Arc<Comm>, stream: cudaStream_t, op: Op) -> ncclResult_t {
    match comm.state() {
        ncclSuccess => {}
        ncclInProgress => {
            eprintln!("[emu-nccl] a call while the one before is in progress");
            return fail(ncclInvalidUsage, "the call before is in progress");
        }
        code => return fail(code, comm.why()),
    }
    let queued = Queued {
        comm: Arc::clone(comm),
        stream: stream as usize,
        op,
    };
    let open = GROUP.with_borrow_mut(|group| match group.depth {
        0 => Some(queued),
        _ => {
            group.queued.push(queued);
            None
        }
    });
    open.map_or(ncclSuccess, |queued| start(vec![queued]))
}

pub(crate) fn open_group() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

pub(crate) fn close_group() -> ncclResult_t {
    let queued = GROUP.with_borrow_mut(|group| {
        group.depth = group.depth.checked_sub(1)?;
        Some(match group.depth {
            0 => std::mem::take(&mut group.queued),
            _ => Vec::new(),
        })
    });
    match queued {
        Some(queued) => {
            if !queued.is_empty() {
                GROUPS.fetch_add(1, Ordering::Relaxed);
            }
            start(queued)
        }
        None => fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call"),
    }
}

fn start(queued: Vec<Queued>) -> ncclResult_t {
    let mut jobs: Vec<Job> = Vec::new();
    for Queued { comm, stream, op } in queued {
        let own = |job: &&mut Job| Arc::ptr_eq(&job.comm, &comm) && job.stream == stream;
        match jobs.iter_mut().find(own) {
            Some(job) => job.ops.push(op),
            None => jobs.push(Job {
                comm,
                stream,
                ops: vec![op],
                fault: fault::next(),
            }),
        }
    }
    let mut outcome = ncclSuccess;
    for job in jobs {
        if job.fault == Some(Fault::Block) {
            job.comm.spin();
            return fail(ncclInternalError, "aborted");
        }
        let comm = Arc::clone(&job.comm);
        let begun = comm.proceed(|comm| match comm.meet() {
            ncclSuccess => launch(job),
            code => code,
        });
        if outcome == ncclSuccess {
            outcome = begun;
        }
    }
    outcome
}

fn launch(job: Job) -> ncclResult_t {
    let Some(driver) = driver() else {
        return ncclUnhandledCudaError;
    };
    let stream = job.stream;
    let argument = Box::into_raw(Box::new(job)).cast::<c_void>();
    match driver.launch(stream, run, argument) {
        true => ncclSuccess,
        false => {
            // SAFETY: the driver did not take it, so it is still this function's.
            drop(unsafe { Box::from_raw(argument.cast::<Job>()) });
            ncclUnhandledCudaError
        }
    }
}

/// The kernel: on the stream's thread, when its turn has come.
unsafe extern "C" fn run(argument: *mut c_void) {
    // SAFETY: `launch` made it from a box, and the driver calls once.
    let job = unsafe { Box::from_raw(argument.cast::<Job>()) };
    let comm = &job.comm;
    let failure = match job.fault {
        None => job.exchange().err(),
        Some(Fault::Exit) => std::process::exit(17),
        Some(Fault::Async(code)) => Some(Some(Failure {
            code,
            why: "an injected asynchronous error".into(),
        })),
        Some(Fault::Hang | Fault::Block) => Some(None),
    };
    let Some(failure) = failure else { return };
    if let Some(failure) = failure.filter(|_| !comm.is_aborted()) {
        comm.break_with(&failure);
    }
    comm.spin();
}

impl Job {
    /// Tells the hub all operations and takes all answers. An error without a failure is one that
    /// nobody is told about: the kernel hangs.
    fn exchange(&self) -> Result<(), Option<Failure>> {
        let comm = &self.comm;
        let _talking = comm.talking.lock();
        let driver = driver().expect("there was one when it was launched");
        for (index, op) in self.ops.iter().enumerate() {
            let (address, len) = op.input;
            let data = driver.read(address, len).ok_or_else(illegal)?;
            let request = Request {
                index,
                what: op.what.clone(),
                data,
            };
            comm.tell(&request).map_err(|_| lost())?;
        }
        for _ in &self.ops {
            let reply = comm.hear().map_err(|_| lost())?;
            let data = reply.result.map_err(Some)?;
            let Some(op) = reply.index.and_then(|index| self.ops.get(index)) else {
                return Err(None);
            };
            if !driver.write(op.output, &data) {
                return Err(illegal());
            }
        }
        Ok(())
    }
}

fn illegal() -> Option<Failure> {
    Some(Failure {
        code: ncclUnhandledCudaError.0,
        why: "Cuda failure: an illegal memory access was encountered".into(),
    })
}

/// The hub is gone, and with it the process that made the id.
fn lost() -> Option<Failure> {
    let tells = std::env::var("EMU_NCCL_PEER_DEATH").is_ok_and(|how| how == "remote_error");
    tells.then(|| Failure {
        code: ncclRemoteError.0,
        why: "the connection to the peers is closed".into(),
    })
}
