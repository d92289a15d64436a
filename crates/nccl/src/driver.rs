//! The CUDA driver: devices, streams, events, and errors instead of panics.

use std::error::Error as _;
use std::fmt;
use std::sync::{Arc, OnceLock};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use libloading::Library;
use parking_lot::Mutex;
use phalanx_pg::{Error, ErrorKind, RawStream, Result};

/// The names under which cudarc looks for the driver on Linux that this project supports.
const NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];

/// Makes sure that there is a driver: without one every call of cudarc's panics.
pub(crate) fn ensure_driver() -> Result<()> {
    static PRESENT: OnceLock<Result<()>> = OnceLock::new();
    PRESENT.get_or_init(load).clone()
}

fn load() -> Result<()> {
    let mut reasons = Vec::new();
    for name in NAMES {
        // SAFETY: loading runs the driver's initialisers, as cudarc would.
        match unsafe { Library::new(name) } {
            Ok(library) => {
                // Stays: cudarc is about to open it too, and a driver is not unloaded.
                std::mem::forget(library);
                return check("cuInit", result::init());
            }
            Err(err) => reasons.push(err.source().map_or(err.to_string(), ToString::to_string)),
        }
    }
    Err(Error::unsupported(format!(
        "no CUDA driver on this machine ({}); the nccl backend needs an NVIDIA GPU with its driver",
        reasons.join("; ")
    )))
}

/// A driver call's result as this crate's.
pub(crate) fn check<T>(call: &str, result: Result<T, DriverError>) -> Result<T> {
    result.map_err(|err| {
        let name = err.error_name().ok().map(|name| name.to_string_lossy());
        let name = name.unwrap_or_else(|| format!("{:?}", err.0).into());
        let text = err.error_string().ok().map(|text| text.to_string_lossy());
        let text = text.filter(|text| *text != name).unwrap_or_default();
        Error::new(ErrorKind::Backend, format!("{call}: {name} {text}").trim())
    })
}

/// Number of devices that this process sees.
pub(crate) fn device_count() -> Result<usize> {
    ensure_driver()?;
    let count = check("cuDeviceGetCount", result::device::get_count())?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// A device's primary context, which frameworks use too.
pub(crate) struct Device {
    pub(crate) ordinal: u32,
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// Events that nobody uses.
    spare: Mutex<Vec<RawEvent>>,
}

// SAFETY: a context handle may be used from any thread; each makes it current for itself.
unsafe impl Send for Device {}
// SAFETY: as above; the list has a lock.
unsafe impl Sync for Device {}

impl Device {
    pub(crate) fn open(ordinal: u32) -> Result<Arc<Self>> {
        let count = device_count()?;
        if ordinal as usize >= count {
            return Err(Error::invalid(format!(
                "there is no cuda:{ordinal}, this process sees {count} devices; is \
                 CUDA_VISIBLE_DEVICES right?"
            )));
        }
        let device = check("cuDeviceGet", result::device::get(ordinal as i32))?;
        let pools = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        // SAFETY: the device was just looked up.
        let pools = unsafe { result::device::get_attribute(device, pools) };
        if check("cuDeviceGetAttribute", pools)? == 0 {
            return Err(Error::unsupported(format!(
                "cuda:{ordinal} has no memory pools (cuMemAllocAsync), which the nccl backend \
                 allocates from; is the driver older than 11.2, or the device virtual?"
            )));
        }
        // SAFETY: the device was just looked up; released when this value is dropped.
        let context = unsafe { result::primary_ctx::retain(device) };
        let context = check("cuDevicePrimaryCtxRetain", context)?;
        Ok(Arc::new(Self {
            ordinal,
            device,
            context,
            spare: Mutex::default(),
        }))
    }

    /// Makes it current for the calling thread, as every call on it needs, until the result is
    /// dropped.
    pub(crate) fn bind(&self) -> Result<Current> {
        let before = check("cuCtxGetCurrent", result::ctx::get_current())?;
        // SAFETY: the context is retained as long as `self` lives.
        check("cuCtxSetCurrent", unsafe {
            result::ctx::set_current(self.context)
        })?;
        Ok(Current { before })
    }

    /// An event that has not been recorded.
    pub(crate) fn event(self: &Arc<Self>) -> Result<Event> {
        let spare = self.spare.lock().pop();
        let raw = match spare {
            Some(raw) => raw,
            None => {
                let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
                RawEvent(check("cuEventCreate", result::event::create(flags))?)
            }
        };
        Ok(Event {
            raw,
            device: Arc::clone(self),
        })
    }

    /// An event that is reached when what is on `stream` now is done. On the calling thread: the
    /// per-thread default stream is another one on every thread.
    pub(crate) fn mark(self: &Arc<Self>, stream: RawStream) -> Result<Event> {
        let event = self.event()?;
        event.record(stream)?;
        Ok(event)
    }
}

/// While a device is current. A program may have another one, and gets it back.
#[must_use = "the device is current for as long as this lives"]
pub(crate) struct Current {
    before: Option<sys::CUcontext>,
}

impl Drop for Current {
    fn drop(&mut self) {
        let before = self.before.unwrap_or(std::ptr::null_mut());
        // SAFETY: it was the thread's current one, or none was, just before.
        let _ = unsafe { result::ctx::set_current(before) };
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _current = self.bind();
        for RawEvent(event) in self.spare.get_mut().drain(..) {
            // SAFETY: nobody else has it.
            let _ = unsafe { result::event::destroy(event) };
        }
        // SAFETY: retained once, in `open`.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuda:{}", self.ordinal)
    }
}

#[derive(Clone, Copy)]
struct RawEvent(sys::CUevent);

// SAFETY: an event handle may be used from any thread.
unsafe impl Send for RawEvent {}

/// A point on a stream. Goes back to its device's pool when dropped.
pub(crate) struct Event {
    raw: RawEvent,
    device: Arc<Device>,
}

// SAFETY: the driver allows events to be used from several threads at a time; nothing here changes
// the handle.
unsafe impl Sync for Event {}

impl Event {
    pub(crate) fn record(&self, stream: RawStream) -> Result<()> {
        // SAFETY: the event lives; the stream is the caller's word, see `Buffer::from_raw`.
        check("cuEventRecord", unsafe {
            result::event::record(self.raw.0, stream as sys::CUstream)
        })
    }

    /// Whether the stream has come this far.
    pub(crate) fn is_reached(&self) -> Result<bool> {
        // SAFETY: the event lives.
        match unsafe { result::event::query(self.raw.0) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(err) => check("cuEventQuery", Err(err)),
        }
    }

    /// Makes `stream` wait for it; the host does not.
    pub(crate) fn hold(&self, stream: RawStream) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: as in `record`.
        check("cuStreamWaitEvent", unsafe {
            result::stream::wait_event(stream as sys::CUstream, self.raw.0, flags)
        })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // A wait that is on a stream keeps what it needs; the handle may be recorded again.
        self.device.spare.lock().push(self.raw);
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Event")
    }
}

/// A stream of our own. Does not join with default streams: order is made by events only.
pub(crate) struct Stream {
    raw: RawStream,
    device: Arc<Device>,
}

impl Stream {
    pub(crate) fn new(device: &Arc<Device>, high_priority: bool) -> Result<Self> {
        let _current = device.bind()?;
        let kind = result::stream::StreamKind::NonBlocking;
        let priority = match high_priority {
            true => {
                let range = result::stream::get_priority_range();
                check("cuCtxGetStreamPriorityRange", range)?.1
            }
            false => 0,
        };
        let raw = result::stream::create_with_priority(kind, priority);
        Ok(Self {
            raw: check("cuStreamCreateWithPriority", raw)? as RawStream,
            device: Arc::clone(device),
        })
    }

    pub(crate) fn raw(&self) -> RawStream {
        self.raw
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _current = self.device.bind();
        // SAFETY: made in `new`, destroyed once; the driver lets what is on it finish.
        let _ = unsafe { result::stream::destroy(self.raw as sys::CUstream) };
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:#x} on {:?})", self.raw, self.device)
    }
}
