//! Memory of programs that use cudarc themselves.

use std::any::Any;
use std::ptr::NonNull;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use phalanx_pg::{Buffer, Device, Element, RawStream};

/// Private, so that [`Buffer::owner`] cannot hand out a way to the memory.
struct Slice<T>(#[expect(dead_code, reason = "kept to be dropped")] CudaSlice<T>);

/// Takes over a slice's memory without copying: a framework's, if it is built on cudarc. Ready on
/// the slice's own stream, and freed there.
///
/// The per-thread default stream is another one on every thread: submit and wait on the thread
/// that computes.
pub fn buffer_from_slice<T: Element>(slice: CudaSlice<T>) -> Buffer {
    let (stream, len) = (slice.stream().clone(), slice.len());
    // Makes the stream wait for writers on other streams, where cudarc knows of them.
    let (address, read) = slice.device_ptr(&stream);
    drop(read);
    // SAFETY: the slice is owned: `len` initialised elements that nothing else reaches, alive until
    // it is dropped with the buffer.
    unsafe { buffer_at::<T>(address, len, &stream, Box::new(Slice(slice))) }
}

/// A buffer over `len` elements at an address of the device of `stream`.
///
/// # Safety
///
/// As for [`Buffer::from_raw`].
pub(crate) unsafe fn buffer_at<T: Element>(
    address: u64,
    len: usize,
    stream: &CudaStream,
    keep: Box<dyn Any + Send + Sync>,
) -> Buffer {
    let pointer = match len {
        0 => NonNull::dangling(),
        _ => NonNull::new(address as *mut u8).expect("cudarc's memory has an address"),
    };
    let device = Device::Cuda(stream.context().ordinal() as u32);
    let raw = stream.cu_stream() as RawStream;
    // SAFETY: the caller's word.
    unsafe { Buffer::from_raw(pointer, T::DTYPE, len, device, raw, keep) }
}
