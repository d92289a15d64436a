//! A result code with the library's own words.

use std::ffi::{CStr, c_char};
use std::ptr;

use crate::table::Nccl;
use crate::types::{ncclComm_t, ncclInProgress, ncclResult_t, ncclSuccess};

/// A call that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {code:?}, {text}{}", said(last))]
pub struct NcclError {
    /// The function.
    pub call: &'static str,
    /// What it returned.
    pub code: ncclResult_t,
    /// What that means.
    pub text: String,
    /// What the library wrote down about its last error; may be empty.
    pub last: String,
}

fn said(last: &str) -> String {
    match last {
        "" => String::new(),
        last => format!(" ({last})"),
    }
}

impl Nccl {
    /// Whether a call went well, or of a non-blocking communicator goes on by itself.
    pub fn check(&self, call: &'static str, code: ncclResult_t) -> Result<(), NcclError> {
        match code {
            ncclSuccess | ncclInProgress => Ok(()),
            code => Err(self.error(call, code)),
        }
    }

    /// The failure of `call` with `code`.
    ///
    /// Reads the last error, which is of any thread and any communicator: right after a failure
    /// it is most likely this one's.
    pub fn error(&self, call: &'static str, code: ncclResult_t) -> NcclError {
        let no_comm: ncclComm_t = ptr::null_mut();
        // SAFETY: both take any code, and no communicator; the results are texts of the library's
        // that stay, or null.
        let (text, last) = unsafe {
            (
                words((self.ncclGetErrorString)(code)),
                words((self.ncclGetLastError)(no_comm)),
            )
        };
        NcclError {
            call,
            code,
            text,
            last: last.trim().to_owned(),
        }
    }
}

/// # Safety
///
/// Null, or a C string that nobody writes to during the call.
unsafe fn words(text: *const c_char) -> String {
    match text.is_null() {
        true => String::new(),
        // SAFETY: as the caller promises.
        false => unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned(),
    }
}
