//! One rank of a group, among those on its host.

mod announce;
mod ending;
mod run;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Once, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use phalanx_pg::{
    Buffer, Call, CallKind, Done, Error, ErrorKind, Frozen, Mode, Notice, Payload, Result, Turn,
    explicit_counts,
};
use smallvec::SmallVec;

use super::asking::Asking;
use super::bell::Belfry;
use super::books::{Books, Numbers, reached};
use super::control::{
    Control, Counter, DEAD, DEPTH, DROPPED, IN_SLOT, INLINE, JOINED, LEFT, NOTICE,
};
use super::descriptor::{Descriptor, Place};
use super::joined;
use super::parts::Parts;
use super::wait::{Patience, Verdict};
use crate::kernels::{self, Kernels, Source};
use crate::maps::Maps;
use crate::shm::{Arenas, Block, Lent};

/// Largest all-reduce whose input travels with the descriptor, registered or not: ranks may mix
/// both, and the path must not depend on who does what.
pub(crate) const SMALL_REDUCTION: usize = 8 << 10;

/// Largest all-reduce in shared memory that is over in microseconds: one that callers of the group
/// on other threads may be kept waiting for.
const QUICK_REDUCTION: usize = 256 << 10;

/// A list with one entry per rank, usually few.
pub(crate) type PerRank<T> = SmallVec<[T; 8]>;

/// Who a rank is, and what it works with.
pub(crate) struct Seat {
    /// Own rank among those on this host.
    pub(crate) me: usize,
    /// Ranks in the group of those on this host, ascending.
    pub(crate) ranks: Vec<usize>,
    /// Their ranks in the world.
    pub(crate) world: Vec<usize>,
    /// Ranks of the group, on all hosts.
    pub(crate) size: usize,
    pub(crate) arenas: Arc<Arenas>,
    pub(crate) maps: Arc<Maps>,
    pub(crate) kernels: Kernels,
    /// Whether every rank of the host has a core to itself.
    pub(crate) cores_suffice: bool,
}

/// One rank of a group, among those on its host.
///
/// One thread runs operations at a time; announcing and breaking may happen on any other.
pub(crate) struct Local {
    pub(crate) seat: Seat,
    pub(crate) control: Control,
    patience: Patience,
    pub(crate) asking: Asking,
    numbers: Numbers,
    books: Mutex<Books>,
    /// Chunks that have gone through the staging rings, the same on all ranks.
    pub(crate) rounds: AtomicU32,
    ring: OnceLock<()>,
    /// Why this rank ends the group has been written down.
    noticed: Once,
    /// How each rank on this host was lost, as far as this process knows.
    lost: Vec<OnceLock<Error>>,
    /// A peer that has gone made an operation fail: everybody finds that out by itself.
    quiet: AtomicBool,
}

/// The operation that is being run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Current<'a> {
    pub(crate) op: u32,
    /// Of this call, not of the batch that it may be in.
    pub(crate) kind: CallKind,
    pub(crate) turn: &'a Turn,
}

/// Where a rank's input is, for this process.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Input {
    Nowhere,
    At(*const u8),
    Staged,
}

impl Local {
    pub(crate) fn new(seat: Seat, control: Control) -> Self {
        Self {
            patience: Patience::new(seat.cores_suffice),
            asking: Asking::new(),
            lost: seat.ranks.iter().map(|_| OnceLock::new()).collect(),
            seat,
            control,
            numbers: Numbers::default(),
            books: Mutex::default(),
            rounds: AtomicU32::new(0),
            ring: OnceLock::new(),
            noticed: Once::new(),
            quiet: AtomicBool::new(false),
        }
    }

    /// Own rank among those on this host.
    pub(crate) fn me(&self) -> usize {
        self.seat.me
    }

    /// Number of ranks on this host.
    pub(crate) fn ranks(&self) -> usize {
        self.seat.ranks.len()
    }

    /// Whether the group has ranks on other hosts too.
    pub(crate) fn spans_hosts(&self) -> bool {
        self.ranks() < self.seat.size
    }

    /// Everybody else on this host.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.me();
        (0..self.ranks()).filter(move |&rank| rank != me)
    }

    /// The rank on this host that is `rank` in the group, if there is one.
    pub(crate) fn local_rank(&self, rank: usize) -> Option<usize> {
        self.seat.ranks.binary_search(&rank).ok()
    }
}

/// Joining.
impl Local {
    /// Says that this rank is there, and waits until all are. `hopeless` is asked now and then.
    pub(crate) fn join(
        &self,
        deadline: Instant,
        hopeless: &dyn Fn() -> Option<Error>,
    ) -> Result<()> {
        self.control
            .presence(self.me())
            .store(JOINED, Ordering::Release);
        self.control.ring(self.me());
        let since = Instant::now();
        for rank in self.peers() {
            let presence = self.control.presence(rank);
            let (there, broken) = (
                || presence.load(Ordering::Acquire) != 0,
                || self.is_broken(),
            );
            loop {
                let soon = deadline.min(Instant::now() + Duration::from_millis(100));
                let wait = &self.patience;
                match wait.wait(&self.control, self.me(), soon, true, there, broken) {
                    Verdict::Met => break,
                    Verdict::Broken => return Err(self.cause()),
                    Verdict::Late => {}
                }
                if let Some(err) = hopeless() {
                    return Err(err);
                }
                if Instant::now() >= deadline {
                    let rank = self.seat.ranks[rank];
                    return Err(crate::member::did_not_join(rank, since.elapsed()));
                }
            }
        }
        Ok(())
    }
}

/// Waiting.
impl Local {
    /// Sets an own counter and wakes who waits for it.
    pub(crate) fn publish(&self, counter: Counter, value: u32) {
        self.control
            .counter(self.me(), counter)
            .store(value, Ordering::Release);
        self.control.ring(self.me());
    }

    /// Waits until a peer's counter has come to `target`.
    pub(crate) fn await_counter(
        &self,
        current: &Current<'_>,
        rank: usize,
        counter: Counter,
        target: u32,
    ) -> Result<()> {
        let word = self.control.counter(rank, counter);
        let verb = match counter {
            Counter::Done => "finish its part of an operation before",
            _ => "finish its part of",
        };
        self.await_peer(current, rank, verb, || {
            reached(word.load(Ordering::Acquire), target)
        })
    }

    fn await_peer(
        &self,
        current: &Current<'_>,
        rank: usize,
        verb: &str,
        met: impl Fn() -> bool,
    ) -> Result<()> {
        let broken = || self.is_broken() || self.is_gone(rank);
        let turn = current.turn;
        let beside = turn.mode == Mode::Async;
        let verdict =
            self.patience
                .wait(&self.control, self.me(), turn.deadline, beside, met, broken);
        match verdict {
            Verdict::Met => Ok(()),
            Verdict::Broken => Err(match self.is_broken() {
                true => self.cause(),
                false => self.gone(rank),
            }),
            Verdict::Late => Err(match self.most_behind(rank) {
                None => self.late(turn, self.seat.ranks[rank], verb),
                Some(other) => self.late(turn, self.seat.ranks[other], "reach"),
            }),
        }
    }

    /// Whether a rank takes no part any more.
    fn is_gone(&self, rank: usize) -> bool {
        self.control.presence(rank).load(Ordering::Acquire) >= LEFT
    }

    /// Whether a rank will not touch anybody's memory for an operation any more.
    pub(super) fn has_done(&self, rank: usize, op: u32) -> bool {
        let word = self.control.counter(rank, Counter::Done);
        reached(word.load(Ordering::Acquire), op.wrapping_add(1))
    }

    /// Who has done less than `awaited`, which then waits for it as this rank does.
    fn most_behind(&self, awaited: usize) -> Option<usize> {
        let count = |rank, counter| self.control.counter(rank, counter).load(Ordering::Acquire);
        let own = count(self.me(), Counter::Done);
        let progress = |rank: usize| {
            let done = count(rank, Counter::Done);
            let is_in_it =
                self.control.slot(rank, done).load(Ordering::Acquire) == done.wrapping_add(1);
            let chunks =
                count(rank, Counter::Worked).wrapping_sub(self.rounds.load(Ordering::Acquire));
            // They are close together, and may have wrapped.
            (
                done.wrapping_sub(own).cast_signed(),
                is_in_it,
                chunks.cast_signed(),
            )
        };
        let last = self.peers().min_by_key(|&rank| progress(rank))?;
        (progress(last) < progress(awaited)).then_some(last)
    }

    /// The error of an operation for which a rank of the group did not come.
    pub(crate) fn late(&self, turn: &Turn, rank: usize, verb: &str) -> Error {
        let (kind, seq) = (turn.kind, turn.seq);
        let limit = (turn.deadline - turn.started).as_secs_f64();
        let what = format!("rank {rank} did not {verb} {kind} #{seq} within {limit:.1} s");
        Error::new(ErrorKind::Timeout, what).from_peer(rank)
    }

    /// Whether the memory of the call is nobody's but the caller's any more.
    pub(crate) fn is_settled(&self, turn: &Turn) -> bool {
        let mut books = self.books.lock();
        let entry = books.entry(turn.seq);
        let last = entry.first_op.wrapping_add(entry.calls).wrapping_sub(1);
        let settled = !entry.shared
            || self.parts_finished(last, entry.parts)
            || self.peers().all(|rank| self.has_done(rank, last));
        if settled {
            books.close(turn.seq);
        }
        settled
    }

    /// Waits for that.
    pub(crate) fn settle(&self, turn: &Turn) -> Result<()> {
        let (op, parts) = {
            let mut books = self.books.lock();
            let entry = books.entry(turn.seq);
            let end = entry.first_op.wrapping_add(entry.calls);
            if !entry.shared {
                books.close(turn.seq);
                return Ok(());
            }
            (end.wrapping_sub(1), entry.parts)
        };
        let kind = turn.kind;
        let current = Current { op, kind, turn };
        let finished = |rank| self.has_done(rank, op) || self.parts_finished(op, parts);
        if parts.is_some() {
            // Those who are there first: they may finish it without who is gone.
            for rank in self.peers() {
                let met = || finished(rank) || self.is_gone(rank);
                self.await_peer(&current, rank, "finish its part of", met)?;
            }
        }
        for rank in self.peers() {
            self.await_peer(&current, rank, "finish its part of", || finished(rank))?;
        }
        self.books.lock().close(turn.seq);
        Ok(())
    }
}

/// The memory of a broadcast, on either side.
pub(crate) fn payload_buffer(data: Payload) -> Option<Buffer> {
    match data {
        Payload::Writable(buffer) => Some(buffer),
        Payload::ReadOnly(_) => None,
    }
}

const _: () = assert!(Notice::MAX_LEN <= NOTICE);
