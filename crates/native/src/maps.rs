//! The peers' arenas in this process.

use std::sync::{Arc, OnceLock};

use crate::shm::{MAX_SEGMENTS, Segment};

/// Memory that peers on this host have shared, by world rank and number. Entries are only added.
#[derive(Debug)]
pub(crate) struct Maps(Vec<[OnceLock<Arc<Segment>>; MAX_SEGMENTS]>);

impl Maps {
    pub(crate) fn new(world_size: usize) -> Self {
        let none = || std::array::from_fn(|_| OnceLock::new());
        Self((0..world_size).map(|_| none()).collect())
    }

    /// Arena number `index` of a rank, if it is known here.
    pub(crate) fn get(&self, rank: usize, index: u32) -> Option<&Segment> {
        let slot = self.0.get(rank)?.get(index as usize)?;
        slot.get().map(|segment| &**segment)
    }

    /// Adds one; what cannot be named is dropped.
    pub(crate) fn add(&self, rank: usize, index: u32, segment: Arc<Segment>) {
        if let Some(slot) = self.0.get(rank).and_then(|row| row.get(index as usize)) {
            let _ = slot.set(segment);
        }
    }
}
