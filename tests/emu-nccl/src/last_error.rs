//! What `ncclGetLastError` says.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

use nccl_sys::ncclResult_t;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Notes why a call fails, and fails it.
pub(crate) fn fail(code: ncclResult_t, why: impl Into<Vec<u8>>) -> ncclResult_t {
    note(why);
    code
}

/// The text stays, as NCCL's does, until the next one.
pub(crate) fn note(why: impl Into<Vec<u8>>) {
    let why = CString::new(why).unwrap_or_default();
    LAST.with_borrow_mut(|last| *last = why);
}

pub(crate) fn last() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}
