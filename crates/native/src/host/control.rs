//! The segment through which the ranks of a group on one host coordinate.
//!
//! ```text
//! 0        magic, ranks, chunk      written by the rank that made it
//! 128      abort                    0, or 1 + the local rank that broke the group first
//! 256      asleep                   a bit for each rank, see `bell.rs`
//! 1024     taken, finished          for each slot, see `parts.rs`
//! 4096     one area per rank:
//!            0      done            operations whose memory the rank will not touch again
//!            128    staged          chunks put into its staging ring, ever
//!            256    worked          chunks it has worked on, of everybody's ring, ever
//!            384    bell
//!            512    presence        0; 1 joined; 2 left in order; 3 gone without a word of
//!                                   shutdown, its notice says why; 4 dead, as its peers saw
//!            640    notice          why it broke the group: length, bytes
//!            2048   slots           what it says about operations k, k+1, ...: number, descriptor,
//!                                   up to 80 bytes of input
//!            4096   inline          room for larger inputs, one for each slot
//!            ...    ring            room for chunks of inputs in private memory
//! ```
//!
//! Every word is written by its rank only, except the bells, `asleep`, `abort`, how operations are shared
//! out and a dead rank's `presence`. Numbers count from the group's beginning and wrap.
//!
//! | slot of operation k | who may write | who may read |
//! |---|---|---|
//! | its word is not k + 1 | the rank, once all ranks' `done` is above k - 8 | nobody |
//! | its word is k + 1 | nobody | everybody, until their `done` is above k |

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use phalanx_pg::{Error, ErrorKind, Result};

use super::bell::Belfry;
use super::descriptor::Descriptor;
use super::parts::Shares;
use crate::shm::Segment;

/// Operations that a rank can have announced and not finished.
pub(crate) const DEPTH: usize = 8;
/// Largest input that travels with the slot.
pub(crate) const INLINE: usize = 16 << 10;
/// Largest input inside the slot itself.
pub(crate) const IN_SLOT: usize = SLOT - PAYLOAD_AT;
/// Chunks in a staging ring.
pub(crate) const RING: usize = 4;
/// Most ranks of a group on one host.
pub(crate) const MAX_RANKS: usize = 1024;
/// Most bytes of a notice.
pub(crate) const NOTICE: usize = 2048 - NOTICE_AT - 4;

/// The rank takes part in the group.
pub(crate) const JOINED: u32 = 1;
/// The rank has shut the group down in order.
pub(crate) const LEFT: u32 = 2;
/// The rank takes no part any more; what it has done before counts.
pub(crate) const DROPPED: u32 = 3;
/// The rank's process has ended. Written by who notices.
pub(crate) const DEAD: u32 = 4;

const MAGIC: u32 = u32::from_le_bytes(*b"PHX2");
const ABORT_AT: usize = 128;
const ASLEEP_AT: usize = 256;
const SHARES_AT: usize = 1024;
const HEADER: usize = 4096;

const DONE_AT: usize = 0;
const STAGED_AT: usize = 128;
const WORKED_AT: usize = 256;
const BELL_AT: usize = 384;
const PRESENCE_AT: usize = 512;
const NOTICE_AT: usize = 640;
const SLOTS_AT: usize = 2048;
const INLINE_AT: usize = 4096;
const RING_AT: usize = INLINE_AT + DEPTH * INLINE;

/// Bytes between words that different ranks write to.
const APART: usize = 128;
const SLOT: usize = 128;
const DESCRIPTOR_AT: usize = 8;
const PAYLOAD_AT: usize = DESCRIPTOR_AT + size_of::<Descriptor>();

/// Counters that every rank publishes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Counter {
    /// Operations whose memory the rank will not touch again.
    Done = DONE_AT as isize,
    /// Chunks put into its own ring.
    Staged = STAGED_AT as isize,
    /// Chunks worked on, in everybody's ring.
    Worked = WORKED_AT as isize,
}

/// A group's control segment.
#[derive(Debug)]
pub(crate) struct Control {
    segment: Arc<Segment>,
    ranks: usize,
    /// Bytes of one chunk of a ring.
    chunk: usize,
}

impl Control {
    /// For a new group of `ranks` on this host.
    pub(crate) fn create(ranks: usize, chunk: usize) -> Result<Self> {
        if ranks > MAX_RANKS {
            let what = format!("{ranks} ranks on one host, at most {MAX_RANKS} are supported");
            return Err(Error::invalid(what));
        }
        let segment = Segment::create(size(ranks, chunk))?;
        // The rings are taken when first used.
        segment.reserve(0, HEADER)?;
        for rank in 0..ranks {
            segment.reserve(area(rank, chunk), RING_AT)?;
        }
        segment.word(4).store(ranks as u32, Ordering::Relaxed);
        segment.word(8).store(chunk as u32, Ordering::Relaxed);
        segment.word(0).store(MAGIC, Ordering::Release);
        Ok(Self {
            segment: Arc::new(segment),
            ranks,
            chunk,
        })
    }

    /// As made by the first rank of the group on this host.
    pub(crate) fn open(segment: Arc<Segment>, ranks: usize, chunk: usize) -> Result<Self> {
        let whole = segment.len() == size(ranks, chunk)
            && segment.word(0).load(Ordering::Acquire) == MAGIC
            && segment.word(4).load(Ordering::Relaxed) as usize == ranks
            && segment.word(8).load(Ordering::Relaxed) as usize == chunk;
        match whole {
            true => Ok(Self {
                segment,
                ranks,
                chunk,
            }),
            false => Err(Error::new(
                ErrorKind::Backend,
                "a peer made another control segment; do all ranks run the same version?",
            )),
        }
    }

    /// The memory, for handing it to the other ranks.
    pub(crate) fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Bytes of a chunk in a staging ring.
    pub(crate) fn chunk(&self) -> usize {
        self.chunk
    }

    /// Takes the pages of a rank's staging ring.
    pub(crate) fn reserve_ring(&self, rank: usize) -> Result<()> {
        let at = area(rank, self.chunk) + RING_AT;
        self.segment.reserve(at, RING * self.chunk)
    }

    /// A rank's counter.
    pub(crate) fn counter(&self, rank: usize, counter: Counter) -> &AtomicU32 {
        self.word(rank, counter as usize)
    }

    /// Not zero once the group is broken: one more than the local rank that broke it.
    pub(crate) fn abort(&self) -> &AtomicU32 {
        self.segment.word(ABORT_AT)
    }

    /// Whether the rank is there: [`JOINED`], [`LEFT`], [`DROPPED`] or [`DEAD`].
    pub(crate) fn presence(&self, rank: usize) -> &AtomicU32 {
        self.word(rank, PRESENCE_AT)
    }

    /// How an operation is shared out among the ranks.
    pub(crate) fn shares(&self, op: u32) -> Shares<'_> {
        let at = SHARES_AT + op as usize % DEPTH * 2 * APART;
        Shares {
            taken: self.segment.word(at),
            finished: self.segment.word(at + APART),
        }
    }

    /// The number of the operation that a rank's slot for operation `op` describes, plus one.
    pub(crate) fn slot(&self, rank: usize, op: u32) -> &AtomicU32 {
        self.word(rank, slot_at(op))
    }

    /// Writes a descriptor. The caller is the rank, and the slot is free.
    pub(crate) fn describe(&self, rank: usize, op: u32, descriptor: &Descriptor) {
        let to = self.ptr(rank, slot_at(op) + DESCRIPTOR_AT, size_of::<Descriptor>());
        // SAFETY: inside the segment and aligned to 8; only this rank writes its slots, and
        // nobody reads this one until its word is set.
        unsafe { to.cast::<Descriptor>().write(*descriptor) }
    }

    /// A rank's descriptor; its slot's word has been seen to be right.
    pub(crate) fn descriptor(&self, rank: usize, op: u32) -> Descriptor {
        let from = self.ptr(rank, slot_at(op) + DESCRIPTOR_AT, size_of::<Descriptor>());
        // SAFETY: inside the segment and aligned to 8; any bytes are a descriptor, and its rank
        // leaves it alone until everybody's `done` is beyond the operation.
        unsafe { from.cast::<Descriptor>().read() }
    }

    /// Where a rank's input of up to `bytes` is: inside the slot if it fits, else beside it.
    pub(crate) fn inline(&self, rank: usize, op: u32, bytes: usize) -> *mut u8 {
        match bytes <= IN_SLOT {
            true => self.ptr(rank, slot_at(op) + PAYLOAD_AT, IN_SLOT),
            false => self.area(rank, op),
        }
    }

    /// The room of [`INLINE`] bytes beside the slot.
    pub(crate) fn area(&self, rank: usize, op: u32) -> *mut u8 {
        self.ptr(rank, INLINE_AT + op as usize % DEPTH * INLINE, INLINE)
    }

    /// Where chunk number `number` of a rank is.
    pub(crate) fn stage(&self, rank: usize, number: u32) -> *mut u8 {
        let at = RING_AT + number as usize % RING * self.chunk;
        self.ptr(rank, at, self.chunk)
    }

    /// A rank's notice: where its length is, and its bytes.
    pub(crate) fn notice(&self, rank: usize) -> (&AtomicU32, *mut u8) {
        let bytes = self.ptr(rank, NOTICE_AT + 4, NOTICE);
        (self.word(rank, NOTICE_AT), bytes)
    }

    fn word(&self, rank: usize, at: usize) -> &AtomicU32 {
        self.segment.word(area(rank, self.chunk) + at)
    }

    fn ptr(&self, rank: usize, at: usize, len: usize) -> *mut u8 {
        let ptr = self.segment.range(area(rank, self.chunk) + at, len);
        ptr.expect("the layout is inside the segment")
    }
}

impl Belfry for Control {
    type Word = AtomicU32;

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn asleep(&self, word: usize) -> &AtomicU32 {
        self.segment.word(ASLEEP_AT + 4 * word)
    }

    fn bell(&self, rank: usize) -> &AtomicU32 {
        self.word(rank, BELL_AT)
    }
}

fn slot_at(op: u32) -> usize {
    SLOTS_AT + op as usize % DEPTH * SLOT
}

fn area(rank: usize, chunk: usize) -> usize {
    HEADER + rank * (RING_AT + RING * chunk)
}

/// Bytes of the segment of a group of `ranks`.
pub(crate) fn size(ranks: usize, chunk: usize) -> usize {
    area(ranks, chunk)
}

const _: () = assert!(SLOTS_AT + DEPTH * SLOT <= INLINE_AT && PAYLOAD_AT.is_multiple_of(8));
const _: () = assert!(ASLEEP_AT + MAX_RANKS / 8 <= SHARES_AT);
const _: () = assert!(SHARES_AT + DEPTH * 2 * APART <= HEADER);
// Numbers wrap at 2^32, where slots must not jump.
const _: () = assert!(DEPTH.is_power_of_two() && RING.is_power_of_two());
