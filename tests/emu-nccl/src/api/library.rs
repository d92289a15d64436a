//! The library itself: version, ids, errors, groups, memory.

use std::ffi::{c_char, c_int, c_void};

use nccl_sys::*;

use super::{answer, give, version};
use crate::driver::driver;
use crate::last_error::{self, fail};
use crate::{comm, op};

#[unsafe(no_mangle)]
extern "C" fn ncclGetVersion(out: *mut c_int) -> ncclResult_t {
    answer(|| give(out, version()))
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetUniqueId(id: *mut ncclUniqueId) -> ncclResult_t {
    answer(|| give(id, comm::new_id()?))
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(code: ncclResult_t) -> *const c_char {
    let text = match code {
        ncclSuccess => c"no error",
        ncclUnhandledCudaError => c"unhandled cuda error",
        ncclSystemError => c"unhandled system error",
        ncclInternalError => c"internal error",
        ncclInvalidArgument => c"invalid argument",
        ncclInvalidUsage => c"invalid usage",
        ncclRemoteError => c"remote process exited or there was a network error",
        ncclInProgress => c"NCCL operation in progress",
        ncclTimeout => c"timeout",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_comm: ncclComm_t) -> *const c_char {
    last_error::last()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupStart() -> ncclResult_t {
    op::open_group();
    ncclSuccess
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupEnd() -> ncclResult_t {
    op::close_group()
}

#[unsafe(no_mangle)]
extern "C" fn ncclMemAlloc(out: *mut *mut c_void, len: usize) -> ncclResult_t {
    answer(|| {
        let no_driver = || fail(ncclUnhandledCudaError, "no emulated driver");
        let driver = driver().ok_or_else(no_driver)?;
        let mut address = 0u64;
        // SAFETY: it points to room for an address.
        match unsafe { (driver.allocate)(&mut address, len) } {
            0 => give(out, address as *mut c_void),
            _ => Err(fail(ncclUnhandledCudaError, "Cuda failure: out of memory")),
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclMemFree(memory: *mut c_void) -> ncclResult_t {
    match driver().map(|driver| (driver.free)(memory as u64)) {
        Some(0) => ncclSuccess,
        _ => fail(ncclUnhandledCudaError, "Cuda failure: not an allocation"),
    }
}
