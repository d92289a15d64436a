//! What `ncclGetLastError` says.

use std::ffi::{CString, c_char};
use std::sync::atomic::{AtomicPtr, Ordering};

use nccl_sys::ncclResult_t;

/// One for all threads, as in NCCL.
static LAST: AtomicPtr<c_char> = AtomicPtr::new(c"".as_ptr().cast_mut());

/// Notes why a call fails, and fails it.
pub(crate) fn fail(code: ncclResult_t, why: impl Into<Vec<u8>>) -> ncclResult_t {
    note(why);
    code
}

/// The text stays until the next one. It is never freed, since somebody may be reading it.
pub(crate) fn note(why: impl Into<Vec<u8>>) {
    let why = CString::new(why).unwrap_or_default();
    LAST.store(why.into_raw(), Ordering::Release);
}

pub(crate) fn last() -> *const c_char {
    LAST.load(Ordering::Acquire)
}
