//! Device memory: addresses that the host cannot read, checked at every use.
//!
//! Each device has two mappings. The one whose addresses are handed out has no access rights; the
//! bytes are in the other, at the same offsets.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::OnceLock;

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};

use crate::code::{INVALID_VALUE, OUT_OF_MEMORY, Result};

/// Addresses of one device. They are not used twice, so there must be many.
const SPAN: usize = 1 << 38;

/// What each allocation is rounded up to, with a gap behind it that belongs to nobody.
const PAGE: usize = 4096;

/// How much freed memory keeps its poison before it goes back to the system.
const QUARANTINE: usize = 32 << 20;

const FRESH: u8 = 0xFB;
const FREED: u8 = 0xFD;

/// Total memory that a device claims to have.
pub(crate) const TOTAL: usize = 16 << 30;

pub(crate) struct Device {
    /// Where its addresses begin.
    shown: usize,
    /// Where its bytes begin.
    bytes: usize,
    backing: OwnedFd,
    heap: Mutex<Heap>,
}

#[derive(Default)]
struct Heap {
    /// Length by offset.
    live: BTreeMap<usize, usize>,
    next: usize,
    freed: VecDeque<(usize, usize)>,
    freed_bytes: usize,
}

/// Number of devices.
pub(crate) fn count() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| {
        let chosen = std::env::var("EMU_CUDA_DEVICES").ok();
        chosen.and_then(|text| text.parse().ok()).unwrap_or(8)
    })
}

fn devices() -> &'static [OnceLock<Device>] {
    static DEVICES: OnceLock<Vec<OnceLock<Device>>> = OnceLock::new();
    DEVICES.get_or_init(|| (0..count()).map(|_| OnceLock::new()).collect())
}

pub(crate) fn device(ordinal: usize) -> &'static Device {
    devices()[ordinal].get_or_init(Device::reserve)
}

/// The device that an address belongs to.
pub(crate) fn owner(address: u64) -> Option<(usize, &'static Device)> {
    let address = address as usize;
    let known = devices().iter().enumerate();
    known
        .filter_map(|(ordinal, device)| Some((ordinal, device.get()?)))
        .find(|(_, device)| (device.shown..device.shown + SPAN).contains(&address))
}

/// Where the bytes of a range are, if it lies in one live allocation.
pub(crate) fn resolve(address: u64, len: usize) -> Option<*mut u8> {
    let (_, device) = owner(address)?;
    let offset = address as usize - device.shown;
    let heap = device.heap.lock();
    let (&start, &size) = heap.live.range(..=offset).next_back()?;
    let fits = offset + len <= start + size;
    fits.then_some((device.bytes + offset) as *mut u8)
}

impl Device {
    fn reserve() -> Self {
        let backing = memfd_create("emu-cuda", MemfdFlags::CLOEXEC).expect("a memory file");
        ftruncate(&backing, SPAN as u64).expect("a sparse file may be large");
        // SAFETY: fresh mappings at addresses of the kernel's choice; no reference to them is made.
        let (shown, bytes) = unsafe {
            (
                mmap_anonymous(
                    ptr::null_mut(),
                    SPAN,
                    ProtFlags::empty(),
                    MapFlags::PRIVATE | MapFlags::NORESERVE,
                ),
                mmap(
                    ptr::null_mut(),
                    SPAN,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED | MapFlags::NORESERVE,
                    &backing,
                    0,
                ),
            )
        };
        Self {
            shown: shown.expect("room for addresses") as usize,
            bytes: bytes.expect("room for a mapping") as usize,
            backing,
            heap: Mutex::default(),
        }
    }

    pub(crate) fn allocate(&self, len: usize) -> Result<u64> {
        if len == 0 {
            return Err(INVALID_VALUE);
        }
        let mut heap = self.heap.lock();
        let offset = heap.next;
        let end = offset + len.next_multiple_of(PAGE) + PAGE;
        if end > SPAN {
            return Err(OUT_OF_MEMORY);
        }
        heap.next = end;
        heap.live.insert(offset, len);
        self.fill(offset, len, FRESH);
        Ok((self.shown + offset) as u64)
    }

    pub(crate) fn free(&self, address: u64) -> Result<()> {
        let offset = address as usize - self.shown;
        let mut heap = self.heap.lock();
        let len = heap.live.remove(&offset).ok_or(INVALID_VALUE)?;
        self.fill(offset, len, FREED);
        heap.freed.push_back((offset, len));
        heap.freed_bytes += len;
        while heap.freed_bytes > QUARANTINE {
            let Some((offset, len)) = heap.freed.pop_front() else {
                break;
            };
            heap.freed_bytes -= len;
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let pages = len.next_multiple_of(PAGE);
            // It is only about memory that is not needed any more.
            let _ = fallocate(&self.backing, hole, offset as u64, pages as u64);
        }
        Ok(())
    }

    pub(crate) fn in_use(&self) -> usize {
        self.heap.lock().live.values().sum()
    }

    fn fill(&self, offset: usize, len: usize, byte: u8) {
        // SAFETY: the range lies in the mapping, and the caller holds the lock of the heap that
        // hands it out. A job that still uses freed memory races with this, which is the error
        // that the poison is to show; on a device it would race too.
        unsafe { ptr::write_bytes((self.bytes + offset) as *mut u8, byte, len) }
    }
}
