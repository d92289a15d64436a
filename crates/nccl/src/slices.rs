//! Memory of programs that use cudarc themselves.

use std::ptr::NonNull;

use cudarc::driver::{CudaSlice, DevicePtr};
use phalanx_pg::{Buffer, Device, Element, RawStream};

/// Private, so that [`Buffer::owner`] cannot hand out a way to the memory.
struct Slice<T>(#[expect(dead_code, reason = "kept to be dropped")] CudaSlice<T>);

/// Takes over a slice's memory without copying: a framework's, if it is built on cudarc. Ready on
/// the slice's own stream, and freed there.
///
/// candle's `CudaStorage` holds such slices. Its default stream is the per-thread one: submit and
/// wait on the thread that computes.
pub fn buffer_from_slice<T: Element>(slice: CudaSlice<T>) -> Buffer {
    let stream = slice.stream().clone();
    let (len, ordinal) = (slice.len(), slice.ordinal());
    // Makes the stream wait for writers on other streams, where cudarc knows of them.
    let (address, read) = slice.device_ptr(&stream);
    drop(read);
    let pointer = match len {
        0 => NonNull::dangling(),
        _ => NonNull::new(address as *mut u8).expect("cudarc's slices have an address"),
    };
    let (device, raw) = (
        Device::Cuda(ordinal as u32),
        stream.cu_stream() as RawStream,
    );
    // SAFETY: the slice is owned: `len` initialised elements that nothing else reaches, alive until
    // it is dropped with the buffer.
    unsafe { Buffer::from_raw(pointer, T::DTYPE, len, device, raw, Box::new(Slice(slice))) }
}
