//! How long to spin, to yield and to sleep.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub(crate) use super::bell::Belfry;

/// Pauses before a rank that has a core to itself gives it up: about two microseconds.
const MAX_SPINS: u32 = 60;
/// Offers of the processor before a caller's thread sleeps.
const YIELDS: u32 = 100;
/// The same for a thread that runs beside the caller's.
const YIELDS_BESIDE: u32 = 4;
/// The same for an operation that is to end within microseconds or to be run at length.
const QUICK_YIELDS: u32 = 8;
/// A sleeper looks up this often even if nobody wakes it.
const GLANCE: Duration = Duration::from_millis(100);

/// How a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// What was waited for is there, even if the group is broken.
    Met,
    /// The group is broken.
    Broken,
    /// The deadline has passed.
    Late,
}

/// One group's way of waiting on this rank.
#[derive(Debug)]
pub(crate) struct Patience {
    /// Pauses to try first. Halved when they were in vain, raised when they were not: a peer that
    /// has lost its core will not answer within microseconds.
    spins: AtomicU32,
    max_spins: u32,
}

impl Patience {
    /// For ranks that have a core each, or not.
    pub(crate) fn new(cores_suffice: bool) -> Self {
        let max_spins = if cores_suffice { MAX_SPINS } else { 0 };
        Self {
            spins: AtomicU32::new(max_spins),
            max_spins,
        }
    }

    /// Whether `met` comes true within the pauses that are worth trying first.
    pub(crate) fn soon(&self, met: impl Fn() -> bool) -> bool {
        if met() {
            return true;
        }
        let spins = self.spins.load(Ordering::Relaxed);
        for _ in 0..spins {
            std::hint::spin_loop();
            if met() {
                let more = (spins + spins / 2 + 1).min(self.max_spins);
                if more != spins {
                    self.spins.store(more, Ordering::Relaxed);
                }
                return true;
            }
        }
        false
    }

    /// As [`soon`](Self::soon); where ranks share cores, a few offers of the processor take the
    /// place of the pauses.
    pub(crate) fn quickly(&self, met: impl Fn() -> bool) -> bool {
        if self.max_spins > 0 {
            return self.soon(met);
        }
        let offer = || {
            std::thread::yield_now();
            met()
        };
        met() || (0..QUICK_YIELDS).any(|_| offer())
    }

    /// Waits until `met`, the group is `broken`, or the deadline.
    ///
    /// `beside` is for threads that run beside the caller's.
    pub(crate) fn wait<B: Belfry>(
        &self,
        belfry: &B,
        own: usize,
        deadline: Instant,
        beside: bool,
        met: impl Fn() -> bool,
        broken: impl Fn() -> bool,
    ) -> Verdict {
        let spins = self.spins.load(Ordering::Relaxed);
        if self.soon(&met) {
            return Verdict::Met;
        }
        let yields = if beside { YIELDS_BESIDE } else { YIELDS };
        for turn in 0..yields {
            std::thread::yield_now();
            if met() {
                // At once after the spinning: a little more of it would have done.
                let less = if turn < 2 {
                    spins.max(self.max_spins / 4)
                } else {
                    spins / 2
                };
                self.spins.store(less, Ordering::Relaxed);
                return Verdict::Met;
            }
            if broken() {
                break;
            }
        }
        self.spins.store(spins / 2, Ordering::Relaxed);
        loop {
            // What is there counts, whatever else has happened.
            if broken() {
                return if met() { Verdict::Met } else { Verdict::Broken };
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return if met() { Verdict::Met } else { Verdict::Late };
            }
            if belfry.sleep(own, left.min(GLANCE), || met() || broken()) && met() {
                return Verdict::Met;
            }
        }
    }
}
