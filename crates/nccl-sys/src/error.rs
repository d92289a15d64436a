//! A result code with the library's own words.

use std::ffi::c_char;
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
        // SAFETY: both take any code, and no communicator; the results are null or places of the
        // library's that stay, with a text that ends or fills its buffer.
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

/// Bytes of the buffer for the last error in NCCL (`ncclLastError`); no text of its own is longer.
const LONGEST: usize = 1024;

/// A copy of a text of the library's. Other threads may write a new one meanwhile, as the last
/// error is one for all: then it is a mixture of both.
///
/// # Safety
///
/// Null, or a place that stays and can be read up to a zero byte, or for [`LONGEST`] bytes.
unsafe fn words(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: as the caller promises. One byte at a time and volatile: nothing is assumed about
    // bytes that were not looked at, or not to change.
    let byte = |at: usize| unsafe { text.cast::<u8>().add(at).read_volatile() };
    let bytes: Vec<u8> = (0..LONGEST)
        .map(byte)
        .take_while(|byte| *byte != 0)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_read_to_its_end_and_no_further_than_the_buffer() {
        // SAFETY: null, or as long as it must be.
        let read = |bytes: &[u8]| unsafe { words(bytes.as_ptr().cast()) };
        assert_eq!(read(b"no such rank\0 before"), "no such rank");
        assert_eq!(read(&[b'x'; LONGEST]), "x".repeat(LONGEST));
        // SAFETY: null.
        assert_eq!(unsafe { words(ptr::null()) }, "");
    }
}
