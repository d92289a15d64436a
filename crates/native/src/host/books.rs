//! Which operations a rank has announced, and what is in use for them.

use std::collections::VecDeque;

use phalanx_pg::Frozen;
use smallvec::SmallVec;

use crate::shm::Mark;

/// One rank's account of its operations.
///
/// A call of the group is one operation here; a batch is as many as it has calls. Operations are
/// numbered from the group's beginning, on all ranks alike, and the numbers wrap.
#[derive(Debug, Default)]
pub(crate) struct Books {
    next_op: u32,
    /// The next operation to be announced to the peers.
    pub(crate) posted: u32,
    /// The lowest `done` of all ranks when last looked at.
    pub(crate) all_done: u32,
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
    /// Whether the own part is done.
    pub(crate) ran: bool,
    /// Nobody uses its memory any more.
    closed: bool,
}

impl Books {
    /// Opens an account for call `seq`, which is `calls` operations.
    pub(crate) fn open(&mut self, seq: u64, calls: usize) {
        self.entries.push_back(Entry {
            seq,
            first_op: self.next_op,
            calls: calls as u32,
            marks: SmallVec::new(),
            kept: SmallVec::new(),
            shared: false,
            ran: false,
            closed: false,
        });
        self.next_op = self.next_op.wrapping_add(calls as u32);
    }

    /// The number of the next operation.
    pub(crate) fn next_op(&self) -> u32 {
        self.next_op
    }

    /// Takes it without an account.
    pub(crate) fn skip(&mut self) {
        self.next_op = self.next_op.wrapping_add(1);
    }

    /// Opens an account for call `seq`, which is operation `op` and nothing before it is open.
    pub(crate) fn open_at(&mut self, seq: u64, op: u32) -> &mut Entry {
        debug_assert!(self.entries.is_empty());
        self.next_op = op;
        self.open(seq, 1);
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
        entry.kept.clear();
        std::mem::take(&mut entry.marks)
            .into_iter()
            .for_each(Mark::clear);
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
    use super::*;

    #[test]
    fn numbers_are_compared_across_the_wrap() {
        assert!(reached(5, 5) && reached(6, 5) && !reached(4, 5));
        assert!(reached(1, u32::MAX) && !reached(u32::MAX, 1));
        // Nothing has been done and eight slots are free.
        assert!(reached(0, 0u32.wrapping_sub(8)));
    }

    #[test]
    fn a_call_that_is_over_leaves_older_ones_alone() {
        let mut books = Books::default();
        books.open(0, 1);
        books.open(1, 3);
        books.open(2, 1);
        books.entry(0).shared = true;
        books.close(1);
        assert!(books.entry(0).shared && !books.entry(0).closed);
        assert_eq!(books.entry(2).first_op, 4);
        books.close(0);
        books.open(3, 1);
        assert_eq!(books.entry(3).first_op, 5);
        assert_eq!(books.entries.len(), 2);
    }
}
