//! Device memory and copies.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use phalanx_pg::{Buffer, DType, Device as Place, Error, RawStream, Result, check_copy};

use crate::driver::{Device, Stream, check};

/// The stream on which a group's memory is ready and freed.
#[derive(Debug)]
pub(crate) enum Home {
    /// Of the group's own; lives as long as memory on it.
    Own(Stream),
    /// Of the program's.
    Given(RawStream),
}

impl Home {
    pub(crate) fn new(device: &Arc<Device>, given: Option<RawStream>) -> Result<Arc<Self>> {
        Ok(Arc::new(match given {
            Some(stream) => Self::Given(stream),
            None => Self::Own(Stream::new(device, false)?),
        }))
    }

    pub(crate) fn raw(&self) -> RawStream {
        match self {
            Self::Own(stream) => stream.raw(),
            Self::Given(stream) => *stream,
        }
    }
}

/// Memory that [`allocate`] took; freed on its stream, behind everything that uses it there.
struct Allocation {
    address: u64,
    home: Arc<Home>,
    device: Arc<Device>,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let freed = self.device.bind().and_then(|_current| {
            // SAFETY: from `malloc_async`, freed once; every buffer on it is gone. What still
            // runs on another stream has been waited for by this one: that is what `Work::wait`
            // does before it hands a buffer over.
            check("cuMemFreeAsync", unsafe {
                result::free_async(self.address, self.home.raw() as sys::CUstream)
            })
        });
        if let Err(err) = freed {
            tracing::warn!("{err}");
        }
    }
}

/// Zeroed device memory, to be used on `home`.
pub(crate) fn allocate(
    device: &Arc<Device>,
    dtype: DType,
    len: usize,
    home: &Arc<Home>,
) -> Result<Buffer> {
    let _current = device.bind()?;
    let stream = home.raw();
    let bytes = len
        .checked_mul(dtype.size())
        .ok_or_else(|| Error::invalid("the length overflows"))?;
    let place = Place::Cuda(device.ordinal);
    if bytes == 0 {
        // SAFETY: nothing can be reached through a buffer of no elements.
        return Ok(unsafe {
            Buffer::from_raw(NonNull::dangling(), dtype, 0, place, stream, Box::new(()))
        });
    }
    // SAFETY: the stream is one of this device; the group's own, or that of
    // `Options::set_stream`.
    let address = check("cuMemAllocAsync", unsafe {
        result::malloc_async(stream as sys::CUstream, bytes)
    })?;
    let allocation = Allocation {
        address,
        home: Arc::clone(home),
        device: Arc::clone(device),
    };
    // SAFETY: just allocated, with this many bytes, on this stream.
    check("cuMemsetD8Async", unsafe {
        result::memset_d8_async(address, 0, bytes, stream as sys::CUstream)
    })?;
    let pointer = NonNull::new(address as *mut u8)
        .ok_or_else(|| Error::invalid("the driver gave no address"))?;
    // SAFETY: a fresh allocation of the device's, initialised on its stream, that nothing else
    // reaches and that `allocation` keeps alive.
    Ok(unsafe { Buffer::from_raw(pointer, dtype, len, place, stream, Box::new(allocation)) })
}

/// See [`ProcessGroup::copy`](phalanx_pg::ProcessGroup::copy).
pub(crate) fn copy(
    device: &Arc<Device>,
    from: &Buffer,
    range: Range<usize>,
    to: &mut Buffer,
    at: usize,
) -> Result<()> {
    check_copy(from, &range, to, at)?;
    if range.is_empty() {
        return Ok(());
    }
    let _current = device.bind()?;
    let size = to.dtype().size();
    let (start, end, offset) = (range.start * size, range.end * size, at * size);
    match (from.device(), to.device()) {
        (Place::Cpu, Place::Cpu) => {
            let source = &from.as_bytes()?[start..end];
            to.as_bytes_mut()?[offset..][..source.len()].copy_from_slice(source);
            Ok(())
        }
        (Place::Cpu, _) => upload(device, &from.as_bytes()?[start..end], to, offset),
        (_, Place::Cpu) => {
            let target = &mut to.as_bytes_mut()?[offset..][..end - start];
            download(device, from, start, target)
        }
        _ => across(device, (from, start..end), to, offset),
    }
}

/// An address inside a buffer.
fn address(buffer: &Buffer, offset: usize) -> u64 {
    buffer.as_ptr().as_ptr() as u64 + offset as u64
}

fn upload(device: &Device, from: &[u8], to: &mut Buffer, offset: usize) -> Result<()> {
    check_own(device, to)?;
    let stream = to.stream() as sys::CUstream;
    // SAFETY: the range lies in `to`, which is borrowed mutably. The host's memory is borrowed
    // until the stream has been waited for: the driver stages what is not pinned, and reads later
    // what is.
    unsafe {
        let copied = result::memcpy_htod_async(address(to, offset), from, stream);
        check("cuMemcpyHtoDAsync", copied)?;
        check("cuStreamSynchronize", result::stream::synchronize(stream))
    }
}

fn download(device: &Device, from: &Buffer, start: usize, to: &mut [u8]) -> Result<()> {
    check_own(device, from)?;
    let stream = from.stream() as sys::CUstream;
    // SAFETY: the range lies in `from`; the host's memory is borrowed until the stream has been
    // waited for.
    unsafe {
        let copied = result::memcpy_dtoh_async(to, address(from, start), stream);
        check("cuMemcpyDtoHAsync", copied)?;
        check("cuStreamSynchronize", result::stream::synchronize(stream))
    }
}

/// From device memory to device memory, without the host.
fn across(
    device: &Arc<Device>,
    (from, range): (&Buffer, Range<usize>),
    to: &mut Buffer,
    offset: usize,
) -> Result<()> {
    check_own(device, from)?;
    check_own(device, to)?;
    let (source, target) = (from.stream(), to.stream());
    if source != target {
        device.mark(source)?.hold(target)?;
    }
    // SAFETY: both ranges lie in their buffers, whose memory lives; the copy runs on the target's
    // stream after what the source's has done.
    check("cuMemcpyDtoDAsync", unsafe {
        result::memcpy_dtod_async(
            address(to, offset),
            address(from, range.start),
            range.len(),
            target as sys::CUstream,
        )
    })?;
    if source != target {
        // What is put on the source's stream later, a free for example, waits for it.
        device.mark(target)?.hold(source)?;
    }
    Ok(())
}

/// Refuses memory of another device.
pub(crate) fn check_own(device: &Device, buffer: &Buffer) -> Result<()> {
    match buffer.device() {
        Place::Cuda(ordinal) if ordinal == device.ordinal => Ok(()),
        other => Err(Error::invalid(format!(
            "the buffer is on {other}, the group's device is {device:?}"
        ))),
    }
}
