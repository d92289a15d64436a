//! The exported functions.

use std::ffi::c_int;

use nccl_sys::*;

use crate::last_error::fail;

/// Runs a function's body and answers as C does.
fn answer(body: impl FnOnce() -> Result<ncclResult_t, ncclResult_t>) -> ncclResult_t {
    body().unwrap_or_else(|code| code)
}

/// Writes a result where the caller wants it; null is refused.
fn give<T>(to: *mut T, value: T) -> Result<ncclResult_t, ncclResult_t> {
    if to.is_null() {
        return Err(fail(ncclInvalidArgument, "out argument is NULL"));
    }
    // SAFETY: not null, and by NCCL's contract room for a value of this type.
    unsafe { to.write(value) };
    Ok(ncclSuccess)
}

/// What this library says it is.
fn version() -> c_int {
    let chosen = std::env::var("EMU_NCCL_VERSION").ok();
    chosen.and_then(|text| text.parse().ok()).unwrap_or(23203)
}

mod comm;
mod data;
mod library;
