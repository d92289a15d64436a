//! Whether loops ask for peers' lines before they read them.
//!
//! It gains a thirtieth to a fifth of the time, or costs a tenth: which, is one rank's own, lasts for
//! seconds, and nothing that a program can look at tells it. So both ways are tried now and then, in
//! turn. Results do not depend on it, so ranks need not agree.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::kernels::Kernels;

/// Reductions from one trial to the next: some milliseconds of what is worth trying.
const PERIOD: u32 = 512;
/// Reductions of a trial, each way half of them.
const TRIAL: usize = 32;
/// Powers of two of bytes that are worth trying: below there is little to ask for, and above, the memory
/// is what limits.
const TRIED: Range<u32> = 13..20;
/// By how many hundredths not asking has to be faster to be preferred. Where it is, it is so by more
/// than this; where it is not, times differ by this much by chance.
const MARGIN: u64 = 8;

/// One rank's choices in a group, by the power of two of bytes.
#[derive(Debug)]
pub(crate) struct Asking([Choice; (TRIED.end - TRIED.start) as usize]);

#[derive(Debug)]
struct Choice {
    /// Reductions since the last trial began. Used by one thread at a time; atomic for the compiler's
    /// sake.
    turn: AtomicU32,
    /// What those of the trial took, in femtoseconds for each byte.
    times: Mutex<[u64; TRIAL]>,
    asks: AtomicBool,
}

impl Asking {
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| Choice::new()))
    }

    /// Does a reduction that reads `bytes` of each source, with the loops that are better now.
    #[inline]
    pub(crate) fn reduce(&self, kernels: Kernels, bytes: usize, reduce: impl FnOnce(Kernels)) {
        let class = (bytes | 1).ilog2().checked_sub(TRIED.start);
        match class.and_then(|class| self.0.get(class as usize)) {
            Some(choice) if kernels.asks() => choice.reduce(kernels, bytes, reduce),
            _ => reduce(kernels),
        }
    }
}

impl Choice {
    fn new() -> Self {
        Self {
            turn: AtomicU32::new(0),
            times: Mutex::new([0; TRIAL]),
            asks: AtomicBool::new(true),
        }
    }

    #[inline]
    fn reduce(&self, kernels: Kernels, bytes: usize, reduce: impl FnOnce(Kernels)) {
        let turn = self.turn.load(Ordering::Relaxed);
        self.turn.store((turn + 1) % PERIOD, Ordering::Relaxed);
        let turn = turn as usize;
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
    fn tell(&self, turn: usize, took: Duration, bytes: usize) {
        let mut times = self.times.lock();
        times[turn] = took.as_nanos() as u64 * 1_000_000 / bytes as u64;
        if turn + 1 < TRIAL {
            return;
        }
        let median = |asks: bool| {
            let mut of = [0; TRIAL / 2];
            let ways = (0..TRIAL).filter(|&turn| asks_in(turn) == asks);
            of.iter_mut()
                .zip(ways)
                .for_each(|(to, turn)| *to = times[turn]);
            of.sort_unstable();
            of[of.len() / 2]
        };
        let much_slower = median(true) * 100 > median(false) * (100 + MARGIN);
        self.asks.store(!much_slower, Ordering::Relaxed);
    }
}

/// Which way a reduction of the trial goes: yes, no, no, yes, and so on.
fn asks_in(turn: usize) -> bool {
    (turn ^ turn >> 1) & 1 == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 32 << 10;

    /// A trial in which asking takes `yes` nanoseconds and not asking `no`.
    fn trial(choice: &Choice, [yes, no]: [u64; 2]) {
        for turn in 0..TRIAL {
            let took = if asks_in(turn) { yes } else { no };
            // Somebody else had the processor for a while.
            let lost = if turn % 5 == 0 { 10_000 } else { 0 };
            choice.tell(turn, Duration::from_nanos(took + lost), BYTES);
        }
    }

    #[test]
    fn what_was_better_is_kept_until_it_is_not() {
        let choice = Choice::new();
        for (times, asks) in [([900, 800], false), ([810, 800], true), ([900, 800], false)] {
            trial(&choice, times);
            assert_eq!(choice.asks.load(Ordering::Relaxed), asks, "{times:?}");
        }
    }

    #[test]
    fn each_size_goes_its_own_better_way() {
        let kernels = Kernels::available().last().unwrap();
        let asking = Asking::new();
        // A processor that cannot ask has one way, and no choices.
        let choices = &asking.0[usize::from(!kernels.asks()) * asking.0.len()..];
        for (class, choice) in choices.iter().enumerate() {
            let times = if class % 2 == 0 {
                [900, 800]
            } else {
                [800, 900]
            };
            trial(choice, times);
            choice.turn.store(TRIAL as u32, Ordering::Relaxed);
            let wanted = if class % 2 == 0 {
                kernels.not_asking()
            } else {
                kernels
            };
            let bytes = 1 << (TRIED.start as usize + class);
            for bytes in [bytes, 2 * bytes - 1] {
                asking.reduce(kernels, bytes, |way| {
                    assert_eq!(way, wanted, "{bytes} bytes")
                });
            }
        }
    }

    #[test]
    fn both_ways_are_tried_alike_and_in_both_orders() {
        let ways: Vec<_> = (0..TRIAL).map(asks_in).collect();
        let orders = |order: [bool; 2]| ways.chunks(2).filter(|pair| **pair == order).count();
        assert_eq!(orders([true, false]), TRIAL / 4);
        assert_eq!(orders([false, true]), TRIAL / 4);
    }

    #[test]
    fn every_reduction_is_done_once_with_loops_of_the_processor() {
        let kernels = Kernels::available().last().unwrap();
        for bytes in [0, 100, 8 << 10, BYTES, (1 << 20) - 1, 1 << 20] {
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
