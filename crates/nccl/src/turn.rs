//! Locks that a thread may hold inside the library.

use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use phalanx_pg::Result;

use crate::comm::Patience;

/// Between two looks at whether to go on waiting.
const LOOK: Duration = Duration::from_millis(20);

/// Waits for a lock for as long as `patience` lasts.
pub(crate) fn take_turn<'a, T>(
    lock: &'a Mutex<T>,
    patience: Patience<'_>,
) -> Result<MutexGuard<'a, T>> {
    loop {
        if let Some(turn) = lock.try_lock_for(LOOK) {
            return Ok(turn);
        }
        patience()?;
    }
}
