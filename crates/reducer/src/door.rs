//! Whether a pass still takes gradients.

use std::sync::atomic::{AtomicU32, Ordering};

const CLOSED: u32 = 1 << 31;

/// Lets threads in with gradients until it is closed, and knows whether any are inside.
///
/// One word holds both, so that who enters and who closes see each other.
#[derive(Debug, Default)]
pub(crate) struct Door(AtomicU32);

/// A thread that is inside, until this is dropped.
#[derive(Debug)]
pub(crate) struct Inside<'a>(&'a Door);

impl Door {
    /// Enters, unless it is closed.
    pub(crate) fn enter(&self) -> Option<Inside<'_>> {
        let inside = Inside(self);
        let before = self.0.fetch_add(1, Ordering::AcqRel);
        (before & CLOSED == 0).then_some(inside)
    }

    /// Lets nobody in any more; whether nobody is inside.
    pub(crate) fn close(&self) -> bool {
        self.0.fetch_or(CLOSED, Ordering::AcqRel) & !CLOSED == 0
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_tells_who_is_inside_and_keeps_others_out() {
        let door = Door::default();
        let inside = door.enter();
        assert!(inside.is_some());
        assert!(!door.close() && door.enter().is_none());
        drop(inside);
        assert!(door.close() && door.enter().is_none());
    }
}
