//! Whether loops ask for peers' lines before they read them.
//!
//! It gains a twentieth to a fifth of the time, or costs a tenth: which, is one rank's own, lasts for
//! seconds, and nothing that a program can look at tells it. So both ways are tried now and then, in
//! turn, and the one that was faster more often is kept until the next time. Results do not depend on
//! it, so ranks need not agree.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::kernels::Kernels;

/// Reductions from one trial to the next: some milliseconds of what is worth trying.
const PERIOD: u32 = 512;
/// Reductions of a trial, each way half of them.
const TRIAL: u32 = 16;
/// Bytes of a reduction that are worth trying: below there is little to ask for, and above, the memory
/// is what limits.
const TRIED: RangeInclusive<usize> = 8 << 10..=512 << 10;

/// One rank's choice in a group. Used by one thread at a time; atomic for the compiler's sake.
#[derive(Debug)]
pub(crate) struct Asking {
    /// Reductions since the last trial began.
    turn: AtomicU32,
    /// How often asking was the faster one of a pair, less how often it was not.
    wins: AtomicI32,
    /// What the first of a pair took, in picoseconds for each byte.
    first: AtomicU64,
    asks: AtomicBool,
}

impl Asking {
    pub(crate) fn new() -> Self {
        Self {
            turn: AtomicU32::new(0),
            wins: AtomicI32::new(0),
            first: AtomicU64::new(0),
            asks: AtomicBool::new(true),
        }
    }

    /// Does a reduction that reads `bytes` of each source, with the loops that are faster now.
    #[inline]
    pub(crate) fn reduce(&self, kernels: Kernels, bytes: usize, reduce: impl FnOnce(Kernels)) {
        if !kernels.asks() || !TRIED.contains(&bytes) {
            return reduce(kernels);
        }
        let turn = self.turn.load(Ordering::Relaxed);
        self.turn.store((turn + 1) % PERIOD, Ordering::Relaxed);
        let (asks, start) = match turn < TRIAL {
            true => (asks_in(turn), Some(Instant::now())),
            false => (self.asks.load(Ordering::Relaxed), None),
        };
        reduce(match asks {
            true => kernels,
            false => kernels.not_asking(),
        });
        if let Some(start) = start {
            self.tell(turn, start.elapsed(), bytes);
        }
    }

    /// What a reduction of the trial took.
    fn tell(&self, turn: u32, took: Duration, bytes: usize) {
        let took = took.as_nanos() as u64 * 1000 / bytes as u64;
        if turn.is_multiple_of(2) {
            return self.first.store(took, Ordering::Relaxed);
        }
        let first = self.first.load(Ordering::Relaxed);
        let first_won = first < took;
        let win = if first_won == asks_in(turn - 1) {
            1
        } else {
            -1
        };
        let before = if turn == 1 {
            0
        } else {
            self.wins.load(Ordering::Relaxed)
        };
        self.wins.store(before + win, Ordering::Relaxed);
        if turn == TRIAL - 1 && before + win != 0 {
            self.asks.store(before + win > 0, Ordering::Relaxed);
        }
    }
}

/// Which way the reduction of a trial goes: yes, no, no, yes, and so on.
fn asks_in(turn: u32) -> bool {
    (turn ^ turn >> 1) & 1 == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 32 << 10;

    /// What it does in one period, if asking takes `asking` and not asking `other`.
    fn period(asking: &Asking, [yes, no]: [u64; 2]) {
        for turn in 0..TRIAL {
            let took = if asks_in(turn) { yes } else { no };
            asking.tell(turn, Duration::from_nanos(took), BYTES);
        }
    }

    #[test]
    fn what_was_faster_is_kept_until_it_is_not() {
        let asking = Asking::new();
        for (times, asks) in [([900, 800], false), ([800, 900], true), ([901, 900], false)] {
            period(&asking, times);
            assert_eq!(asking.asks.load(Ordering::Relaxed), asks, "{times:?}");
        }
    }

    #[test]
    fn both_ways_are_tried_alike_and_in_both_orders() {
        let ways: Vec<_> = (0..TRIAL).map(asks_in).collect();
        let orders = |order: [bool; 2]| ways.chunks(2).filter(|pair| **pair == order).count();
        assert_eq!(orders([true, false]), TRIAL as usize / 4);
        assert_eq!(orders([false, true]), TRIAL as usize / 4);
    }

    #[test]
    fn every_reduction_is_done_once_with_loops_of_the_processor() {
        let kernels = Kernels::available().last().unwrap();
        for bytes in [100, BYTES, 1 << 20] {
            let (asking, mut done) = (Asking::new(), 0);
            for _ in 0..2 * PERIOD {
                asking.reduce(kernels, bytes, |way| {
                    assert!([kernels, kernels.not_asking()].contains(&way));
                    done += 1;
                });
            }
            assert_eq!(done, 2 * PERIOD);
        }
    }
}
