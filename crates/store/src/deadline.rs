//! A point in time that bounds a wait.

use std::time::{Duration, Instant};

/// When a wait ends, and since when it has been going on.
///
/// ```
/// use std::time::Duration;
/// use phalanx_store::Deadline;
///
/// let deadline = Deadline::after(Duration::ZERO);
/// assert!(deadline.passed());
/// assert_eq!(deadline.left(), Duration::ZERO);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    start: Instant,
    end: Instant,
}

/// Longest wait that is kept exactly; it stands in for any longer one.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

impl Deadline {
    /// The deadline `limit` from now. Any duration is accepted, `Duration::MAX` included.
    pub fn after(limit: Duration) -> Self {
        let start = Instant::now();
        Self {
            start,
            end: start + limit.min(LONGEST),
        }
    }

    /// Time until the deadline, zero once it has passed.
    pub fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// Time since the wait began.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Whether the deadline has passed.
    pub fn passed(&self) -> bool {
        self.left().is_zero()
    }

    /// The instant itself, for primitives that take one.
    pub fn instant(&self) -> Instant {
        self.end
    }

    /// This deadline or `limit` from now, whichever comes first.
    pub fn min(self, limit: Duration) -> Self {
        let other = Self::after(limit);
        Self {
            start: self.start,
            end: self.end.min(other.end),
        }
    }
}
