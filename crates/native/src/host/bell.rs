//! How a rank sleeps until a peer has news.
//!
//! Every rank of a group has a bell, and one word says who is asleep, a bit for each. Who publishes
//! something, stores it and then rings the bells of all sleepers. Who waits, says that it is about
//! to sleep and then looks once more. Between the two steps of each is a full fence, so one of the
//! two sees the other, and no news is slept through:
//!
//! | the publisher | the sleeper |
//! |---|---|
//! | stores the news (release) | sets its bit |
//! | fence | fence |
//! | loads the bits; rings who is asleep | loads its bell, then the news; sleeps while the bell is unchanged |
//!
//! One thread of a rank waits at a time. The words are generic so that the protocol can be run
//! under a model checker.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use rustix::thread::futex;

/// A word that processes share.
pub(crate) trait Word {
    fn load(&self) -> u32;
    fn fetch_add(&self, value: u32) -> u32;
    fn fetch_or(&self, bits: u32) -> u32;
    fn fetch_and(&self, bits: u32) -> u32;
    /// Sleeps until woken, for `limit` at most; not at all if the value is not `expected`.
    fn sleep(&self, expected: u32, limit: Duration);
    /// Wakes whoever sleeps.
    fn wake(&self);
}

impl Word for AtomicU32 {
    fn load(&self) -> u32 {
        self.load(Ordering::Acquire)
    }

    fn fetch_add(&self, value: u32) -> u32 {
        self.fetch_add(value, Ordering::AcqRel)
    }

    fn fetch_or(&self, bits: u32) -> u32 {
        self.fetch_or(bits, Ordering::AcqRel)
    }

    fn fetch_and(&self, bits: u32) -> u32 {
        self.fetch_and(bits, Ordering::AcqRel)
    }

    fn sleep(&self, expected: u32, limit: Duration) {
        let limit = futex::Timespec {
            tv_sec: limit.as_secs() as _,
            tv_nsec: limit.subsec_nanos() as _,
        };
        // However it returns, the caller looks again.
        let _ = futex::wait(self, futex::Flags::empty(), expected, Some(&limit));
    }

    fn wake(&self) {
        // Not the private kind: the sleeper is another process. Nobody there is fine.
        let _ = futex::wake(self, futex::Flags::empty(), i32::MAX as u32);
    }
}

/// Who is asleep, and the bells.
pub(crate) trait Belfry {
    type Word: Word;

    fn ranks(&self) -> usize;
    /// Bit `r % 32` of word `r / 32` is set while rank `r` is asleep.
    fn asleep(&self, word: usize) -> &Self::Word;
    fn bell(&self, rank: usize) -> &Self::Word;

    /// Orders everything before it and everything after it.
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }

    /// After news have been stored: wakes who may wait for them.
    fn ring(&self, own: usize) {
        self.fence();
        for group in 0..self.ranks().div_ceil(32) {
            let mut sleepers = self.asleep(group).load();
            while sleepers != 0 {
                let rank = group * 32 + sleepers.trailing_zeros() as usize;
                sleepers &= sleepers - 1;
                if rank != own && rank < self.ranks() {
                    self.ring_one(rank);
                }
            }
        }
    }

    /// Wakes everybody, asleep or about to be.
    fn ring_all(&self) {
        (0..self.ranks()).for_each(|rank| self.ring_one(rank));
    }

    /// Wakes one rank.
    fn ring_one(&self, rank: usize) {
        self.bell(rank).fetch_add(1);
        self.bell(rank).wake();
    }

    /// Sleeps once, unless there are news; whether there are.
    fn sleep(&self, own: usize, limit: Duration, news: impl Fn() -> bool) -> bool {
        let (word, bit) = (self.asleep(own / 32), 1 << (own % 32));
        word.fetch_or(bit);
        self.fence();
        let heard = self.bell(own).load();
        let there_are = news();
        if !there_are {
            self.bell(own).sleep(heard, limit);
        }
        word.fetch_and(!bit);
        there_are || news()
    }
}

#[cfg(test)]
mod models {
    use super::*;
    use loom::sync::atomic::{AtomicU32 as Modelled, fence};
    use loom::sync::{Arc, Condvar, Mutex};

    /// A futex as the kernel does it: comparing and falling asleep are one step.
    struct Futex {
        value: Modelled,
        lock: Mutex<()>,
        woken: Condvar,
    }

    impl Futex {
        fn new() -> Self {
            Self {
                value: Modelled::new(0),
                lock: Mutex::new(()),
                woken: Condvar::new(),
            }
        }
    }

    impl Word for Futex {
        fn load(&self) -> u32 {
            self.value.load(Ordering::Acquire)
        }

        fn fetch_add(&self, value: u32) -> u32 {
            self.value.fetch_add(value, Ordering::AcqRel)
        }

        fn fetch_or(&self, bits: u32) -> u32 {
            self.value.fetch_or(bits, Ordering::AcqRel)
        }

        fn fetch_and(&self, bits: u32) -> u32 {
            self.value.fetch_and(bits, Ordering::AcqRel)
        }

        fn sleep(&self, expected: u32, _: Duration) {
            // Without a time limit: a lost wake-up is a deadlock, which the checker finds.
            let mut lock = self.lock.lock().unwrap();
            if self.value.load(Ordering::Acquire) == expected {
                lock = self.woken.wait(lock).unwrap();
            }
            drop(lock);
        }

        fn wake(&self) {
            let _lock = self.lock.lock().unwrap();
            self.woken.notify_all();
        }
    }

    struct Pair {
        asleep: Futex,
        bells: [Futex; 2],
        news: [Modelled; 2],
        done: [Modelled; 2],
        abort: Modelled,
    }

    fn pair() -> Arc<Pair> {
        Arc::new(Pair {
            asleep: Futex::new(),
            bells: [Futex::new(), Futex::new()],
            news: [Modelled::new(0), Modelled::new(0)],
            done: [Modelled::new(0), Modelled::new(0)],
            abort: Modelled::new(0),
        })
    }

    impl Belfry for Pair {
        type Word = Futex;

        fn ranks(&self) -> usize {
            2
        }

        fn asleep(&self, _: usize) -> &Futex {
            &self.asleep
        }

        fn bell(&self, rank: usize) -> &Futex {
            &self.bells[rank]
        }

        fn fence(&self) {
            fence(Ordering::SeqCst);
        }
    }

    impl Pair {
        fn publish(&self, own: usize, value: u32) {
            self.news[own].store(value, Ordering::Release);
            self.ring(own);
        }

        fn wait(&self, own: usize, news: impl Fn() -> bool) {
            while !self.sleep(own, Duration::MAX, &news) {}
        }
    }

    #[test]
    fn no_news_are_slept_through() {
        loom::model(|| {
            let pair = pair();
            let other = Arc::clone(&pair);
            let thread = loom::thread::spawn(move || {
                other.publish(1, 1);
                other.wait(1, || other.news[0].load(Ordering::Acquire) == 1);
            });
            pair.publish(0, 1);
            pair.wait(0, || pair.news[1].load(Ordering::Acquire) == 1);
            thread.join().unwrap();
        });
    }

    /// Ranks with one slot each say without ringing that they are done with an operation
    /// (`Local::quick`): who sleeps until a slot is free hears of it with the next announcement.
    #[test]
    fn being_done_is_heard_with_the_next_announcement() {
        let run = |pair: &Pair, own: usize| {
            let peer = 1 - own;
            for op in 1..=2 {
                pair.wait(own, || pair.done[peer].load(Ordering::Acquire) >= op - 1);
                pair.publish(own, op);
                pair.wait(own, || pair.news[peer].load(Ordering::Acquire) >= op);
                pair.done[own].store(op, Ordering::Release);
            }
        };
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(move || {
            let pair = pair();
            let other = Arc::clone(&pair);
            let thread = loom::thread::spawn(move || run(&other, 1));
            run(&pair, 0);
            thread.join().unwrap();
        });
    }

    #[test]
    fn an_abort_wakes_whoever_waits_in_vain() {
        loom::model(|| {
            let pair = pair();
            let other = Arc::clone(&pair);
            let thread = loom::thread::spawn(move || {
                other.abort.store(1, Ordering::Release);
                other.ring_all();
            });
            let over = || {
                pair.news[1].load(Ordering::Acquire) == 1 || pair.abort.load(Ordering::Acquire) == 1
            };
            pair.wait(0, over);
            thread.join().unwrap();
        });
    }
}
