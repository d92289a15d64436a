//! Where `allocate` takes shared memory from.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;
use phalanx_pg::{Buffer, DType, Device, Error, ErrorKind, Result};

use super::free_list::FreeList;
use super::segment::Segment;

/// Bytes of a process's first arena; each further one is at least as large as all before.
const FIRST_ARENA: usize = 64 << 20;

/// Arenas of a process: since each at least doubles the total, more could not be addressed.
pub(crate) const MAX_SEGMENTS: usize = 32;

/// Blocks start at multiples of this: two cache lines, which processors fetch as one.
const ALIGN: usize = 128;

/// Large blocks start at a page.
const PAGE: usize = 4096;

/// Tells the peers of a new arena. Must not block.
pub(crate) type Announce = Box<dyn Fn(u32, &Arc<Segment>) + Send + Sync>;

/// The shared memory that this process owns.
///
/// Peers read and write blocks only while an operation that owns them runs. An operation that
/// fails leaves its blocks [marked](Mark), and these are never used again: a peer that was
/// stopped may still write to them when it goes on.
pub(crate) struct Arenas {
    list: Mutex<Vec<Arena>>,
    announce: Announce,
}

struct Arena {
    segment: Arc<Segment>,
    free: FreeList,
    /// Pages up to here have been taken.
    reserved: usize,
}

impl Arenas {
    pub(crate) fn new(announce: Announce) -> Arc<Self> {
        let list = Mutex::default();
        Arc::new(Self { list, announce })
    }

    /// A zeroed buffer that peers can reach.
    pub(crate) fn allocate(self: &Arc<Self>, dtype: DType, len: usize) -> Result<Buffer> {
        let bytes = len
            .checked_mul(dtype.size())
            .filter(|&bytes| bytes <= isize::MAX as usize / 4)
            .ok_or_else(|| Error::invalid(format!("{len} x {dtype} does not fit in memory")))?;
        if bytes == 0 {
            return Ok(Buffer::zeroed(dtype, 0));
        }
        let block = self.block(bytes)?;
        let ptr = block.ptr;
        // SAFETY: the block is `bytes` long, aligned and initialised (zeroed by `block`), nobody
        // else in this process has it, and `Block` gives no access to it. Peers reach it only
        // during operations that own the buffer.
        Ok(unsafe { Buffer::from_raw(ptr, dtype, len, Device::Cpu, 0, Box::new(block)) })
    }

    fn block(self: &Arc<Self>, bytes: usize) -> Result<Block> {
        let unit = if bytes < PAGE { ALIGN } else { PAGE };
        let len = bytes.next_multiple_of(unit);
        let mut list = self.list.lock();
        let found = list
            .iter_mut()
            .enumerate()
            .find_map(|(index, arena)| Some((index, arena.free.take(len)?)));
        let (index, offset) = match found {
            Some(found) => found,
            None => (self.grow(&mut list, len)?, 0),
        };
        let arena = &mut list[index];
        let fresh_from = arena.reserved.max(offset);
        if let Err(err) = arena.reserve_up_to(offset + len) {
            arena.free.give(offset, len);
            return Err(err);
        }
        let segment = Arc::clone(&arena.segment);
        drop(list);
        let ptr = segment.range(offset, len).expect("inside the arena");
        let used_before = fresh_from.min(offset + len) - offset;
        // SAFETY: the block has just been taken from the free list, so nobody else writes to it;
        // the rest of it is pages that are zero already.
        unsafe { ptr.write_bytes(0, used_before) };
        Ok(Block {
            arenas: Arc::clone(self),
            ptr: NonNull::new(ptr).expect("a mapping is not at zero"),
            segment: index as u32,
            offset,
            len,
            in_flight: Arc::default(),
        })
    }

    /// Adds an arena and takes the first `len` bytes of it.
    fn grow(&self, list: &mut Vec<Arena>, len: usize) -> Result<usize> {
        if list.len() == MAX_SEGMENTS {
            let what = format!("{MAX_SEGMENTS} arenas are in use, free some buffers");
            return Err(Error::new(ErrorKind::Backend, what));
        }
        let total: usize = list.iter().map(|arena| arena.segment.len()).sum();
        let size = len.max(total).max(FIRST_ARENA).next_multiple_of(PAGE);
        let segment = Arc::new(Segment::create(size)?);
        let mut free = FreeList::new(size);
        free.take(len).expect("a new arena is large enough");
        list.push(Arena {
            segment: Arc::clone(&segment),
            free,
            reserved: 0,
        });
        (self.announce)(list.len() as u32 - 1, &segment);
        Ok(list.len() - 1)
    }
}

impl Arena {
    fn reserve_up_to(&mut self, end: usize) -> Result<()> {
        let end = end.next_multiple_of(PAGE).min(self.segment.len());
        if end > self.reserved {
            self.segment.reserve(self.reserved, end - self.reserved)?;
            self.reserved = end;
        }
        Ok(())
    }
}

impl fmt::Debug for Arenas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arenas({})", self.list.lock().len())
    }
}

/// A part of an arena that a buffer owns; how a backend recognises its own memory.
#[derive(Debug)]
pub(crate) struct Block {
    arenas: Arc<Arenas>,
    ptr: NonNull<u8>,
    /// Which arena of this process.
    segment: u32,
    /// Where in it.
    offset: usize,
    len: usize,
    /// Operations that peers work on the block for.
    in_flight: Arc<AtomicU32>,
}

// SAFETY: the pointer is only compared and handed to the buffer that owns the block.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    /// The block of a buffer that came from `arenas`.
    pub(crate) fn of<'a>(buffer: &'a Buffer, arenas: &Arc<Arenas>) -> Option<&'a Block> {
        let block = buffer.owner::<Block>()?;
        Arc::ptr_eq(&block.arenas, arenas).then_some(block)
    }

    /// Where it is: which arena of this process, and where in it.
    pub(crate) fn location(&self) -> (u32, usize) {
        (self.segment, self.offset)
    }

    /// From now on peers may access it, until [`Lent::give_back`]. As [`mark`](Self::mark), but free of
    /// charge, for who holds on to the buffer meanwhile.
    pub(crate) fn lend(&self) -> Lent<'_> {
        Lent(self)
    }

    /// From now on peers may access it, until [`Mark::clear`].
    pub(crate) fn mark(&self) -> Mark {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        Mark(Arc::clone(&self.in_flight))
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.in_flight.load(Ordering::Acquire) > 0 {
            // A peer may write to it at any time; the arena loses it.
            return;
        }
        let mut list = self.arenas.list.lock();
        list[self.segment as usize].free.give(self.offset, self.len);
    }
}

/// A block is in use by peers.
///
/// Dropping it leaves the block marked for good: that is what must happen if the operation does
/// not end well.
#[derive(Debug)]
pub(crate) struct Mark(Arc<AtomicU32>);

impl Mark {
    /// No peer will access the block for this operation any more.
    pub(crate) fn clear(self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// A block that peers may access, and whose buffer this process keeps meanwhile.
///
/// Dropping it, as a panic does, marks the block for good.
#[derive(Debug)]
pub(crate) struct Lent<'a>(&'a Block);

impl Lent<'_> {
    /// No peer will access the block any more.
    pub(crate) fn give_back(self) {
        std::mem::forget(self);
    }

    /// It takes longer: the buffer may go its own way.
    pub(crate) fn mark(self) -> Mark {
        let mark = self.0.mark();
        self.give_back();
        mark
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        drop(self.0.mark());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arenas() -> Arc<Arenas> {
        Arenas::new(Box::new(|_, _| {}))
    }

    fn location(buffer: &Buffer, arenas: &Arc<Arenas>) -> (u32, usize) {
        Block::of(buffer, arenas).unwrap().location()
    }

    #[test]
    fn memory_is_zeroed_also_when_used_before() {
        let arenas = arenas();
        let mut first = arenas.allocate(DType::U8, 5000).unwrap();
        first.as_bytes_mut().unwrap().fill(9);
        let place = location(&first, &arenas);
        drop(first);
        // Reaches beyond what was used.
        let again = arenas.allocate(DType::U8, 9000).unwrap();
        assert_eq!(location(&again, &arenas), place);
        assert!(again.as_bytes().unwrap().iter().all(|&byte| byte == 0));
    }

    #[test]
    fn what_a_failed_operation_owned_is_not_used_again() {
        let arenas = arenas();
        let first = arenas.allocate(DType::F32, 100).unwrap();
        let place = location(&first, &arenas);
        let mark = Block::of(&first, &arenas).unwrap().mark();
        drop(first);
        drop(mark);
        let second = arenas.allocate(DType::F32, 100).unwrap();
        assert_ne!(location(&second, &arenas), place);
        Block::of(&second, &arenas).unwrap().mark().clear();
        let place = location(&second, &arenas);
        drop(second);
        let third = arenas.allocate(DType::F32, 100).unwrap();
        assert_eq!(location(&third, &arenas), place);
    }

    #[test]
    fn a_block_that_was_lent_and_not_given_back_is_not_used_again() {
        let arenas = arenas();
        let first = arenas.allocate(DType::F32, 100).unwrap();
        let place = location(&first, &arenas);
        Block::of(&first, &arenas).unwrap().lend().give_back();
        drop(first);
        let second = arenas.allocate(DType::F32, 100).unwrap();
        assert_eq!(location(&second, &arenas), place);
        drop(Block::of(&second, &arenas).unwrap().lend());
        drop(second);
        let third = arenas.allocate(DType::F32, 100).unwrap();
        assert_ne!(location(&third, &arenas), place);
        let place = location(&third, &arenas);
        let mark = Block::of(&third, &arenas).unwrap().lend().mark();
        drop(third);
        mark.clear();
        let fourth = arenas.allocate(DType::F32, 100).unwrap();
        assert_ne!(location(&fourth, &arenas), place);
    }

    #[test]
    fn large_buffers_get_arenas_that_are_large_enough() {
        let arenas = arenas();
        let _first = arenas.allocate(DType::U8, 1).unwrap();
        let large = arenas.allocate(DType::U8, FIRST_ARENA + 1).unwrap();
        assert_eq!(location(&large, &arenas), (1, 0));
        assert!(arenas.allocate(DType::F64, usize::MAX / 8).is_err());
        assert!(arenas.allocate(DType::F64, 1 << 37).is_err());
        // An error does not use anything up.
        assert!(arenas.allocate(DType::U8, 64).is_ok());
    }
}
