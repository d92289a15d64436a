//! Which parts of an arena are free.

use std::collections::BTreeMap;

/// Free ranges by where they start; neighbours are always joined.
#[derive(Debug)]
pub(crate) struct FreeList(BTreeMap<usize, usize>);

impl FreeList {
    /// `len` free bytes.
    pub(crate) fn new(len: usize) -> Self {
        Self(BTreeMap::from([(0, len)]))
    }

    /// The lowest free range of `len` bytes, a multiple of what ranges are to be aligned to.
    pub(crate) fn take(&mut self, len: usize) -> Option<usize> {
        let (&at, &room) = self.0.iter().find(|(_, room)| **room >= len)?;
        self.0.remove(&at);
        if room > len {
            self.0.insert(at + len, room - len);
        }
        Some(at)
    }

    /// Gives back a range that was taken.
    pub(crate) fn give(&mut self, at: usize, len: usize) {
        let mut free = (at, len);
        if let Some((&before, &room)) = self.0.range(..at).next_back()
            && before + room == at
        {
            free = (before, room + len);
        }
        if let Some(room) = self.0.remove(&(at + len)) {
            free.1 += room;
        }
        self.0.insert(free.0, free.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Ranges in use never overlap, and all room comes back.
        #[test]
        fn ranges_are_disjoint(steps in proptest::collection::vec((1usize..40, any::<u8>()), 1..200)) {
            let mut list = FreeList::new(1000);
            let mut used: Vec<(usize, usize)> = Vec::new();
            for (len, pick) in steps {
                if pick % 3 == 0 && !used.is_empty() {
                    let (at, len) = used.swap_remove(usize::from(pick) % used.len());
                    list.give(at, len);
                } else if let Some(at) = list.take(len) {
                    prop_assert!(at + len <= 1000);
                    prop_assert!(used.iter().all(|&(a, l)| a + l <= at || at + len <= a));
                    used.push((at, len));
                }
            }
            used.into_iter().for_each(|(at, len)| list.give(at, len));
            prop_assert_eq!(list.0, BTreeMap::from([(0, 1000)]));
        }
    }
}
