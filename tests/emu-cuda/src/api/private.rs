//! What the emulated NCCL and tests need besides the driver's own functions.

use std::ptr;
use std::sync::atomic::Ordering;

use super::memory::HOST_COPIES;
use crate::memory::resolve;

/// Where the bytes of a device range are; null if it is not in one live allocation. Its presence
/// also tells this library from a real driver.
#[unsafe(no_mangle)]
extern "C" fn emu_cuda_resolve(address: u64, len: usize) -> *mut u8 {
    resolve(address, len).unwrap_or(ptr::null_mut())
}

/// How often memory was copied from or to the host, for tests to ask.
#[unsafe(no_mangle)]
extern "C" fn emu_cuda_host_copies() -> usize {
    HOST_COPIES.load(Ordering::Relaxed)
}
