//! Contexts, the current one, legacy and per-thread default streams.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::code::{INVALID_CONTEXT, INVALID_DEVICE, NOT_INITIALIZED, Result};
use crate::event::{Event, Mark};
use crate::handles::Handles;
use crate::memory;
use crate::stream::Stream;

pub(crate) static INITIALIZED: AtomicBool = AtomicBool::new(false);
pub(crate) static STREAMS: Handles<Stream> = Handles::new();
pub(crate) static EVENTS: Handles<Event> = Handles::new();

/// The primary context of a device; there are no others.
pub(crate) struct Context {
    pub(crate) device: usize,
    pub(crate) retained: AtomicUsize,
    legacy: Arc<Stream>,
    /// All streams, the legacy one included.
    pub(crate) streams: Mutex<Vec<Arc<Stream>>>,
}

thread_local! {
    static CURRENT: Cell<Option<&'static Context>> = const { Cell::new(None) };
    static STACK: RefCell<Vec<Option<&'static Context>>> = const { RefCell::new(Vec::new()) };
    static OWN_STREAMS: RefCell<BTreeMap<usize, Arc<Stream>>> =
        const { RefCell::new(BTreeMap::new()) };
}

pub(crate) fn check_initialized() -> Result<()> {
    match INITIALIZED.load(Ordering::Acquire) {
        true => Ok(()),
        false => Err(NOT_INITIALIZED),
    }
}

pub(crate) fn ordinal(device: i32) -> Result<usize> {
    check_initialized()?;
    let ordinal = usize::try_from(device).ok();
    ordinal
        .filter(|&ordinal| ordinal < memory::count())
        .ok_or(INVALID_DEVICE)
}

pub(crate) fn primary(device: usize) -> &'static Context {
    static PRIMARY: OnceLock<Vec<OnceLock<Context>>> = OnceLock::new();
    let contexts = PRIMARY.get_or_init(|| (0..memory::count()).map(|_| OnceLock::new()).collect());
    contexts[device].get_or_init(|| {
        let legacy = Stream::start(device, 0, 0);
        Context {
            device,
            retained: AtomicUsize::new(0),
            streams: Mutex::new(vec![Arc::clone(&legacy)]),
            legacy,
        }
    })
}

impl Context {
    pub(crate) fn handle(&'static self) -> *mut c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }

    pub(crate) fn add(&self, stream: &Arc<Stream>) {
        self.streams.lock().push(Arc::clone(stream));
    }

    pub(crate) fn forget(&self, stream: &Arc<Stream>) {
        self.streams
            .lock()
            .retain(|other| !Arc::ptr_eq(other, stream));
    }
}

pub(crate) fn from_handle(handle: *mut c_void) -> Result<Option<&'static Context>> {
    if handle.is_null() {
        return Ok(None);
    }
    let mut all = (0..memory::count()).map(primary);
    all.find(|context| context.handle() == handle)
        .map(Some)
        .ok_or(INVALID_CONTEXT)
}

pub(crate) fn current() -> Result<&'static Context> {
    check_initialized()?;
    CURRENT.get().ok_or(INVALID_CONTEXT)
}

pub(crate) fn current_or_none() -> Option<&'static Context> {
    CURRENT.get()
}

pub(crate) fn set_current(context: Option<&'static Context>) {
    CURRENT.set(context);
}

pub(crate) fn push(context: Option<&'static Context>) {
    STACK.with_borrow_mut(|stack| stack.push(CURRENT.get()));
    CURRENT.set(context);
}

pub(crate) fn pop() {
    CURRENT.set(STACK.with_borrow_mut(Vec::pop).flatten());
}

/// What a stream handle means on this thread: 0 and 1 are the legacy default stream, 2 is a
/// stream of the thread's own.
pub(crate) fn stream(handle: *mut c_void) -> Result<Arc<Stream>> {
    match handle as usize {
        0 | 1 => Ok(Arc::clone(&current()?.legacy)),
        2 => {
            let context = current()?;
            Ok(OWN_STREAMS.with_borrow_mut(|streams| {
                let own = streams.entry(context.device).or_insert_with(|| {
                    let stream = Stream::start(context.device, 0, 0);
                    context.add(&stream);
                    stream
                });
                Arc::clone(own)
            }))
        }
        _ => STREAMS.get(handle),
    }
}

/// Puts a job on a stream, behind what the legacy default stream makes it wait for.
pub(crate) fn enqueue(stream: &Arc<Stream>, job: impl FnOnce() -> Result<()> + Send + 'static) {
    let context = primary(stream.device);
    let is_legacy = Arc::ptr_eq(stream, &context.legacy);
    let before: Vec<Arc<Stream>> = match (is_legacy, stream.joins_legacy) {
        (true, _) => {
            let streams = context.streams.lock();
            let others = streams.iter().filter(|other| !Arc::ptr_eq(other, stream));
            others.filter(|other| other.joins_legacy).cloned().collect()
        }
        (false, true) => vec![Arc::clone(&context.legacy)],
        (false, false) => Vec::new(),
    };
    for other in before {
        let join = Mark::put_on(&other);
        stream.push(move || {
            join.wait();
            Ok(())
        });
    }
    stream.push(job);
}
