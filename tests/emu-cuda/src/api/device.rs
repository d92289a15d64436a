//! Initialisation, devices, contexts, errors in words.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::Ordering;

use crate::code::{INVALID_CONTEXT, INVALID_VALUE, NO_DEVICE, answer, name};
use crate::context::{self, INITIALIZED, ordinal, primary};
use crate::memory;

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> c_int {
    answer(|| {
        if memory::count() == 0 {
            return Err(NO_DEVICE);
        }
        INITIALIZED.store(true, Ordering::Release);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    answer(|| {
        give!(version, 13000);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    answer(|| {
        context::check_initialized()?;
        give!(count, memory::count() as c_int);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGet(device: *mut c_int, number: c_int) -> c_int {
    answer(|| {
        give!(device, ordinal(number)? as c_int);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetName(text: *mut c_char, len: c_int, device: c_int) -> c_int {
    answer(|| {
        let name = format!("emulated device {} (host memory, no GPU)", ordinal(device)?);
        let room = usize::try_from(len).unwrap_or(0);
        if text.is_null() || room == 0 {
            return Err(INVALID_VALUE);
        }
        let shown = &name.as_bytes()[..name.len().min(room - 1)];
        // SAFETY: the caller gives room for `len` bytes; what is written and its end fit.
        unsafe {
            ptr::copy_nonoverlapping(shown.as_ptr(), text.cast(), shown.len());
            text.add(shown.len()).write(0);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int {
    answer(|| {
        give!(uuid, [0xE0 + ordinal(device)? as u8; 16]);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> c_int {
    answer(|| {
        ordinal(device)?;
        give!(bytes, memory::TOTAL);
        Ok(())
    })
}

/// Unified addressing, pools of memory, compute capability 9.0; all else is zero.
#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) -> c_int {
    answer(|| {
        ordinal(device)?;
        let known = match attribute {
            75 => 9,
            10 => 32,
            16 | 41 => 1,
            115 => c_int::from(std::env::var_os("EMU_CUDA_NO_POOLS").is_none()),
            _ => 0,
        };
        give!(value, known);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> c_int {
    answer(|| {
        let own = primary(ordinal(device)?);
        own.retained.fetch_add(1, Ordering::AcqRel);
        give!(context, own.handle());
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    answer(|| {
        let own = primary(ordinal(device)?);
        let less = |count: usize| count.checked_sub(1);
        let released = own
            .retained
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        released.map(drop).map_err(|_| INVALID_CONTEXT)
    })
}

fn current_handle() -> *mut c_void {
    context::current_or_none().map_or(ptr::null_mut(), |context| context.handle())
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> c_int {
    answer(|| {
        context::check_initialized()?;
        give!(context, current_handle());
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> c_int {
    answer(|| {
        context::set_current(context::from_handle(context)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> c_int {
    answer(|| {
        context::push(context::from_handle(context)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPopCurrent_v2(context: *mut *mut c_void) -> c_int {
    answer(|| {
        if !context.is_null() {
            give!(context, current_handle());
        }
        context::pop();
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetDevice(device: *mut c_int) -> c_int {
    answer(|| {
        give!(device, context::current()?.device as c_int);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> c_int {
    answer(|| {
        let streams = context::current()?.streams.lock().clone();
        let ends: Vec<_> = streams.iter().map(|stream| stream.synchronize()).collect();
        ends.into_iter().collect()
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> c_int {
    answer(|| {
        give!(least, 0);
        give!(greatest, -5);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(code: c_int, text: *mut *const c_char) -> c_int {
    answer(|| {
        give!(text, name(code).as_ptr());
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorString(code: c_int, text: *mut *const c_char) -> c_int {
    cuGetErrorName(code, text)
}
