//! Memory that an operation can own.
//!
//! A [`Buffer`] is the only handle on its range of memory. Giving it to an operation gives up
//! access until the operation hands it back, so nobody can read half-reduced values or free
//! memory under a network card. [`Frozen`] is the read-only form that can be shared.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::dtype::{DType, Device, Element};
use crate::error::{Error, Result};

/// Alignment of memory allocated here: a cache line, and enough for any vector instruction.
const ALIGN: usize = 64;

/// A device stream as an opaque number; zero is the default stream and all there is on the host.
pub type RawStream = usize;

/// A range of memory with one owner.
///
/// The model is that of the `bytes` crate: [`split_at`](Buffer::split_at) and
/// [`unsplit`](Buffer::unsplit) divide and join ranges without copying, and a range is never
/// reachable through two buffers.
///
/// ```
/// use phalanx_pg::Buffer;
///
/// let mut buf = Buffer::from_vec(vec![1.0f32, 2.0, 3.0, 4.0]);
/// buf.as_mut_slice::<f32>()?[0] = 10.0;
/// let (left, right) = buf.split_at(1);
/// assert_eq!(left.as_slice::<f32>()?, [10.0]);
/// assert_eq!(right.as_slice::<f32>()?, [2.0, 3.0, 4.0]);
/// # Ok::<(), phalanx_pg::Error>(())
/// ```
///
/// `Send` and `Sync`: a buffer may move to and be read from other threads, like a `Vec`.
pub struct Buffer(
    /// Behind a pointer: a buffer moves with its call and with the result, several times in an
    /// operation that may take no longer than copying four words that often does.
    Box<Span>,
);

/// What a buffer is a handle on.
struct Span {
    storage: Arc<Storage>,
    /// Bytes from the start of the storage.
    offset: usize,
    /// In elements.
    len: usize,
    dtype: DType,
}

/// A block of memory that one or more buffers divide among themselves.
struct Storage {
    ptr: NonNull<u8>,
    bytes: usize,
    device: Device,
    stream: RawStream,
    /// Frees the memory when dropped; says whose it is.
    owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the pointer is reached only through `Buffer`s, which divide the block into disjoint
// ranges and hand out `&[T]` for `&Buffer` and `&mut [T]` for `&mut Buffer`; so threads are
// subject to the same rules as for a `Vec`. The owner is Send and Sync itself.
unsafe impl Send for Storage {}
// SAFETY: as above.
unsafe impl Sync for Storage {}

/// A block allocated here.
struct HostBlock {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the block is owned memory; this type only frees it.
unsafe impl Send for HostBlock {}
// SAFETY: as above.
unsafe impl Sync for HostBlock {}

/// A vector taken over. Private, so that [`Buffer::owner`] cannot hand out a reference to memory
/// that a buffer writes to.
struct Vector<T>(#[expect(dead_code, reason = "kept to be dropped")] Vec<T>);

/// A value taken over with its memory. Private as [`Vector`].
struct Owned<O>(NonNull<O>);

// SAFETY: the value is owned, may be dropped on any thread, and is not reached before that.
unsafe impl<O: Send> Send for Owned<O> {}
// SAFETY: a reference to this gives no access to the value.
unsafe impl<O: Send> Sync for Owned<O> {}

impl<O> Drop for Owned<O> {
    fn drop(&mut self) {
        // SAFETY: it came from a box and is turned back once, here, when no Buffer is left to use
        // the borrow of it.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        // SAFETY: `ptr` came from `alloc_zeroed` with this layout and is freed once, here; every
        // Buffer into it held the Storage that owns this value, so none is left.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) }
    }
}

impl Buffer {
    /// Zeroed host memory.
    pub fn zeroed(dtype: DType, len: usize) -> Self {
        let bytes = len
            .checked_mul(dtype.size())
            .expect("buffer length overflows");
        if bytes == 0 {
            return Self::from_block(NonNull::<u64>::dangling().cast(), 0, Box::new(()), dtype, 0);
        }
        let layout = Layout::from_size_align(bytes, ALIGN).expect("buffer length overflows");
        // SAFETY: the layout has a non-zero size.
        let ptr = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(ptr) else {
            handle_alloc_error(layout)
        };
        Self::from_block(ptr, bytes, Box::new(HostBlock { ptr, layout }), dtype, len)
    }

    /// Takes over a vector's memory without copying.
    pub fn from_vec<T: Element>(mut vec: Vec<T>) -> Self {
        let (ptr, len) = (vec.as_mut_ptr(), vec.len());
        let ptr = NonNull::new(ptr.cast()).expect("a vector's pointer is never null");
        Self::from_block(
            ptr,
            len * size_of::<T>(),
            Box::new(Vector(vec)),
            T::DTYPE,
            len,
        )
    }

    /// Takes over the memory of any value that owns some, such as a framework's tensor, without
    /// copying. Gives it back if its bytes cannot be elements of this type: for their number, their
    /// alignment, or since not every byte is a boolean.
    pub fn from_owner<O>(dtype: DType, owner: O) -> std::result::Result<Self, O>
    where
        O: AsMut<[u8]> + Send + 'static,
    {
        let owner = NonNull::from(Box::leak(Box::new(owner)));
        // SAFETY: nobody else has the value, and it stays in its box until `Owned` is dropped: this
        // mutable borrow of it lasts until then.
        let bytes = unsafe { &mut *owner.as_ptr() }.as_mut();
        let (ptr, count, size) = (bytes.as_mut_ptr(), bytes.len(), dtype.size());
        if count == 0 {
            // SAFETY: it came from a box above, and the borrow has ended.
            drop(unsafe { Box::from_raw(owner.as_ptr()) });
            return Ok(Self::zeroed(dtype, 0));
        }
        let fits = count % size == 0 && ptr.align_offset(size) == 0 && dtype != DType::Bool;
        if !fits {
            // SAFETY: it came from a box above, and the borrow has ended.
            return Err(*unsafe { Box::from_raw(owner.as_ptr()) });
        }
        let ptr = NonNull::new(ptr).expect("a slice's pointer is never null");
        let owner = Box::new(Owned(owner));
        Ok(Self::from_block(ptr, count, owner, dtype, count / size))
    }

    /// A copy of a slice.
    pub fn from_slice<T: Element>(slice: &[T]) -> Self {
        let mut buffer = Self::zeroed(T::DTYPE, slice.len());
        buffer
            .as_bytes_mut()
            .expect("host memory")
            .copy_from_slice(bytemuck::cast_slice(slice));
        buffer
    }

    /// Booleans, one byte each.
    pub fn from_bools(values: &[bool]) -> Self {
        let mut buffer = Self::zeroed(DType::Bool, values.len());
        let bytes = buffer.as_bytes_mut().expect("host memory");
        bytes
            .iter_mut()
            .zip(values)
            .for_each(|(byte, &value)| *byte = value.into());
        buffer
    }

    /// Memory that something else provides: a framework's tensor, shared memory, a device.
    ///
    /// `keep` keeps it alive; backends recognise their own memory by its type, see
    /// [`owner`](Buffer::owner).
    ///
    /// # Safety
    ///
    /// Until `keep` is dropped, `ptr` must be valid for reads and writes of `len` elements,
    /// aligned for `dtype`, initialised, and not reached in any other way, nor through `&keep`,
    /// which [`owner`](Buffer::owner) hands out to safe code; except that a backend
    /// may let peers reach it while an operation that owns the buffer runs. For device memory,
    /// valid means valid for the device, and `stream` is the one on which it may be used next.
    pub unsafe fn from_raw(
        ptr: NonNull<u8>,
        dtype: DType,
        len: usize,
        device: Device,
        stream: RawStream,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Self {
        let bytes = len
            .checked_mul(dtype.size())
            .expect("buffer length overflows");
        let storage = Storage {
            ptr,
            bytes,
            device,
            stream,
            owner: keep,
        };
        Self::whole(storage, dtype, len)
    }

    fn from_block(
        ptr: NonNull<u8>,
        bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
        dtype: DType,
        len: usize,
    ) -> Self {
        let storage = Storage {
            ptr,
            bytes,
            device: Device::Cpu,
            stream: 0,
            owner,
        };
        Self::whole(storage, dtype, len)
    }

    fn whole(storage: Storage, dtype: DType, len: usize) -> Self {
        Self(Box::new(Span {
            storage: Arc::new(storage),
            offset: 0,
            len,
            dtype,
        }))
    }

    /// Number of elements.
    #[inline]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there are no elements.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Number of bytes.
    #[inline]
    pub fn byte_len(&self) -> usize {
        self.0.len * self.0.dtype.size()
    }

    /// Type of the elements.
    #[inline]
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Where the memory is.
    #[inline]
    pub fn device(&self) -> Device {
        self.0.storage.device
    }

    /// The stream on which device memory is ready; zero on the host.
    pub fn stream(&self) -> RawStream {
        self.0.storage.stream
    }

    /// The value that keeps the memory alive, if it is a `T`: how a backend recognises its own.
    pub fn owner<T: Any>(&self) -> Option<&T> {
        self.0.storage.owner.downcast_ref()
    }

    /// Bytes from the start of the block that [`owner`](Buffer::owner) keeps alive.
    #[inline]
    pub fn offset(&self) -> usize {
        self.0.offset
    }

    /// The address, for backends that hand it to a library or a device.
    ///
    /// Reading and writing through it follows the rules of `&Buffer` and `&mut Buffer`.
    #[inline]
    pub fn as_ptr(&self) -> NonNull<u8> {
        debug_assert!(self.0.offset + self.byte_len() <= self.0.storage.bytes);
        // SAFETY: offset is at most the block's length (kept by split_at and unsplit), so the
        // result is in the block or one past its end.
        unsafe { self.0.storage.ptr.add(self.0.offset) }
    }

    /// The elements, if they are in host memory and of this type.
    ///
    /// Elements of [`DType::Bool`] are readable as `u8`.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.check::<T>()?;
        // SAFETY: host memory, in bounds and aligned (see `as_ptr`, and split_at cuts between
        // elements), of plain old data that any bytes are a value of; nobody writes to it while
        // this buffer is borrowed, for it is the only handle on its range.
        Ok(unsafe { std::slice::from_raw_parts(self.as_ptr().cast().as_ptr(), self.0.len) })
    }

    /// The elements, writable.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        self.check::<T>()?;
        // SAFETY: as in `as_slice`, and the mutable borrow excludes every other access.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.as_ptr().cast().as_ptr(), self.0.len) })
    }

    /// The bytes, if they are in host memory.
    pub fn as_bytes(&self) -> Result<&[u8]> {
        self.check_host()?;
        // SAFETY: as in `as_slice`, with the range in bytes.
        Ok(unsafe { std::slice::from_raw_parts(self.as_ptr().as_ptr(), self.byte_len()) })
    }

    /// The bytes, writable. A boolean must stay zero or one.
    pub fn as_bytes_mut(&mut self) -> Result<&mut [u8]> {
        self.check_host()?;
        // SAFETY: as in `as_mut_slice`, with the range in bytes; no element type has bit patterns
        // that are not values.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.as_ptr().as_ptr(), self.byte_len()) })
    }

    /// The elements, copied into a vector.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.as_slice().map(<[T]>::to_vec)
    }

    /// Cuts in two before element `mid`.
    ///
    /// # Panics
    ///
    /// If `mid` is beyond the end.
    pub fn split_at(self, mid: usize) -> (Buffer, Buffer) {
        assert!(
            mid <= self.0.len,
            "split at {mid} of {} elements",
            self.0.len
        );
        let right = Span {
            storage: Arc::clone(&self.0.storage),
            offset: self.0.offset + mid * self.0.dtype.size(),
            len: self.0.len - mid,
            dtype: self.0.dtype,
        };
        let mut left = self;
        left.0.len = mid;
        (left, Buffer(Box::new(right)))
    }

    /// Cuts into `parts` buffers of equal length.
    ///
    /// # Panics
    ///
    /// If the length is not a multiple of `parts`, or `parts` is zero.
    pub fn split_even(self, parts: usize) -> Vec<Buffer> {
        assert!(
            parts > 0 && self.0.len.is_multiple_of(parts),
            "{} / {parts}",
            self.0.len
        );
        let each = self.0.len / parts;
        let mut rest = self;
        let mut pieces = Vec::with_capacity(parts);
        for _ in 1..parts {
            let (piece, tail) = rest.split_at(each);
            pieces.push(piece);
            rest = tail;
        }
        pieces.push(rest);
        pieces
    }

    /// Joins two neighbours that [`split_at`](Buffer::split_at) made; gives them back if they are
    /// none.
    pub fn unsplit(self, right: Buffer) -> std::result::Result<Buffer, (Buffer, Buffer)> {
        let adjacent = Arc::ptr_eq(&self.0.storage, &right.0.storage)
            && self.0.offset + self.byte_len() == right.0.offset
            && self.0.dtype == right.0.dtype;
        if !adjacent {
            return Err((self, right));
        }
        let mut whole = self;
        whole.0.len += right.0.len;
        Ok(whole)
    }

    /// Gives up writing in exchange for sharing.
    pub fn freeze(self) -> Frozen {
        Frozen(Arc::new(self))
    }

    fn check<T: Element>(&self) -> Result<()> {
        let fits =
            T::DTYPE == self.0.dtype || (T::DTYPE == DType::U8 && self.0.dtype == DType::Bool);
        if !fits {
            let problem = format!("the buffer holds {}, not {}", self.0.dtype, T::DTYPE);
            return Err(Error::invalid(problem));
        }
        self.check_host()
    }

    fn check_host(&self) -> Result<()> {
        match self.device() {
            Device::Cpu => Ok(()),
            device => Err(Error::invalid(format!(
                "memory on {device} cannot be read by the host"
            ))),
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Buffer({} x {} on {})",
            self.len(),
            self.dtype(),
            self.device()
        )
    }
}

/// Memory that can be read by many and written by none.
///
/// Enough for what an operation only reads. [`try_thaw`](Frozen::try_thaw) gives the buffer back
/// once every other clone is gone.
///
/// ```
/// use phalanx_pg::Buffer;
///
/// let frozen = Buffer::from_vec(vec![7i32]).freeze();
/// let other = frozen.clone();
/// let frozen = frozen.try_thaw().unwrap_err(); // `other` still reads
/// drop(other);
/// assert!(frozen.try_thaw().is_ok());
/// ```
///
/// `Send` and `Sync`: clones may be read on different threads at the same time.
#[derive(Debug, Clone)]
pub struct Frozen(Arc<Buffer>);

impl Frozen {
    /// The buffer, writable again, if this is the last handle on it; itself otherwise.
    pub fn try_thaw(self) -> std::result::Result<Buffer, Frozen> {
        Arc::try_unwrap(self.0).map_err(Frozen)
    }
}

impl std::ops::Deref for Frozen {
    type Target = Buffer;

    fn deref(&self) -> &Buffer {
        &self.0
    }
}

impl From<Buffer> for Frozen {
    fn from(buffer: Buffer) -> Self {
        buffer.freeze()
    }
}
