//! The protocol of the control segment under a model checker, which tries every order of events
//! that the memory model allows.
//!
//! Two ranks are two threads. What is plain memory in the segment is a cell here that notices two
//! accesses without an order between them. Every model takes the orderings as arguments: with the
//! ones of the real code nothing is found, and with a weaker one something must be, or the model
//! would prove nothing. How ranks sleep and wake is modelled in `bell.rs`; here they look again
//! and again.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

use super::books::reached;

/// How a word is published and how it is seen.
#[derive(Debug, Clone, Copy)]
struct Orderings {
    publish: Ordering,
    see: Ordering,
}

/// As in `local/`: counters and slots are stored with release and loaded with acquire.
const REAL: Orderings = Orderings {
    publish: Ordering::Release,
    see: Ordering::Acquire,
};

const WEAK_PUBLISH: Orderings = Orderings {
    publish: Ordering::Relaxed,
    ..REAL
};

const WEAK_SEE: Orderings = Orderings {
    see: Ordering::Relaxed,
    ..REAL
};

fn explore(body: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    // All switches where a rank waits, and so many anywhere else.
    model.preemption_bound = Some(2);
    model.check(body);
}

/// Runs both ranks to their end.
fn both<T: Send + Sync + 'static>(shared: T, rank: fn(&T, usize)) {
    let shared = Arc::new(shared);
    let other = Arc::clone(&shared);
    let thread = thread::spawn(move || rank(&other, 1));
    rank(&shared, 0);
    thread.join().unwrap();
}

fn until(met: impl Fn() -> bool) {
    while !met() {
        thread::yield_now();
    }
}

/// Plain memory of the segment.
struct Cell(UnsafeCell<u32>);

// SAFETY: that accesses have an order is what the checker checks.
unsafe impl Sync for Cell {}

impl Cell {
    fn new() -> Self {
        Self(UnsafeCell::new(0))
    }

    fn set(&self, value: u32) {
        // SAFETY: the checker panics if anybody else accesses it now.
        self.0.with_mut(|ptr| unsafe { *ptr = value });
    }

    fn get(&self) -> u32 {
        // SAFETY: as above.
        self.0.with(|ptr| unsafe { *ptr })
    }
}

/// Slots: announced, read, done with, used again (`Local::post`, `meet`, `publish`,
/// `slot_is_free`).
mod slots {
    use super::*;

    const DEPTH: usize = 2;
    const OPS: u32 = 3;

    struct Area {
        words: [AtomicU32; DEPTH],
        payloads: [Cell; DEPTH],
        done: AtomicU32,
    }

    struct Shared {
        areas: [Area; 2],
        with: Orderings,
        /// Whether a slot is written only when the peer is done with what was in it.
        waits: bool,
    }

    fn shared(with: Orderings, waits: bool) -> Shared {
        let area = || Area {
            words: [AtomicU32::new(0), AtomicU32::new(0)],
            payloads: [Cell::new(), Cell::new()],
            done: AtomicU32::new(0),
        };
        Shared {
            areas: [area(), area()],
            with,
            waits,
        }
    }

    fn rank(shared: &Shared, me: usize) {
        let (own, peer) = (&shared.areas[me], &shared.areas[1 - me]);
        let Orderings { publish, see } = shared.with;
        let is_free = |op: u32| {
            let needed = op.wrapping_sub(DEPTH as u32 - 1);
            !shared.waits || reached(peer.done.load(see), needed)
        };
        let mut posted = 0;
        for op in 0..OPS {
            // Announced when issued, as far as there is room; at the latest when it runs.
            while posted < OPS && (posted == op || is_free(posted)) {
                until(|| is_free(posted));
                own.payloads[posted as usize % DEPTH].set(10 * posted + me as u32);
                own.words[posted as usize % DEPTH].store(posted + 1, publish);
                posted += 1;
            }
            let at = op as usize % DEPTH;
            until(|| peer.words[at].load(see) == op + 1);
            assert_eq!(peer.payloads[at].get(), 10 * op + 1 - me as u32);
            own.done.store(op + 1, publish);
        }
    }

    #[test]
    fn a_slot_is_read_as_announced_and_written_when_all_are_done_with_it() {
        explore(|| both(shared(REAL, true), rank));
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn using_a_slot_again_too_early_is_found() {
        explore(|| both(shared(REAL, false), rank));
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn announcing_without_release_is_found() {
        explore(|| both(shared(WEAK_PUBLISH, true), rank));
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn reading_without_acquire_is_found() {
        explore(|| both(shared(WEAK_SEE, true), rank));
    }
}

/// The staging ring of a reduction (`Chunks::put_out`, `reduce`, `take_back`,
/// `Local::await_free_chunk`): ranks put the other's slice of a chunk into their rings, each reduces
/// its slice in the other's ring, then they take the results back, one chunk behind.
mod ring {
    use super::*;

    const RING: usize = 2;
    const CHUNKS: u32 = 3;

    struct Area {
        /// The slice that the other one reduces.
        ring: [Cell; RING],
        staged: AtomicU32,
        worked: AtomicU32,
    }

    struct Shared {
        areas: [Area; 2],
        with: Orderings,
        /// Whether results are taken back only when the peer has worked on them.
        waits: bool,
    }

    fn shared(with: Orderings, waits: bool) -> Shared {
        let area = || Area {
            ring: [Cell::new(), Cell::new()],
            staged: AtomicU32::new(0),
            worked: AtomicU32::new(0),
        };
        Shared {
            areas: [area(), area()],
            with,
            waits,
        }
    }

    fn rank(shared: &Shared, me: usize) {
        let (own, peer) = (&shared.areas[me], &shared.areas[1 - me]);
        let Orderings { publish, see } = shared.with;
        let take_back = |chunk: u32| {
            until(|| !shared.waits || reached(peer.worked.load(see), chunk + 1));
            let slice = &own.ring[chunk as usize % RING];
            assert_eq!(slice.get(), 2 * chunk + 1, "the sum of both");
        };
        let (mut staged, mut taken) = (0, 0);
        for chunk in 0..CHUNKS {
            while staged < CHUNKS.min(taken + RING as u32) {
                let needed = staged.wrapping_sub(RING as u32 - 1);
                until(|| reached(peer.worked.load(see), needed));
                own.ring[staged as usize % RING].set(staged + me as u32);
                own.staged.store(staged + 1, publish);
                staged += 1;
            }
            until(|| reached(peer.staged.load(see), chunk + 1));
            let slice = &peer.ring[chunk as usize % RING];
            slice.set(chunk + me as u32 + slice.get());
            own.worked.store(chunk + 1, publish);
            if chunk > 0 {
                take_back(chunk - 1);
                taken = chunk;
            }
        }
        take_back(CHUNKS - 1);
    }

    #[test]
    fn a_chunk_is_used_again_when_everybody_has_worked_on_it() {
        explore(|| both(shared(REAL, true), rank));
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn taking_back_what_is_being_worked_on_is_found() {
        explore(|| both(shared(REAL, false), rank));
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn staging_without_release_is_found() {
        explore(|| both(shared(WEAK_PUBLISH, true), rank));
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn working_without_acquire_is_found() {
        explore(|| both(shared(WEAK_SEE, true), rank));
    }
}

/// A reduction that is shared out (`parts.rs`): who has seen all announcements takes parts until none is
/// left, and a rank writes to its memory again as soon as all are finished.
mod parts {
    use super::*;

    const OPS: u32 = 2;
    const PARTS: usize = 2;

    struct Area {
        slot: AtomicU32,
        done: AtomicU32,
        memory: [Cell; PARTS],
    }

    struct Shared {
        areas: [Area; 2],
        taken: AtomicU32,
        finished: AtomicU32,
        /// How parts are said to be finished, and how that is seen.
        with: Orderings,
        /// Whether memory is written to only when all parts are finished.
        waits: bool,
    }

    fn shared(with: Orderings, waits: bool) -> Shared {
        let area = || Area {
            slot: AtomicU32::new(0),
            done: AtomicU32::new(0),
            memory: [Cell::new(), Cell::new()],
        };
        Shared {
            areas: [area(), area()],
            taken: AtomicU32::new(9),
            finished: AtomicU32::new(9),
            with,
            waits,
        }
    }

    fn rank(shared: &Shared, me: usize) {
        let (own, peer) = (&shared.areas[me], &shared.areas[1 - me]);
        let has_done = |area: &Area, op| reached(area.done.load(Ordering::Acquire), op + 1);
        for op in 0..OPS {
            // Before anything else that is ordered: what callers do with a result.
            own.memory.iter().for_each(|part| part.set(op + me as u32));
            // One slot: it is free when everybody is done with what was in it.
            until(|| op == 0 || has_done(peer, op - 1));
            if me == 0 {
                shared.taken.store(0, Ordering::Relaxed);
                shared.finished.store(0, Ordering::Relaxed);
            }
            own.slot.store(op + 1, Ordering::Release);
            until(|| peer.slot.load(Ordering::Acquire) == op + 1);
            loop {
                let part = shared.taken.fetch_add(1, Ordering::Relaxed) as usize;
                if part >= PARTS {
                    break;
                }
                let sum = own.memory[part].get() + peer.memory[part].get();
                own.memory[part].set(sum);
                peer.memory[part].set(sum);
                shared.finished.fetch_add(1, shared.with.publish);
            }
            own.done.store(op + 1, Ordering::Release);
            let all = |finished: u32| finished == PARTS as u32;
            until(|| {
                !shared.waits || all(shared.finished.load(shared.with.see)) || has_done(peer, op)
            });
            let sums = own.memory.iter().all(|part| part.get() == 2 * op + 1);
            assert!(sums, "the sum of both");
        }
    }

    const FINISHED: Orderings = Orderings {
        publish: Ordering::AcqRel,
        see: Ordering::Acquire,
    };

    #[test]
    fn memory_is_the_callers_again_when_all_parts_are_finished() {
        explore(|| both(shared(FINISHED, true), rank));
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn using_memory_before_all_parts_are_finished_is_found() {
        explore(|| both(shared(FINISHED, false), rank));
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn finishing_a_part_without_release_is_found() {
        let weak = Orderings {
            publish: Ordering::Relaxed,
            ..FINISHED
        };
        explore(move || both(shared(weak, true), rank));
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn seeing_finished_parts_without_acquire_is_found() {
        let weak = Orderings {
            see: Ordering::Relaxed,
            ..FINISHED
        };
        explore(move || both(shared(weak, true), rank));
    }
}

/// The end of a group: what was done before it counts (`Patience::wait`, `Local::depart`), and all
/// give the same first cause (`Local::break_for`, `cause`).
mod end {
    use super::*;

    struct Shared {
        done: [AtomicU32; 2],
        presence: [AtomicU32; 2],
        notices: [Cell; 2],
        lengths: [AtomicU32; 2],
        abort: AtomicU32,
        with: Orderings,
        /// Whether what is waited for is looked at once more after the end was seen.
        looks_again: bool,
    }

    fn shared(with: Orderings, looks_again: bool) -> Shared {
        let words = || [AtomicU32::new(0), AtomicU32::new(0)];
        Shared {
            done: words(),
            presence: words(),
            notices: [Cell::new(), Cell::new()],
            lengths: words(),
            abort: AtomicU32::new(0),
            with,
            looks_again,
        }
    }

    impl Shared {
        fn write_notice(&self, me: usize) {
            self.notices[me].set(100 + me as u32);
            self.lengths[me].store(1, self.with.publish);
        }

        fn notice_of(&self, rank: usize) -> u32 {
            assert_eq!(self.lengths[rank].load(self.with.see), 1, "it says why");
            self.notices[rank].get()
        }
    }

    /// Rank 1 does its part and goes; rank 0, which comes later, must get what was done.
    fn departure(shared: &Shared, me: usize) {
        let Orderings { publish, see } = shared.with;
        if me == 1 {
            shared.done[1].store(1, publish);
            shared.write_notice(1);
            shared.presence[1].store(3, publish);
            return;
        }
        let met = || shared.done[1].load(see) == 1;
        loop {
            if met() {
                break;
            }
            if shared.presence[1].load(see) == 3 {
                assert_eq!(shared.notice_of(1), 101);
                assert!(shared.looks_again && met(), "it had been done before");
                break;
            }
            thread::yield_now();
        }
    }

    /// Both break the group at once, and agree on who was first.
    fn breaking(shared: &Shared, me: usize) {
        let Orderings { publish, see } = shared.with;
        let both_ways = match publish {
            Ordering::Relaxed => Ordering::Relaxed,
            _ => Ordering::AcqRel,
        };
        shared.write_notice(me);
        let own = me as u32 + 1;
        let _ = shared.abort.compare_exchange(0, own, both_ways, see);
        let first = shared.abort.load(see) as usize - 1;
        assert_eq!(shared.notice_of(first), 100 + first as u32);
        shared.done[me].store(first as u32 + 1, publish);
        let other = shared.done[1 - me].load(see);
        assert!(other == 0 || other == first as u32 + 1, "one first cause");
    }

    #[test]
    fn what_was_done_before_the_end_counts() {
        explore(|| both(shared(REAL, true), departure));
    }

    #[test]
    #[should_panic(expected = "it had been done before")]
    fn not_looking_once_more_is_found() {
        explore(|| both(shared(REAL, false), departure));
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn leaving_without_release_is_found() {
        explore(|| both(shared(WEAK_PUBLISH, true), departure));
    }

    #[test]
    fn all_name_the_same_first_cause() {
        explore(|| both(shared(REAL, true), breaking));
    }

    #[test]
    #[should_panic(expected = "it says why")]
    fn breaking_without_order_is_found() {
        explore(|| both(shared(WEAK_PUBLISH, true), breaking));
    }
}
