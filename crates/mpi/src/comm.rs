//! Communicators: MPI's groups of ranks.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use mpi::ffi;
use phalanx_pg::{DType, Error, ErrorKind, ReduceOp, Result};

use crate::library::{check, enter, in_place, library};
use crate::operators::{datatype_of, operator_for};

/// Most elements, or bytes, that one call takes: MPI counts in 32 bits.
pub(crate) const MAX_COUNT: usize = 1 << 30;

/// A communicator of this process's own; errors are return codes.
///
/// Freed by [`free`](Comm::free), which is collective, or never.
#[derive(Debug)]
pub(crate) struct Comm {
    raw: ffi::MPI_Comm,
    rank: usize,
    size: usize,
}

// SAFETY: MPI runs with MPI_THREAD_MULTIPLE, so any thread may use a communicator; the handle is a
// plain value.
unsafe impl Send for Comm {}
// SAFETY: as above; that collectives on one communicator do not overlap is for the lane to keep.
unsafe impl Sync for Comm {}

pub(crate) fn number(rank: usize) -> c_int {
    c_int::try_from(rank).expect("a rank is smaller than MPI's size")
}

impl Comm {
    fn new(raw: ffi::MPI_Comm) -> Result<Self> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: a communicator that MPI has just made.
        unsafe {
            let set = ffi::MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN);
            check("MPI_Comm_set_errhandler", set)?;
            check("MPI_Comm_rank", ffi::MPI_Comm_rank(raw, &raw mut rank))?;
            check("MPI_Comm_size", ffi::MPI_Comm_size(raw, &raw mut size))?;
        }
        Ok(Self {
            raw,
            rank: rank as usize,
            size: size as usize,
        })
    }

    /// All processes that were started together. A collective call.
    pub(crate) fn world() -> Result<Self> {
        library()?;
        let _inside = enter()?;
        // SAFETY: the library runs.
        Self::made("MPI_Comm_dup", |new| unsafe {
            ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, new)
        })
    }

    /// The same ranks, apart. A collective call.
    pub(crate) fn duplicate(&self) -> Result<Self> {
        let _inside = enter()?;
        // SAFETY: the communicator is alive.
        Self::made("MPI_Comm_dup", |new| unsafe {
            ffi::MPI_Comm_dup(self.raw, new)
        })
    }

    /// Some of the ranks, in this order. A collective call of these.
    pub(crate) fn of(&self, ranks: &[usize], tag: c_int) -> Result<Self> {
        let _inside = enter()?;
        let ranks: Vec<c_int> = ranks.iter().map(|&rank| number(rank)).collect();
        let mut all = MaybeUninit::uninit();
        let mut some = MaybeUninit::uninit();
        // SAFETY: the communicator is alive, and each group is read after MPI has said that it
        // made it, and freed once.
        unsafe {
            let made = ffi::MPI_Comm_group(self.raw, all.as_mut_ptr());
            check("MPI_Comm_group", made)?;
            let (count, list) = (number(ranks.len()), ranks.as_ptr());
            let made = ffi::MPI_Group_incl(all.assume_init(), count, list, some.as_mut_ptr());
            check("MPI_Group_incl", made)?;
            let comm = Self::made("MPI_Comm_create_group", |new| {
                ffi::MPI_Comm_create_group(self.raw, some.assume_init(), tag, new)
            });
            ffi::MPI_Group_free(some.as_mut_ptr());
            ffi::MPI_Group_free(all.as_mut_ptr());
            comm
        }
    }

    fn made(name: &str, call: impl FnOnce(*mut ffi::MPI_Comm) -> c_int) -> Result<Self> {
        let mut new = MaybeUninit::uninit();
        check(name, call(new.as_mut_ptr()))?;
        // SAFETY: MPI says that it made it.
        Self::new(unsafe { new.assume_init() })
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn raw(&self) -> ffi::MPI_Comm {
        self.raw
    }

    /// Gives the communicator up. A collective call; nothing may be going on in it.
    pub(crate) fn free(&self) -> Result<()> {
        let _inside = enter()?;
        let mut raw = self.raw;
        // SAFETY: nothing uses the communicator any more, says the caller, on any rank.
        check("MPI_Comm_free", unsafe { ffi::MPI_Comm_free(&raw mut raw) })
    }

    /// MPI's own all-reduce.
    pub(crate) fn allreduce(&self, bytes: &mut [u8], op: ReduceOp, dtype: DType) -> Result<()> {
        let _inside = enter()?;
        let (kind, operator) = (datatype_of(dtype)?, operator_for(op, dtype)?);
        for piece in bytes.chunks_mut(MAX_COUNT * dtype.size()) {
            let count = number(piece.len() / dtype.size());
            // SAFETY: the memory is exclusively ours and has that many elements of the type.
            check("MPI_Allreduce", unsafe {
                let to = piece.as_mut_ptr().cast();
                ffi::MPI_Allreduce(in_place(), to, count, kind, operator, self.raw)
            })?;
        }
        Ok(())
    }

    /// MPI's own reduce; only the root's memory changes.
    pub(crate) fn reduce(
        &self,
        bytes: &mut [u8],
        op: ReduceOp,
        dtype: DType,
        root: usize,
    ) -> Result<()> {
        let _inside = enter()?;
        let (kind, operator) = (datatype_of(dtype)?, operator_for(op, dtype)?);
        for piece in bytes.chunks_mut(MAX_COUNT * dtype.size()) {
            let count = number(piece.len() / dtype.size());
            // Not MPI_IN_PLACE: with it MPICH 4.0 crashes on a root other than rank 0.
            let copy = (root == self.rank).then(|| piece.to_vec());
            let here = piece.as_mut_ptr().cast::<c_void>();
            let (from, to) = match &copy {
                Some(copy) => (copy.as_ptr().cast(), here),
                None => (here.cast_const(), std::ptr::null_mut()),
            };
            // SAFETY: the memory is exclusively ours, as its copy is, and has that many elements of
            // the type.
            check("MPI_Reduce", unsafe {
                ffi::MPI_Reduce(from, to, count, kind, operator, number(root), self.raw)
            })?;
        }
        Ok(())
    }

    /// Writes to `bytes` everywhere but on the root.
    pub(crate) fn broadcast(&self, bytes: &mut [u8], root: usize) -> Result<()> {
        // SAFETY: the memory is exclusively ours and as long as said.
        unsafe { self.broadcast_raw(bytes.as_mut_ptr(), bytes.len(), root) }
    }

    /// The root's part of a broadcast.
    pub(crate) fn broadcast_from(&self, bytes: &[u8]) -> Result<()> {
        // SAFETY: the memory is as long as said, and the root of a broadcast only reads.
        unsafe { self.broadcast_raw(bytes.as_ptr().cast_mut(), bytes.len(), self.rank) }
    }

    /// # Safety
    ///
    /// `len` bytes at `bytes` must be readable, and, on ranks other than the root, writable and
    /// nobody else's, until this returns.
    unsafe fn broadcast_raw(&self, bytes: *mut u8, len: usize, root: usize) -> Result<()> {
        let _inside = enter()?;
        for start in (0..len).step_by(MAX_COUNT) {
            let count = number(MAX_COUNT.min(len - start));
            // SAFETY: inside the memory that the caller speaks of.
            check("MPI_Bcast", unsafe {
                let piece = bytes.add(start).cast();
                ffi::MPI_Bcast(piece, count, ffi::RSMPI_UINT8_T, number(root), self.raw)
            })?;
        }
        Ok(())
    }

    /// Parts of equal length, of at most [`MAX_COUNT`] bytes.
    pub(crate) fn allgather(&self, input: &[u8], out: &mut [u8]) -> Result<()> {
        let _inside = enter()?;
        let count = self.part(input.len(), out.len(), self.size)?;
        // SAFETY: both have the length said, the output is exclusively ours.
        check("MPI_Allgather", unsafe {
            let (from, to) = (input.as_ptr().cast(), out.as_mut_ptr().cast());
            let byte = ffi::RSMPI_UINT8_T;
            ffi::MPI_Allgather(from, count, byte, to, count, byte, self.raw)
        })
    }

    /// As `allgather`, to the root alone; `out` is empty elsewhere.
    pub(crate) fn gather(&self, input: &[u8], out: &mut [u8], root: usize) -> Result<()> {
        let _inside = enter()?;
        let parts = if root == self.rank { self.size } else { 0 };
        let count = self.part(input.len(), out.len(), parts)?;
        // SAFETY: both have the length said, the output is exclusively ours.
        check("MPI_Gather", unsafe {
            let (from, to) = (input.as_ptr().cast(), out.as_mut_ptr().cast());
            let (byte, root) = (ffi::RSMPI_UINT8_T, number(root));
            ffi::MPI_Gather(from, count, byte, to, count, byte, root, self.raw)
        })
    }

    /// From the root; `input` is empty elsewhere.
    pub(crate) fn scatter(&self, input: &[u8], out: &mut [u8], root: usize) -> Result<()> {
        let _inside = enter()?;
        let parts = if root == self.rank { self.size } else { 0 };
        let count = self.part(out.len(), input.len(), parts)?;
        // SAFETY: both have the length said, the output is exclusively ours.
        check("MPI_Scatter", unsafe {
            let (from, to) = (input.as_ptr().cast(), out.as_mut_ptr().cast());
            let (byte, root) = (ffi::RSMPI_UINT8_T, number(root));
            ffi::MPI_Scatter(from, count, byte, to, count, byte, root, self.raw)
        })
    }

    /// The length of a part as MPI counts it, if `whole` is as many.
    fn part(&self, part: usize, whole: usize, parts: usize) -> Result<c_int> {
        match part <= MAX_COUNT && part * parts == whole {
            true => Ok(number(part)),
            false => Err(Error::new(
                ErrorKind::Backend,
                format!("{parts} parts of {part} bytes do not fit {whole}"),
            )),
        }
    }
}
