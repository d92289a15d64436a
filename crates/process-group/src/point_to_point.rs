//! What the sends and receives of all backends have in common.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::call::{Call, CallKind};
use crate::error::{Place, Result};
use crate::tally::{Part, Tally};
use crate::work::{RawWork, completion};

/// One rank's sends and receives in one group; for backends.
///
/// Numbers them, and so lets their errors say which one failed. The numbers are this rank's own,
/// apart from those of the collectives: a send and the receive that takes it have different ones.
/// A batch takes one.
///
/// `Send` and `Sync`: any thread may issue an operation, and gets a number of its own.
#[derive(Debug)]
pub struct PointToPoint {
    place: Place,
    next: AtomicU64,
}

impl PointToPoint {
    /// For the group and rank in `place`.
    pub fn new(place: Place) -> Self {
        Self {
            place,
            next: AtomicU64::new(0),
        }
    }

    /// Number of operations issued so far: the number of the next one.
    pub fn sequence(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// Where an operation that is refused happens: at the number that it does not take.
    pub fn refused(&self, call: &Call) -> Place {
        self.place(call.kind(), call.root_or_peer(), self.sequence())
    }

    /// Takes a number: where the operation happens.
    pub fn number(&self, call: &Call) -> Place {
        self.place(call.kind(), call.root_or_peer(), self.take())
    }

    /// Takes a number, if `admit` has nothing against the calls of the operation: these calls, each
    /// with the part of the work that it ends.
    pub fn issue(
        &self,
        call: Call,
        admit: impl FnOnce(&[Call]) -> Result<()>,
    ) -> Result<(Vec<(Call, Part)>, RawWork)> {
        let (kind, peer) = (call.kind(), call.root_or_peer());
        let (calls, batch) = match call {
            Call::Batch(calls) => (calls, true),
            single => (vec![single], false),
        };
        admit(&calls).map_err(|err| err.at(self.place(kind, peer, self.sequence())))?;
        let place = Place {
            seq: Some(self.take()),
            ..self.place.clone()
        };
        let (completer, work) = completion();
        Ok((Tally::of(calls, batch, place, completer), work))
    }

    fn take(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn place(&self, kind: CallKind, peer: Option<usize>, seq: u64) -> Place {
        Place {
            call: Some(kind),
            peer,
            seq: Some(seq),
            ..self.place.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Buffer, DType, Error, ErrorKind};
    use std::time::Duration;

    fn recv(peer: Option<usize>) -> Call {
        Call::Recv {
            buf: Buffer::zeroed(DType::U8, 1),
            peer,
            tag: 7,
        }
    }

    #[test]
    fn an_error_says_which_operation_failed_and_what_is_refused_takes_no_number() {
        let messages = PointToPoint::new(Place::of_group("world", 0));
        let full = |_: &[Call]| Err(Error::new(ErrorKind::QueueFull, "too many"));
        let refused = messages.issue(recv(Some(2)), full).unwrap_err();
        assert_eq!((refused.place().seq, refused.peer()), (Some(0), Some(2)));
        assert_eq!(refused.place().call, Some(CallKind::Recv));
        assert_eq!(messages.sequence(), 0);

        let (_, first) = messages.issue(recv(Some(2)), |_| Ok(())).unwrap();
        drop(first);
        let batch = Call::Batch(vec![recv(Some(1)), recv(None)]);
        let (mut calls, mut work) = messages.issue(batch, |_| Ok(())).unwrap();
        assert_eq!(messages.sequence(), 2, "a batch takes one");
        let (_, part) = calls.remove(0);
        part.end(Err(Error::new(ErrorKind::Timeout, "nothing came")));
        let err = work.block(Duration::ZERO).expect("it ended").unwrap_err();
        let place = err.place();
        assert_eq!((place.seq, place.peer), (Some(1), Some(1)));
        assert!(place.elapsed.is_some() && place.rank == Some(0), "{err}");
        let text = err.to_string();
        assert!(
            text.starts_with("rank 0 of group \"world\": recv #1 after 0.0"),
            "{text}"
        );
    }
}
