//! Allocations and copies.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use std::{ptr, slice};

use crate::code::{ILLEGAL_ADDRESS, INVALID_VALUE, NOT_SUPPORTED, Result, answer};
use crate::context;
use crate::memory::{self, device, owner, resolve};
use crate::stream::Stream;

fn free(address: u64) -> Result<()> {
    let (_, device) = owner(address).ok_or(INVALID_VALUE)?;
    device.free(address)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAlloc_v2(address: *mut u64, len: usize) -> c_int {
    answer(|| {
        give!(address, device(context::current()?.device).allocate(len)?);
        Ok(())
    })
}

/// Waits for the device, as the driver does.
#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    answer(|| {
        let streams = context::current()?.streams.lock().clone();
        for stream in streams {
            // A stream's failure is its own.
            let _ = stream.synchronize();
        }
        free(address)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAllocAsync(address: *mut u64, len: usize, stream: *mut c_void) -> c_int {
    answer(|| {
        let stream = context::stream(stream)?;
        give!(address, device(stream.device).allocate(len)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: u64, stream: *mut c_void) -> c_int {
    answer(|| {
        let stream = context::stream(stream)?;
        context::enqueue(&stream, move || free(address).map_err(|_| ILLEGAL_ADDRESS));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    answer(|| {
        let used = device(context::current()?.device).in_use();
        give!(free, memory::TOTAL.saturating_sub(used));
        give!(total, memory::TOTAL);
        Ok(())
    })
}

/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE` and `..._DEVICE_ORDINAL`.
#[unsafe(no_mangle)]
extern "C" fn cuPointerGetAttribute(value: *mut c_int, attribute: c_uint, address: u64) -> c_int {
    answer(|| {
        let (ordinal, _) = owner(address).ok_or(INVALID_VALUE)?;
        match attribute {
            2 => give!(value, 2),
            9 => give!(value, ordinal as c_int),
            _ => return Err(NOT_SUPPORTED),
        }
        Ok(())
    })
}

/// One end of a copy.
#[derive(Clone, Copy)]
enum End {
    Host(usize),
    Device(u64),
}

impl End {
    /// Where the bytes are; a device address is looked up when the copy runs, as on a device.
    fn bytes(self, len: usize) -> Result<*mut u8> {
        match self {
            Self::Host(address) => Ok(address as *mut u8),
            Self::Device(address) => resolve(address, len).ok_or(ILLEGAL_ADDRESS),
        }
    }
}

/// A pause before copies between device addresses.
fn delay() -> Duration {
    static DELAY: OnceLock<Duration> = OnceLock::new();
    *DELAY.get_or_init(|| {
        let micros = std::env::var("EMU_CUDA_COPY_DELAY_US").ok();
        Duration::from_micros(micros.and_then(|text| text.parse().ok()).unwrap_or(0))
    })
}

fn copy(stream: &Arc<Stream>, to: End, from: End, len: usize) {
    context::enqueue(stream, move || {
        if matches!((to, from), (End::Device(_), End::Device(_))) {
            std::thread::sleep(delay());
        }
        let (to, from) = (to.bytes(len)?, from.bytes(len)?);
        // SAFETY: device ranges were checked just now; host ranges are the caller's word, which it
        // keeps until the copy is done. They may overlap.
        unsafe { ptr::copy(from, to, len) };
        Ok(())
    });
}

/// Pageable memory is staged before the call returns.
#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    len: usize,
    stream: *mut c_void,
) -> c_int {
    answer(|| {
        let stream = context::stream(stream)?;
        if from.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the driver's contract: `len` readable bytes.
        let staged = unsafe { slice::from_raw_parts(from.cast::<u8>(), len) }.to_vec();
        context::enqueue(&stream, move || {
            let to = resolve(to, len).ok_or(ILLEGAL_ADDRESS)?;
            // SAFETY: checked just now; the staged bytes are this job's.
            unsafe { ptr::copy_nonoverlapping(staged.as_ptr(), to, len) };
            Ok(())
        });
        Ok(())
    })
}

/// To pageable memory: done when the call returns.
#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    len: usize,
    stream: *mut c_void,
) -> c_int {
    answer(|| {
        let stream = context::stream(stream)?;
        copy(&stream, End::Host(to as usize), End::Device(from), len);
        stream.synchronize()
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: *mut c_void) -> c_int {
    answer(|| {
        let stream = context::stream(stream)?;
        copy(&stream, End::Device(to), End::Device(from), len);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, len: usize) -> c_int {
    answer(|| {
        let legacy = context::stream(ptr::null_mut())?;
        match cuMemcpyHtoDAsync_v2(to, from, len, ptr::null_mut()) {
            0 => legacy.synchronize(),
            code => Err(crate::code::Code(code)),
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, len: usize) -> c_int {
    cuMemcpyDtoHAsync_v2(to, from, len, ptr::null_mut())
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(to: u64, byte: u8, len: usize, stream: *mut c_void) -> c_int {
    answer(|| {
        let stream = context::stream(stream)?;
        context::enqueue(&stream, move || {
            let to = resolve(to, len).ok_or(ILLEGAL_ADDRESS)?;
            // SAFETY: checked just now.
            unsafe { ptr::write_bytes(to, byte, len) };
            Ok(())
        });
        Ok(())
    })
}
