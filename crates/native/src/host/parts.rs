//! A reduction of shared memory whose parts are done by whoever has a processor.
//!
//! Where ranks share processors, most of them do not run. So buffers are cut into parts, and every
//! rank that has come to the operation takes one after the other until none is left. An operation does
//! not wait for a rank that has announced it and does not run, unless that has taken a part.
//!
//! Two words go with every slot. The first rank of the host sets them to zero before it announces
//! the operation, so whoever has seen all announcements finds them so:
//!
//! | word | counts |
//! |---|---|
//! | `taken` | attempts to take a part; those beyond the last part find none |
//! | `finished` | parts whose result is in the memory of all who take it |
//!
//! A rank is `done` when it has found none: it will not touch anybody's memory for this operation.
//! (Or when it cannot take part, because it does not know the memory of a rank that is gone. Others
//! may, and somebody must have found none before everybody is done: who went first, or who lives.)
//! The operation is over for a rank when all parts are finished, or when everybody is done, which
//! implies it. Both are needed: the words are used again when everybody is done, and who has not
//! looked until then sees other numbers.

use std::sync::atomic::{AtomicU32, Ordering};

use phalanx_pg::{Buffer, ReduceOp};

use super::local::Local;
use crate::kernels::Source;

/// Parts for each rank, if they are neither too small nor too large: enough that ranks end at about
/// the same time.
const PARTS_PER_RANK: usize = 4;
/// Taking a part should cost little beside it.
const LEAST_BYTES: usize = 16 << 10;
/// A rank may lose its processor in the middle of a part, and all others wait.
const MOST_BYTES: usize = 256 << 10;
/// Parts begin at multiples of this many elements, as slices do.
const ALIGN: usize = 128;

/// How a buffer is cut, on all ranks alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parts {
    /// Elements of the buffer, and of each part but the last.
    len: usize,
    each: usize,
}

impl Parts {
    fn new(len: usize, size: usize, ranks: usize) -> Self {
        let bytes = (len * size / (PARTS_PER_RANK * ranks)).clamp(LEAST_BYTES, MOST_BYTES);
        let each = (bytes / size).next_multiple_of(ALIGN);
        Self { len, each }
    }

    pub(crate) fn count(self) -> u32 {
        self.len.div_ceil(self.each) as u32
    }

    /// Where a part begins and ends.
    fn range(self, part: u32) -> (usize, usize) {
        let start = part as usize * self.each;
        (start, self.len.min(start + self.each))
    }
}

/// The words of one operation.
#[derive(Clone, Copy)]
pub(crate) struct Shares<'a> {
    pub(crate) taken: &'a AtomicU32,
    pub(crate) finished: &'a AtomicU32,
}

impl Shares<'_> {
    /// Before the operation is announced.
    pub(crate) fn reset(self) {
        self.taken.store(0, Ordering::Relaxed);
        self.finished.store(0, Ordering::Relaxed);
    }

    /// Takes a part, if one of `count` is left.
    fn take(self, count: u32) -> Option<u32> {
        // What a part needs is ordered by the announcements.
        let part = self.taken.fetch_add(1, Ordering::Relaxed);
        (part < count).then_some(part)
    }

    /// Says that the result of a part is where it belongs.
    fn finish(self) {
        self.finished.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether the results of all parts are.
    pub(crate) fn all_finished(self, count: u32) -> bool {
        self.finished.load(Ordering::Acquire) == count
    }
}

impl Local {
    /// How a reduction of `buf` is shared out, if ranks share processors. Otherwise each does a slice.
    pub(crate) fn parts(&self, buf: &Buffer) -> Option<Parts> {
        let size = buf.dtype().size();
        (!self.seat.cores_suffice).then(|| Parts::new(buf.len(), size, self.ranks()))
    }

    /// Whether an operation that was shared out is over. All have announced it.
    pub(crate) fn parts_finished(&self, op: u32, parts: Option<Parts>) -> bool {
        parts.is_some_and(|parts| self.control.shares(op).all_finished(parts.count()))
    }

    /// Does parts of the reduction of all sources until none is left.
    pub(crate) fn reduce_parts(
        &self,
        op: u32,
        parts: Parts,
        buf: &Buffer,
        reduce: ReduceOp,
        (sources, root): (&[Source], Option<usize>),
    ) {
        let shares = self.control.shares(op);
        while let Some(part) = shares.take(parts.count()) {
            self.reduce_range(buf.dtype(), parts.range(part), reduce, sources, root);
            shares.finish();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use phalanx_pg::{Call, CallKind, DType, Error, ErrorKind, Mode, Turn};
    use proptest::prelude::*;

    use super::*;
    use crate::host::bell::Belfry;
    use crate::host::control::{Control, Counter, JOINED};
    use crate::host::descriptor::{Descriptor, Place};
    use crate::host::local::{Current, Seat};
    use crate::kernels::Kernels;
    use crate::maps::Maps;
    use crate::shm::{Arenas, Segment};

    /// Rank 0 of three that share processors.
    fn first_of_three() -> Local {
        let seat = Seat {
            me: 0,
            ranks: vec![0, 1, 2],
            world: vec![0, 1, 2],
            size: 3,
            arenas: Arenas::new(Box::new(|_, _| {})),
            maps: Arc::new(Maps::new(3)),
            kernels: Kernels::Portable,
            cores_suffice: false,
        };
        let local = Local::new(seat, Control::create(3, 4096).unwrap());
        for rank in 0..3 {
            local
                .control
                .presence(rank)
                .store(JOINED, Ordering::Release);
        }
        local
    }

    /// All ranks have announced an all-reduce, rank 0 has done what it could, one part that somebody
    /// has taken is not finished, and rank 1, which is waited for first, is dead.
    fn all_but_one_part(local: &Local, turn: &Turn) {
        let buf = local.seat.arenas.allocate(DType::F32, 1 << 16).unwrap();
        let parts = local.parts(&buf).expect("they share processors");
        let op = ReduceOp::Sum;
        local.announce(&Call::AllReduce { buf, op }, turn.seq);
        let kind = turn.kind;
        local.keep_until_finished(&Current { op: 0, kind, turn }, Some(parts));
        let shares = local.control.shares(0);
        while shares.take(parts.count()).is_some() {}
        (1..parts.count()).for_each(|_| shares.finish());
        local.publish(Counter::Done, 1);
        let lost = Error::new(ErrorKind::PeerLost, "rank 1 is dead").from_peer(1);
        local.mark_dead(1, &lost);
    }

    fn turn() -> Turn {
        let started = Instant::now();
        Turn {
            seq: 0,
            kind: CallKind::AllReduce,
            mode: Mode::Blocking,
            deadline: started + Duration::from_secs(60),
            started,
        }
    }

    /// Rank 2 finds no part, or none any more.
    fn third_is_done(local: &Local) {
        let done = local.control.counter(2, Counter::Done);
        done.store(1, Ordering::Release);
        local.control.ring(2);
    }

    #[test]
    fn what_the_living_finish_succeeds_although_another_is_dead() {
        let (local, turn) = (first_of_three(), turn());
        all_but_one_part(&local, &turn);
        std::thread::scope(|scope| {
            let settled = scope.spawn(|| local.settle(&turn));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!settled.is_finished(), "rank 2 may have the part");
            local.control.shares(0).finish();
            third_is_done(&local);
            settled.join().unwrap().unwrap();
        });
    }

    /// A stopped rank goes on after its peers have given it up: all that it needs of them is there.
    #[test]
    fn a_call_issued_after_the_group_broke_fails_whatever_peers_had_announced() {
        for broken in [false, true] {
            let (local, turn) = (first_of_three(), turn());
            let memory = Arc::new(Segment::create(1 << 20).unwrap());
            (0..3).for_each(|rank| local.seat.maps.add(rank, 0, Arc::clone(&memory)));
            let buf = local.seat.arenas.allocate(DType::F32, 1 << 14).unwrap();
            let call = Call::AllReduce {
                buf,
                op: ReduceOp::Sum,
            };
            let theirs = Descriptor::new(&call, Place::Shared, 1);
            for rank in [1, 2] {
                let offset = rank << 17;
                local
                    .control
                    .describe(rank, 0, &theirs.shared_at(0, offset));
                local.control.slot(rank, 0).store(1, Ordering::Release);
            }
            local
                .control
                .abort()
                .store(3 * u32::from(broken), Ordering::Release);
            assert_eq!(local.quick(&call, turn.seq), !broken);
            let announced = local.control.slot(0, 0).load(Ordering::Acquire) == 1;
            assert_eq!(announced, !broken);
            if broken {
                let as_it_is = |call| Ok((call, None));
                let ran = local.run_each(call, &turn, as_it_is, |_, _| unreachable!());
                assert_eq!(ran.unwrap_err().kind(), ErrorKind::Aborted);
            }
        }
    }

    #[test]
    fn who_does_not_know_a_dead_ranks_memory_leaves_the_parts_to_others() {
        let (local, turn) = (first_of_three(), turn());
        let buf = local.seat.arenas.allocate(DType::F32, 1 << 16).unwrap();
        let (parts, op) = (local.parts(&buf).unwrap(), ReduceOp::Sum);
        let call = Call::AllReduce { buf, op };
        local.announce(&call, turn.seq);
        let Call::AllReduce { buf, .. } = call else {
            unreachable!()
        };
        for rank in [1, 2] {
            let own = local.control.descriptor(0, 0);
            local.control.describe(rank, 0, &own);
            local.control.slot(rank, 0).store(1, Ordering::Release);
        }
        let memory = Arc::new(Segment::create(1 << 20).unwrap());
        local.seat.maps.add(2, 0, memory);
        let lost = Error::new(ErrorKind::PeerLost, "rank 1 is dead").from_peer(1);
        local.mark_dead(1, &lost);
        let kind = turn.kind;
        let current = Current {
            op: 0,
            kind,
            turn: &turn,
        };
        local.run_reduce(&current, buf, op, None).unwrap();
        assert_eq!(local.control.shares(0).take(parts.count()), Some(0));
        (0..parts.count()).for_each(|_| local.control.shares(0).finish());
        third_is_done(&local);
        local.settle(&turn).unwrap();
    }

    #[test]
    fn a_part_that_a_dead_rank_had_taken_fails_the_operation() {
        let (local, turn) = (first_of_three(), turn());
        all_but_one_part(&local, &turn);
        std::thread::scope(|scope| {
            let settled = scope.spawn(|| local.settle(&turn));
            third_is_done(&local);
            let err = settled.join().unwrap().unwrap_err();
            assert_eq!((err.kind(), err.peer()), (ErrorKind::PeerLost, Some(1)));
        });
    }

    proptest! {
        #[test]
        fn parts_cover_everything_once(
            len in 0usize..10_000_000,
            log_size in 0u32..4,
            ranks in 1usize..20,
        ) {
            let parts = Parts::new(len, 1 << log_size, ranks);
            let mut at = 0;
            for part in 0..parts.count() {
                let (start, end) = parts.range(part);
                prop_assert!(start == at && end > start);
                at = end;
            }
            prop_assert_eq!(at, len);
        }
    }

    #[test]
    fn each_part_is_taken_once_and_late_ranks_find_none() {
        let (taken, finished) = (AtomicU32::new(7), AtomicU32::new(7));
        let shares = Shares {
            taken: &taken,
            finished: &finished,
        };
        shares.reset();
        assert_eq!((shares.take(2), shares.take(2)), (Some(0), Some(1)));
        shares.finish();
        assert!(shares.take(2).is_none() && !shares.all_finished(2));
        shares.finish();
        assert!(shares.take(2).is_none() && shares.all_finished(2));
    }
}
