//! The results of the calls of one point-to-point operation.

use std::sync::Arc;

use crate::error::Result;
use crate::work::{Completer, Done};
use parking_lot::Mutex;

/// Gathers the results of a batch of sends and receives, for backends: the first failure, or the last
/// success, ends the operation.
///
/// `Send` and `Sync`: parts may end on different threads.
#[derive(Debug)]
pub struct Tally {
    open: Mutex<Option<Open>>,
}

#[derive(Debug)]
struct Open {
    completer: Completer,
    parts: Vec<Option<Done>>,
    left: usize,
    /// Its result has parts.
    batch: bool,
}

/// One call of the operation; ending it is all one can do with it.
#[derive(Debug)]
pub struct Part {
    tally: Arc<Tally>,
    index: usize,
}

impl Tally {
    /// For a batch of `calls`, or for a single call: its parts.
    pub fn parts(completer: Completer, calls: usize, batch: bool) -> Vec<Part> {
        completer.start();
        let open = Open {
            completer,
            parts: (0..calls).map(|_| None).collect(),
            left: calls,
            batch,
        };
        let tally = Arc::new(Self {
            open: Mutex::new(Some(open)),
        });
        let part = |index| Part {
            tally: Arc::clone(&tally),
            index,
        };
        (0..calls).map(part).collect()
    }
}

impl Part {
    /// The call has ended.
    pub fn end(self, result: Result<Done>) {
        let mut slot = self.tally.open.lock();
        let Some(open) = slot.as_mut() else { return };
        let result = match result {
            Err(err) => Err(err),
            Ok(done) => {
                open.parts[self.index] = Some(done);
                open.left -= 1;
                if open.left > 0 {
                    return;
                }
                let mut parts = std::mem::take(&mut open.parts).into_iter().flatten();
                Ok(match open.batch {
                    true => Done {
                        parts: parts.collect(),
                        ..Done::default()
                    },
                    false => parts.next().unwrap_or_default(),
                })
            }
        };
        let open = slot.take();
        // Wakes somebody, who must not find the lock taken.
        drop(slot);
        if let Some(open) = open {
            open.completer.complete(result);
        }
    }
}
