//! How far two processors are from each other.
//!
//! Where a virtual machine's processors run is up to its host, and changes: on one core, beside each
//! other, or with no cache in common. Times of all contestants differ several times between these, so
//! a table should say which it is of.

use std::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Release};
use std::time::Instant;

use crate::bench::cpu;

/// Round trips in one measurement, and before it.
const TRIPS: u32 = 5000;

/// A word that has the lines that processors hand to each other to itself.
#[repr(align(128))]
struct Alone(AtomicU32);

/// Nanoseconds that a word takes from one processor to the other and back. `None` if threads
/// cannot be pinned.
pub(crate) fn round_trip_ns(processors: [usize; 2]) -> Option<f64> {
    let there = Alone(AtomicU32::new(0));
    let back = Alone(AtomicU32::new(0));
    let gone = Alone(AtomicU32::new(0));
    std::thread::scope(|scope| {
        let echo = scope.spawn(|| {
            if cpu::pin(processors[1]).is_err() {
                gone.0.store(1, Release);
                return;
            }
            (1..=2 * TRIPS).for_each(|trip| {
                await_word(&there.0, || gone.0.load(Acquire) > 0, trip);
                back.0.store(trip, Release);
            });
        });
        let caller = scope.spawn(|| {
            if cpu::pin(processors[0]).is_err() {
                gone.0.store(1, Release);
                return None;
            }
            let mut start = Instant::now();
            for trip in 1..=2 * TRIPS {
                if trip == TRIPS + 1 {
                    start = Instant::now();
                }
                there.0.store(trip, Release);
                await_word(&back.0, || gone.0.load(Acquire) > 0, trip);
            }
            let nanos = start.elapsed().as_nanos() as f64;
            (gone.0.load(Acquire) == 0).then_some(nanos / f64::from(TRIPS))
        });
        echo.join().ok()?;
        caller.join().ok()?
    })
}

/// Waits for a number, or until the other has gone.
fn await_word(word: &AtomicU32, gone: impl Fn() -> bool, number: u32) {
    let mut looks = 0u32;
    while word.load(Acquire) < number {
        looks += 1;
        if looks.is_multiple_of(1 << 14) {
            // The other may not run.
            std::thread::yield_now();
            if gone() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_comes_back_also_on_one_processor() {
        let own = rustix::thread::sched_getcpu();
        let nanos = round_trip_ns([own, own]).expect("a process may stay where it is");
        assert!(nanos > 0.0);
    }

    #[test]
    fn a_processor_that_is_not_there_is_not_waited_for() {
        let own = rustix::thread::sched_getcpu();
        let missing = rustix::thread::CpuSet::MAX_CPU - 1;
        assert_eq!(round_trip_ns([own, missing]), None);
        assert_eq!(round_trip_ns([missing, own]), None);
    }
}
