//! Communicators: state, connection, abort.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::io;
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::time::Duration;

use nccl_sys::*;
use parking_lot::Mutex;

use crate::driver::driver;
use crate::hub::{self, Address};
use crate::last_error::{fail, note};
use crate::wire::{self, Failure, Hello, Reply, Request, What};

/// How long a call of a non-blocking communicator goes on after it has returned: enough that
/// forgetting to ask shows.
const LATER: Duration = Duration::from_micros(100);

pub(crate) struct Comm {
    rank: usize,
    ranks: usize,
    pub(crate) device: c_int,
    pub(crate) blocking: bool,
    /// An `ncclResult_t`.
    state: AtomicI32,
    aborted: AtomicBool,
    /// A thread is inside a call.
    called: AtomicBool,
    /// Whether the first operation has yet to meet those of the other ranks.
    unmet: AtomicBool,
    /// Kept while an operation talks to the hub.
    pub(crate) talking: Mutex<()>,
    stream: Mutex<Option<TcpStream>>,
    pub(crate) factors: Mutex<BTreeMap<c_int, f64>>,
    why: Mutex<String>,
}

static COMMS: Mutex<BTreeMap<usize, Arc<Comm>>> = Mutex::new(BTreeMap::new());

/// The communicator behind a handle. Handles are not used twice, so a freed one is noticed.
pub(crate) fn find(comm: ncclComm_t) -> Result<Arc<Comm>, ncclResult_t> {
    if comm.is_null() {
        return Err(fail(ncclInvalidArgument, "comm argument is NULL"));
    }
    let found = COMMS.lock().get(&(comm as usize)).cloned();
    found.ok_or_else(|| {
        eprintln!("[emu-nccl] a communicator is used after it was freed");
        fail(ncclInvalidArgument, "the communicator has been freed")
    })
}

pub(crate) fn forget(comm: ncclComm_t) {
    COMMS.lock().remove(&(comm as usize));
}

/// Keeps other threads out of a communicator during a call.
pub(crate) struct Inside(Arc<Comm>);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.called.store(false, Ordering::Release);
    }
}

impl Comm {
    pub(crate) fn new(rank: usize, ranks: usize, device: c_int, blocking: bool) -> Arc<Self> {
        Arc::new(Self {
            rank,
            ranks,
            device,
            blocking,
            state: AtomicI32::new(ncclInProgress.0),
            aborted: AtomicBool::new(false),
            called: AtomicBool::new(false),
            unmet: AtomicBool::new(
                std::env::var("EMU_NCCL_CONNECT").is_ok_and(|how| how == "lazy"),
            ),
            talking: Mutex::new(()),
            stream: Mutex::new(None),
            factors: Mutex::default(),
            why: Mutex::default(),
        })
    }

    pub(crate) fn handle(self: &Arc<Self>) -> ncclComm_t {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        let handle = NEXT.fetch_add(1, Ordering::Relaxed) << 8;
        COMMS.lock().insert(handle, Arc::clone(self));
        handle as ncclComm_t
    }

    /// A call by this thread alone.
    pub(crate) fn enter(self: &Arc<Self>) -> Result<Inside, ncclResult_t> {
        match self.called.swap(true, Ordering::AcqRel) {
            false => Ok(Inside(Arc::clone(self))),
            true => {
                eprintln!("[emu-nccl] two threads call one communicator at the same time");
                Err(fail(ncclInvalidUsage, "two threads call the communicator"))
            }
        }
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn ranks(&self) -> usize {
        self.ranks
    }

    pub(crate) fn state(&self) -> ncclResult_t {
        ncclResult_t(self.state.load(Ordering::Acquire))
    }

    pub(crate) fn set_state(&self, state: ncclResult_t) {
        self.state.store(state.0, Ordering::Release);
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// An asynchronous error.
    pub(crate) fn break_with(&self, failure: &Failure) {
        *self.why.lock() = failure.why.clone();
        note(failure.why.as_bytes());
        self.set_state(ncclResult_t(failure.code));
    }

    pub(crate) fn why(&self) -> String {
        self.why.lock().clone()
    }

    /// What a kernel that cannot go on does.
    pub(crate) fn spin(&self) {
        while !self.is_aborted() {
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        if let Some(stream) = self.stream.lock().take() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        // Kernels see the flag and leave.
        drop(self.talking.lock());
    }

    /// Runs a part of a call: now, or for a non-blocking communicator a little later.
    pub(crate) fn proceed(
        self: &Arc<Self>,
        part: impl FnOnce(&Arc<Self>) -> ncclResult_t + Send + 'static,
    ) -> ncclResult_t {
        let comm = Arc::clone(self);
        let finish = move || {
            let result = part(&comm);
            if comm.state() == ncclInProgress {
                comm.set_state(result);
            }
            result
        };
        let (idle, busy) = (ncclSuccess.0, ncclInProgress.0);
        let begun = self
            .state
            .compare_exchange(idle, busy, Ordering::AcqRel, Ordering::Acquire);
        if let Err(state) = begun
            && state != busy
        {
            return ncclResult_t(state);
        }
        if self.blocking {
            return finish();
        }
        let later = move || {
            std::thread::sleep(LATER);
            finish();
        };
        match std::thread::Builder::new().spawn(later) {
            Ok(_) => ncclInProgress,
            Err(_) => ncclSystemError,
        }
    }

    /// Before the first operation, if ranks are to connect no earlier: waits for that of every
    /// other rank.
    pub(crate) fn meet(&self) -> ncclResult_t {
        match self.unmet.swap(false, Ordering::AcqRel) {
            true => self.outcome(&self.ask(What::Connect, Vec::new())),
            false => ncclSuccess,
        }
    }

    /// How a question to the hub went, as a call's result; a failure is also the communicator's.
    pub(crate) fn outcome(&self, answer: &Result<Vec<u8>, Failure>) -> ncclResult_t {
        match answer {
            Ok(_) => ncclSuccess,
            Err(failure) => {
                self.break_with(failure);
                ncclResult_t(failure.code)
            }
        }
    }

    /// Connects to the hub and waits for all ranks.
    pub(crate) fn connect(&self, id: ncclUniqueId) -> ncclResult_t {
        match self.try_connect(id) {
            Ok(()) => ncclSuccess,
            Err(_) if self.is_aborted() => ncclInternalError,
            Err(err) => {
                self.break_with(&Failure {
                    code: ncclSystemError.0,
                    why: format!("connecting: {err}"),
                });
                ncclSystemError
            }
        }
    }

    fn try_connect(&self, id: ncclUniqueId) -> io::Result<()> {
        let address = Address::of_id(id).ok_or_else(|| io::Error::other("not an emulated id"))?;
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, address.port))?;
        stream.set_nodelay(true)?;
        let hello = Hello {
            nonce: address.nonce,
            rank: self.rank(),
            ranks: self.ranks(),
        };
        wire::write(&mut stream, &hello)?;
        *self.stream.lock() = Some(stream.try_clone()?);
        if self.is_aborted() {
            return Err(io::Error::other("aborted"));
        }
        wire::read::<Reply>(&mut stream).map(drop)
    }

    /// Tells the hub; nobody else may talk meanwhile.
    pub(crate) fn tell(&self, request: &Request) -> io::Result<()> {
        wire::write(&mut self.connection()?, request)
    }

    pub(crate) fn hear(&self) -> io::Result<Reply> {
        wire::read(&mut self.connection()?)
    }

    fn connection(&self) -> io::Result<TcpStream> {
        let stream = self.stream.lock();
        let stream = stream.as_ref().ok_or_else(|| io::Error::other("aborted"))?;
        stream.try_clone()
    }

    /// One question and its answer.
    pub(crate) fn ask(&self, what: What, data: Vec<u8>) -> Result<Vec<u8>, Failure> {
        let _talking = self.talking.lock();
        let request = Request {
            index: 0,
            what,
            data,
        };
        let lost = |err: io::Error| Failure {
            code: ncclRemoteError.0,
            why: err.to_string(),
        };
        self.tell(&request).map_err(lost)?;
        self.hear().map_err(lost)?.result
    }
}

/// Joins a communicator.
pub(crate) fn join(
    out: *mut ncclComm_t,
    ranks: c_int,
    id: ncclUniqueId,
    rank: c_int,
    blocking: bool,
) -> ncclResult_t {
    let place = usize::try_from(rank).ok().zip(usize::try_from(ranks).ok());
    let Some((rank, ranks)) = place.filter(|(rank, ranks)| rank < ranks && !out.is_null()) else {
        return fail(
            ncclInvalidArgument,
            format!("invalid rank: {rank} of {ranks}"),
        );
    };
    if Address::of_id(id).is_none() {
        return fail(ncclInvalidArgument, "not a unique id of the emulator's");
    }
    let Some(device) = driver().and_then(|driver| driver.device()) else {
        let why = "Cuda failure: no current context of the emulated driver";
        return fail(ncclUnhandledCudaError, why);
    };
    let comm = Comm::new(rank, ranks, device, blocking);
    // SAFETY: not null, and by NCCL's contract room for a handle.
    unsafe { out.write(comm.handle()) };
    comm.proceed(move |comm| comm.connect(id))
}

/// Joins the communicator in which a split has given this rank a place.
pub(crate) fn join_split(
    parent: &Comm,
    place: &[u8],
    blocking: bool,
) -> (ncclComm_t, ncclResult_t) {
    let number = |at: usize| {
        let bytes = place.get(at..at + 4)?.try_into().ok()?;
        Some(u32::from_le_bytes(bytes) as usize)
    };
    let id = place.get(8..).and_then(|id| id.try_into().ok());
    let (Some(ranks), Some(rank), Some(id)) = (number(0), number(4), id) else {
        let code = fail(ncclInternalError, "the hub gave no place");
        return (std::ptr::null_mut(), code);
    };
    let child = Comm::new(rank, ranks, parent.device, blocking);
    let handle = child.handle();
    match child.proceed(move |child| child.connect(ncclUniqueId::from_bytes(id))) {
        // The child's own progress.
        ncclInProgress => (handle, ncclSuccess),
        code => (handle, code),
    }
}

/// Starts a hub and returns the id that names it.
pub(crate) fn new_id() -> Result<ncclUniqueId, ncclResult_t> {
    let address = hub::start();
    let address = address.map_err(|err| fail(ncclSystemError, format!("a hub: {err}")))?;
    Ok(address.to_id())
}
