//! The results of the calls of one point-to-point operation.

use std::sync::Arc;
use std::time::Instant;

use crate::call::{Call, CallKind};
use crate::error::{Place, Result};
use crate::work::{Completer, Done};
use parking_lot::Mutex;

/// Gathers the results of a batch of sends and receives: the first failure, or the last success,
/// ends the operation.
#[derive(Debug)]
pub(crate) struct Tally {
    /// Group, rank and number of the operation.
    place: Place,
    since: Instant,
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

/// One send or receive of an operation that [`PointToPoint`](crate::PointToPoint) has issued; for
/// backends.
///
/// `Send` and `Sync`: parts of one operation may end on different threads.
#[derive(Debug)]
pub struct Part {
    tally: Arc<Tally>,
    index: usize,
    kind: CallKind,
    peer: Option<usize>,
}

impl Tally {
    /// The calls of an operation, each with its part. A batch has a result of parts.
    pub(crate) fn of(
        calls: Vec<Call>,
        batch: bool,
        place: Place,
        completer: Completer,
    ) -> Vec<(Call, Part)> {
        completer.start();
        let since = completer.enqueued();
        let open = Open {
            completer,
            parts: calls.iter().map(|_| None).collect(),
            left: calls.len(),
            batch,
        };
        let tally = Arc::new(Self {
            place,
            since,
            open: Mutex::new(Some(open)),
        });
        let part = |(index, call): (usize, Call)| {
            let part = Part {
                tally: Arc::clone(&tally),
                index,
                kind: call.kind(),
                peer: call.root_or_peer(),
            };
            (call, part)
        };
        calls.into_iter().enumerate().map(part).collect()
    }
}

impl Part {
    /// Where it happens: its own rank, peer, operation and number, and how long it takes by now.
    pub fn place(&self) -> Place {
        Place {
            call: Some(self.kind),
            peer: self.peer,
            elapsed: Some(self.tally.since.elapsed()),
            ..self.tally.place.clone()
        }
    }

    /// The call has ended. An error that does not say where it happened gets to.
    pub fn end(self, result: Result<Done>) {
        let result = result.map_err(|err| err.at(self.place()));
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
