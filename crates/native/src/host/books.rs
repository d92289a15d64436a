//! Which operations a rank has announced, and what is in use for them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};

use phalanx_pg::Frozen;
use smallvec::SmallVec;

use super::parts::Parts;
use crate::shm::Mark;

/// How far a rank has counted its operations.
///
/// A call of the group is one operation here; a batch is as many as it has calls. Operations are
/// numbered from the group's beginning, on all ranks alike, and the numbers wrap.
///
/// Changed by one thread at a time: by who holds the [`Books`], or by who issues a call while no
/// other is under way. The group's lane sees to that, and its lock orders the two; so they are
/// atomic for the compiler's sake only.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    next: AtomicU32,
    posted: AtomicU32,
    all_done: AtomicU32,
}

impl Numbers {
    /// The next operation to be issued.
    pub(crate) fn next(&self) -> u32 {
        self.next.load(Ordering::Relaxed)
    }

    /// Issues `count` operations; the first of them.
    pub(crate) fn take(&self, count: usize) -> u32 {
        let first = self.next();
        let next = first.wrapping_add(count as u32);
        self.next.store(next, Ordering::Relaxed);
        first
    }

    /// The next operation to be announced to the peers.
    pub(crate) fn posted(&self) -> u32 {
        self.posted.load(Ordering::Relaxed)
    }

    /// All before `next` have been announced.
    pub(crate) fn set_posted(&self, next: u32) {
        self.posted.store(next, Ordering::Relaxed);
    }

    /// The lowest `done` of all ranks when last looked at.
    pub(crate) fn all_done(&self) -> u32 {
        self.all_done.load(Ordering::Relaxed)
    }

    /// All ranks are done with what is before `next`.
    pub(crate) fn set_all_done(&self, next: u32) {
        self.all_done.store(next, Ordering::Relaxed);
    }
}

/// One rank's accounts of the calls that are under way.
#[derive(Debug, Default)]
pub(crate) struct Books {
    entries: VecDeque<Entry>,
}

/// A call that has been issued and is not settled.
#[derive(Debug)]
pub(crate) struct Entry {
    seq: u64,
    pub(crate) first_op: u32,
    pub(crate) calls: u32,
    /// Blocks that peers may access.
    pub(crate) marks: SmallVec<[Mark; 1]>,
    /// Inputs that peers may read.
    pub(crate) kept: SmallVec<[Frozen; 1]>,
    /// Whether it is finished only when every peer's part is.
    pub(crate) shared: bool,
    /// How it was shared out: it is finished when all parts are, too.
    pub(crate) parts: Option<Parts>,
    /// Whether the own part is done.
    pub(crate) ran: bool,
    /// Nobody uses its memory any more.
    closed: bool,
}

impl Books {
    /// Opens an account for call `seq`, which is `calls` operations from `first_op` on.
    pub(crate) fn open(&mut self, seq: u64, first_op: u32, calls: usize) -> &mut Entry {
        self.entries.push_back(Entry {
            seq,
            first_op,
            calls: calls as u32,
            marks: SmallVec::new(),
            kept: SmallVec::new(),
            shared: false,
            parts: None,
            ran: false,
            closed: false,
        });
        self.entry(seq)
    }

    /// The account of call `seq`.
    pub(crate) fn entry(&mut self, seq: u64) -> &mut Entry {
        // One for each call, in order, without gaps.
        let first = self.entries.front().map_or(seq, |entry| entry.seq);
        let entry = self.entries.get_mut((seq - first) as usize);
        entry.expect("announced before it runs, closed after it settled")
    }

    /// Closes the account of call `seq`: nobody uses its memory any more.
    ///
    /// Older ones may be open: peers still work on their memory, or never stopped to.
    pub(crate) fn close(&mut self, seq: u64) {
        let entry = self.entry(seq);
        entry.closed = true;
        // Before what is kept goes: a block that is marked when it is dropped is lost.
        std::mem::take(&mut entry.marks)
            .into_iter()
            .for_each(Mark::clear);
        entry.kept.clear();
        while self.entries.front().is_some_and(|entry| entry.closed) {
            self.entries.pop_front();
        }
    }
}

/// Whether a number that wraps has come to `target`.
pub(crate) fn reached(number: u32, target: u32) -> bool {
    number.wrapping_sub(target) < u32::MAX / 2
}

#[cfg(test)]
mod tests {
    use phalanx_pg::DType;

    use super::*;
    use crate::shm::{Arenas, Block};

    #[test]
    fn what_was_kept_for_a_call_can_be_used_again() {
        let arenas = Arenas::new(Box::new(|_, _| {}));
        let take = || arenas.allocate(DType::U8, 1000).unwrap();
        let location = |buffer: &phalanx_pg::Buffer| {
            let block = Block::of(buffer, &arenas).unwrap();
            (block.location(), block.mark())
        };
        let buffer = take();
        let (first, mark) = location(&buffer);
        let mut books = Books::default();
        let entry = books.open(0, 0, 1);
        entry.marks.push(mark);
        entry.kept.push(buffer.freeze());
        books.close(0);
        assert_eq!(location(&take()).0, first);
    }

    #[test]
    fn numbers_are_compared_across_the_wrap() {
        assert!(reached(5, 5) && reached(6, 5) && !reached(4, 5));
        assert!(reached(1, u32::MAX) && !reached(u32::MAX, 1));
        // Nothing has been done and eight slots are free.
        assert!(reached(0, 0u32.wrapping_sub(8)));
    }

    #[test]
    fn operations_are_numbered_across_the_wrap() {
        let numbers = Numbers::default();
        numbers.next.store(u32::MAX, Ordering::Relaxed);
        assert_eq!((numbers.take(3), numbers.next()), (u32::MAX, 2));
    }

    #[test]
    fn a_call_that_is_over_leaves_older_ones_alone() {
        let mut books = Books::default();
        books.open(0, 0, 1);
        books.open(1, 1, 3);
        books.open(2, 4, 1);
        books.entry(0).shared = true;
        books.close(1);
        assert!(books.entry(0).shared && !books.entry(0).closed);
        assert_eq!(books.entry(2).first_op, 4);
        books.close(0);
        books.open(3, 5, 1);
        assert_eq!(books.entry(3).first_op, 5);
        assert_eq!(books.entries.len(), 2);
    }
}
