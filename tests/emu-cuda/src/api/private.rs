//! What the emulated NCCL needs besides the driver's own functions.

use std::ptr;

use crate::memory::resolve;

/// Where the bytes of a device range are; null if it is not in one live allocation. Its presence
/// also tells this library from a real driver.
#[unsafe(no_mangle)]
extern "C" fn emu_cuda_resolve(address: u64, len: usize) -> *mut u8 {
    resolve(address, len).unwrap_or(ptr::null_mut())
}
