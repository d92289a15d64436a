//! The MPI library of this process: started once, ended when the process does.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use mpi::ffi;
use parking_lot::{RwLock, RwLockReadGuard};
use phalanx_pg::{Error, ErrorKind, Result};

use crate::member::leave_all;

/// How long the end of the process waits for calls that other threads are in.
const LAST_CALLS: Duration = Duration::from_secs(2);

unsafe extern "C" {
    fn phalanx_mpi_in_place() -> *mut c_void;
    fn phalanx_mpi_tag_ub(comm: ffi::MPI_Comm) -> c_int;
    fn atexit(handler: extern "C" fn()) -> c_int;
}

/// What is known of the library once it runs.
#[derive(Debug)]
pub(crate) struct Library {
    /// The largest tag of a message.
    pub(crate) largest_tag: u32,
}

/// Held for reading by whoever is inside the library.
static INSIDE: RwLock<()> = RwLock::new(());
static ENDED: AtomicBool = AtomicBool::new(false);
/// Operations that go on without their callers.
static UNFINISHED: AtomicUsize = AtomicUsize::new(0);

/// Keeps the process from ending before an operation that others may depend on, for a while.
#[derive(Debug)]
pub(crate) struct Unfinished(());

impl Unfinished {
    pub(crate) fn new() -> Self {
        UNFINISHED.fetch_add(1, Ordering::AcqRel);
        Self(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        UNFINISHED.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The right to call MPI for a while.
#[derive(Debug)]
pub(crate) struct Inside(#[expect(dead_code, reason = "a lock")] RwLockReadGuard<'static, ()>);

/// Starts the library at the first call.
pub(crate) fn library() -> Result<&'static Library> {
    static LIBRARY: OnceLock<std::result::Result<Library, Error>> = OnceLock::new();
    LIBRARY.get_or_init(start).as_ref().map_err(Error::clone)
}

/// Keeps the library from ending. Many threads may be inside at the same time, none of them twice.
pub(crate) fn enter() -> Result<Inside> {
    let inside = INSIDE.read();
    match ENDED.load(Ordering::Acquire) {
        true => Err(Error::new(ErrorKind::Closed, "MPI has been finalized")),
        false => Ok(Inside(inside)),
    }
}

fn start() -> Result<Library> {
    let (mut running, mut level) = (0, 0);
    // SAFETY: may be called at any time, with room for one number each.
    check("MPI_Initialized", unsafe {
        ffi::MPI_Initialized(&raw mut running)
    })?;
    if running == 0 {
        // SAFETY: not started yet, and the lock around this says only once; MPI takes no arguments
        // from null pointers.
        check("MPI_Init_thread", unsafe {
            let (argc, argv) = (null_mut(), null_mut());
            ffi::MPI_Init_thread(argc, argv, ffi::RSMPI_THREAD_MULTIPLE, &raw mut level)
        })?;
        // SAFETY: a function that lives as long as the program.
        if unsafe { atexit(finish) } != 0 {
            tracing::warn!(target: "phalanx::mpi", "MPI will not be finalized");
        }
    } else {
        // SAFETY: started by the program, which then also ends it.
        check("MPI_Query_thread", unsafe {
            ffi::MPI_Query_thread(&raw mut level)
        })?;
    }
    // SAFETY: a constant of the library's.
    if level < unsafe { ffi::RSMPI_THREAD_MULTIPLE } {
        return Err(Error::unsupported(
            "this MPI does not let several threads call it at once (MPI_THREAD_MULTIPLE); use one \
             that is built with it, or start it so",
        ));
    }
    // SAFETY: the library runs; the constants are its own.
    let largest_tag = unsafe {
        for comm in [ffi::RSMPI_COMM_WORLD, ffi::RSMPI_COMM_SELF] {
            let set = ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN);
            check("MPI_Comm_set_errhandler", set)?;
        }
        phalanx_mpi_tag_ub(ffi::RSMPI_COMM_WORLD)
    };
    Ok(Library {
        // What the standard promises at least.
        largest_tag: u32::try_from(largest_tag).unwrap_or(32767),
    })
}

extern "C" fn finish() {
    // MPI_Finalize waits for all processes, which may be waiting for this one.
    leave_all();
    let start = Instant::now();
    while UNFINISHED.load(Ordering::Acquire) > 0 && start.elapsed() < LAST_CALLS {
        std::thread::sleep(Duration::from_millis(1));
    }
    ENDED.store(true, Ordering::Release);
    // A thread that is in a call whose peers are gone will not come back: then the launcher has to
    // clean up.
    if let Some(_alone) = INSIDE.try_write_for(LAST_CALLS) {
        let mut over = 0;
        // SAFETY: nobody is inside, and nobody gets in any more.
        unsafe {
            if ffi::MPI_Finalized(&raw mut over) == 0 && over == 0 {
                ffi::MPI_Finalize();
            }
        }
    }
}

/// The place of an argument that says: the input is where the output goes.
pub(crate) fn in_place() -> *const c_void {
    // SAFETY: returns a constant.
    unsafe { phalanx_mpi_in_place() }.cast_const()
}

/// Which of the standard's errors a return code stands for; the numbers are the library's own.
pub(crate) fn error_class(code: c_int) -> u32 {
    let mut class = 0;
    // SAFETY: may be called at any time, with room for one number.
    unsafe { ffi::MPI_Error_class(code, &raw mut class) };
    class.unsigned_abs()
}

/// The error that a return code of the library stands for.
pub(crate) fn check(call: &str, code: c_int) -> Result<()> {
    // MPI_SUCCESS, which the standard has as zero.
    if code == 0 {
        return Ok(());
    }
    let mut text = [0 as c_char; 4096];
    let mut len = 0;
    // SAFETY: there is more room than any implementation's MPI_MAX_ERROR_STRING.
    let told = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &raw mut len) };
    let text = match told {
        // SAFETY: MPI ends its texts in a zero, and the array does in any case.
        0 => unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy(),
        _ => "no text".into(),
    };
    let what = format!("{call}: {} (code {code})", text.trim());
    Err(Error::new(ErrorKind::Backend, what))
}
