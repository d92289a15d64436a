//! The ready order.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::params::Slot;

/// Numbers slots in the order in which their gradients are complete, without a lock.
pub(crate) struct Arrivals {
    next: AtomicU32,
    /// By slot, from one; zero is not yet.
    at: Vec<AtomicU32>,
}

impl Arrivals {
    pub(crate) fn new(slots: usize) -> Self {
        Self {
            next: AtomicU32::new(0),
            at: (0..slots).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// Whether it is the first of all.
    pub(crate) fn note(&self, slot: Slot) -> bool {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.at[slot].store(number + 1, Ordering::Release);
        number == 0
    }

    pub(crate) fn has(&self, slot: Slot) -> bool {
        self.at[slot].load(Ordering::Acquire) != 0
    }

    /// Whether any slot has a number.
    pub(crate) fn any(&self) -> bool {
        self.next.load(Ordering::Acquire) != 0
    }

    /// Slots in the order of their numbers.
    pub(crate) fn order(&self) -> Vec<Slot> {
        let mut arrived: Vec<Slot> = (0..self.at.len()).filter(|&slot| self.has(slot)).collect();
        arrived.sort_by_key(|&slot| self.at[slot].load(Ordering::Acquire));
        arrived
    }

    /// Slots without a number.
    pub(crate) fn missing(&self) -> Vec<Slot> {
        (0..self.at.len()).filter(|&slot| !self.has(slot)).collect()
    }
}
