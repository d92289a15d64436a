//! One piece of shared memory: anonymous, of fixed size, gone with its last user.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use phalanx_pg::{Error, ErrorKind, Result};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Set to `1`, asks the kernel for huge pages. A hint: the system decides (for memory like this by
/// `/sys/kernel/mm/transparent_hugepage/shmem_enabled`), and all works without.
const HUGE_VAR: &str = "PHALANX_HUGE_PAGES";

/// A mapping of a sealed memfd.
///
/// Nothing is left of it once every process that has it open is gone, however they ended. The
/// seals keep a peer from shrinking it, which would turn an access here into a SIGBUS.
///
/// `Send` and `Sync`: it gives out atomics and raw pointers only, and what is behind the pointers
/// is accessed by the rules of the protocol that owns the segment.
#[derive(Debug)]
pub(crate) struct Segment {
    base: NonNull<u8>,
    len: usize,
    fd: OwnedFd,
    /// Whether huge pages were asked for.
    huge: bool,
}

// SAFETY: the mapping is not bound to a thread and stays until drop; see the type's documentation.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// New memory, all zero. Pages are taken when [`reserve`](Segment::reserve)d.
    pub(crate) fn create(len: usize) -> Result<Self> {
        // Going beyond it would be a signal.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
        if let Some(limit) = limit.filter(|&limit| limit < len as u64) {
            let why = format!("a file may have {limit} bytes here (see `ulimit -f`)");
            return Err(no_room(len, &why));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("phalanx", flags)
            .map_err(|err| refused("creating shared memory", err))?;
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)
            .map_err(|err| refused("protecting shared memory", err))?;
        rustix::fs::ftruncate(&fd, len as u64)
            .map_err(|err| refused(&format!("making room for {len} bytes"), err))?;
        let seals = SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals)
            .map_err(|err| refused("sealing shared memory", err))?;
        Self::map(fd, len)
    }

    /// Memory that a peer has created with `len` bytes.
    pub(crate) fn open(fd: OwnedFd, len: usize) -> Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&fd)
            .map_err(|err| refused("looking at a peer's seals", err))?;
        let size = rustix::fs::fstat(&fd)
            .map_err(|err| refused("looking at a peer's memory", err))?
            .st_size;
        let sealed = seals.contains(SealFlags::GROW | SealFlags::SHRINK);
        if !sealed || usize::try_from(size) != Ok(len) {
            let what = format!("a peer's memory has {size} bytes instead of {len}, or no seals");
            return Err(Error::new(ErrorKind::Backend, what));
        }
        Self::map(fd, len)
    }

    fn map(fd: OwnedFd, len: usize) -> Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &fd, 0)
        };
        let base = base.map_err(|err| refused("mapping shared memory", err))?;
        let base = NonNull::new(base.cast()).expect("the kernel maps nothing at zero");
        let huge = std::env::var_os(HUGE_VAR).is_some_and(|value| value == "1");
        let segment = Self {
            base,
            len,
            fd,
            huge,
        };
        // A child must not reach it: it would be a rank that nobody knows of.
        // SAFETY: the range is this mapping; nothing is unmapped or changed in this process.
        let kept = unsafe { rustix::mm::madvise(base.as_ptr().cast(), len, Advice::LinuxDontFork) };
        kept.map_err(|err| refused("keeping memory from children", err))?;
        if huge {
            // SAFETY: as above. A kernel without huge pages refuses, which changes nothing.
            let _ =
                unsafe { rustix::mm::madvise(base.as_ptr().cast(), len, Advice::LinuxHugepage) };
        }
        Ok(segment)
    }

    /// Takes pages for a range, so that a lack of memory is an error now and no signal later.
    pub(crate) fn reserve(&self, at: usize, len: usize) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        // The kernel would rather end some process than refuse.
        if let Some(room) = super::room::available()
            && len as u64 > room
        {
            return Err(no_room(len, &format!("{room} bytes are available")));
        }
        if self.huge {
            // Before the pages are taken through the descriptor, which does not know the hint.
            self.populate(at, len);
        }
        let flags = FallocateFlags::empty();
        rustix::fs::fallocate(&self.fd, flags, at as u64, len as u64)
            .map_err(|err| no_room(len, &err.to_string()))?;
        self.populate(at, len);
        Ok(())
    }

    /// Page faults now instead of in the first operation; what fails here faults there.
    fn populate(&self, at: usize, len: usize) {
        // SAFETY: the range is in this mapping, and populating changes no contents.
        let _ = unsafe {
            let start = self.base.as_ptr().add(at & !0xfff);
            rustix::mm::madvise(start.cast(), len, Advice::LinuxPopulateWrite)
        };
    }

    /// Number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The descriptor, for handing it to peers.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The word at `at`.
    ///
    /// # Panics
    ///
    /// If it is not inside, or not aligned: offsets of words are this crate's own.
    pub(crate) fn word(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.len, "word at {at}");
        // SAFETY: inside the mapping, which lives as long as `self`, and aligned (mappings start
        // at a page); words are accessed as atomics only, here and in peers.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(at).cast()) }
    }

    /// The address of a range, `None` if it is not inside. Peers name ranges, so it is checked.
    pub(crate) fn range(&self, at: usize, len: usize) -> Option<*mut u8> {
        let end = at.checked_add(len)?;
        // SAFETY: `at` is at most the mapping's length.
        (end <= self.len).then(|| unsafe { self.base.as_ptr().add(at) })
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: this mapping was made by `map` with this length and is unmapped once; whoever
        // has a pointer into it keeps the segment.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

fn no_room(len: usize, reason: &str) -> Error {
    let what = format!(
        "no room for {len} bytes of shared memory: {reason}; use smaller buffers or give the job \
         more memory"
    );
    Error::new(ErrorKind::Backend, what)
}

fn refused(what: &str, err: rustix::io::Errno) -> Error {
    Error::new(ErrorKind::Backend, format!("{what}: {err}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::SeqCst;

    #[test]
    fn what_one_mapping_writes_another_reads() {
        let ours = Segment::create(8192).unwrap();
        let theirs = Segment::open(ours.fd().try_clone_to_owned().unwrap(), 8192).unwrap();
        ours.word(4096).store(7, SeqCst);
        assert_eq!(theirs.word(4096).load(SeqCst), 7);
    }

    #[test]
    fn memory_of_another_size_or_without_seals_is_refused() {
        let ours = Segment::create(8192).unwrap();
        let fd = || ours.fd().try_clone_to_owned().unwrap();
        assert!(Segment::open(fd(), 4096).is_err());
        let loose = rustix::fs::memfd_create("loose", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&loose, 4096).unwrap();
        assert!(Segment::open(loose, 4096).is_err());
        assert!(rustix::fs::ftruncate(fd(), 4096).is_err());
    }

    #[test]
    fn ranges_outside_are_refused() {
        let segment = Segment::create(4096).unwrap();
        assert!(segment.range(0, 4096).is_some());
        assert!(segment.range(4096, 0).is_some());
        assert!(segment.range(4095, 2).is_none());
        assert!(segment.range(usize::MAX, 2).is_none());
    }

    #[test]
    fn more_memory_than_there_is_is_an_error() {
        let segment = Segment::create(1 << 40).unwrap();
        let err = segment.reserve(0, 1 << 40).unwrap_err();
        assert!(err.to_string().contains("no room"), "{err}");
    }
}
