//! How a group is to behave.

use phalanx_pg::RawStream;

/// CUDA's handle of the stream that every thread has for itself.
const PER_THREAD: RawStream = 2;

/// How a group is to behave. [`Options::default`] is what [`NcclGroup::connect`] uses.
///
/// [`NcclGroup::connect`]: crate::NcclGroup::connect
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// Ordinal of this process's device, as it sees them. By default the only one, else that of
    /// the local rank.
    pub device: Option<u32>,
    /// Makes the communicator at once instead of at the first collective: errors show earlier,
    /// and the first collective is not the slow one.
    ///
    /// Splitting off all ranks then divides the communicator that there is (`ncclCommSplit`)
    /// instead of making one from nothing. As in PyTorch, such a split has its place among the
    /// group's collectives, the same on every rank. A split of some of the ranks needs no more
    /// than these, and makes a new one.
    pub eager: bool,
    /// Runs communication on streams of high priority.
    pub high_priority: bool,
    /// See [`set_stream`](Options::set_stream).
    pub(crate) stream: Option<RawStream>,
    /// From this many ranks on several of them hand out ids, as PyTorch does
    /// (`TORCH_NCCL_RANKS_PER_ROOT`).
    pub ranks_per_root: usize,
    /// Ends the process when an operation fails, as PyTorch does by default. Off: the error is on
    /// every work, the group is broken and the process goes on.
    pub tear_down: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            device: None,
            eager: false,
            high_priority: false,
            stream: None,
            ranks_per_root: 128,
            tear_down: false,
        }
    }
}

impl Options {
    /// Has memory from `allocate` ready and freed on a stream of the program's, the one that it
    /// computes on. By default every group has one of its own, see [`Buffer::stream`]. Not the
    /// per-thread default stream: memory may be dropped on any thread.
    ///
    /// A stream that several groups share ties them to each other: what waits for one group's
    /// operation there holds up what is put behind it.
    ///
    /// # Safety
    ///
    /// A stream of the group's device, which is not destroyed before every group that was made with
    /// these options, every group split from one, and all memory from them.
    ///
    /// [`Buffer::stream`]: phalanx_pg::Buffer::stream
    pub unsafe fn set_stream(&mut self, stream: RawStream) {
        self.stream = Some(stream);
    }

    /// Refuses what cannot work.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        match (self.stream, self.ranks_per_root) {
            (Some(PER_THREAD), _) => Err("memory cannot be bound to the per-thread default stream"),
            (_, 0) => Err("at least one rank per root is needed"),
            _ => Ok(()),
        }
    }
}
