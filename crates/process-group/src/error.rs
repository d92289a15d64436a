//! What can go wrong in a process group, and where.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use phalanx_store::StoreError;

use crate::call::CallKind;

/// Result of a process group operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed, and where: own rank, peer, operation, sequence number, elapsed time.
///
/// Cheap to clone, since one cause may fail many operations. `Send` and `Sync`.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

struct Inner {
    kind: ErrorKind,
    place: Place,
    message: String,
    cause: Option<Error>,
}

/// What a caller can tell errors apart by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The arguments make no sense; nothing was sent and the group is as before.
    Invalid,
    /// The backend cannot do this; nothing was sent and the group is as before.
    Unsupported,
    /// Too many operations are outstanding; nothing was sent. Wait for some and try again.
    QueueFull,
    /// Ranks called different things. [`Checked`](crate::Checked) finds it before anything is
    /// sent, a backend at the latest when it sees what came. The ranks are in step afterwards and
    /// the group is usable; the memory of the call is gone.
    Mismatch,
    /// The operation did not finish in time. The group is broken.
    Timeout,
    /// A peer died or cut the connection. The group is broken.
    PeerLost,
    /// Somebody called `abort`. The group is broken.
    Aborted,
    /// The group was broken earlier; the cause says how.
    Broken,
    /// The group has been shut down.
    Closed,
    /// The store failed during rendezvous.
    Store,
    /// The backend's library or the operating system failed.
    Backend,
}

/// Where an error happened. What is not known is left out.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Place {
    /// Name of the group.
    pub group: Option<Arc<str>>,
    /// Own rank in the group.
    pub rank: Option<usize>,
    /// The rank at fault or at the other end.
    pub peer: Option<usize>,
    /// The operation.
    pub call: Option<CallKind>,
    /// What the caller asked for, where that is more than one call: for example `shutdown`.
    pub action: Option<&'static str>,
    /// Its sequence number in the group: among the collectives, or for a point-to-point call among
    /// those of this rank.
    pub seq: Option<u64>,
    /// Time since it was issued.
    pub elapsed: Option<Duration>,
}

impl Place {
    /// Rank `rank` of the group `group`: what a backend knows of all its errors.
    pub fn of_group(group: &str, rank: usize) -> Self {
        Self {
            group: Some(group.into()),
            rank: Some(rank),
            ..Self::default()
        }
    }
}

impl Error {
    /// An error whose place is not known yet; see [`at`](Error::at).
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self::build(kind, Place::default(), message.into(), None)
    }

    /// [`ErrorKind::Invalid`].
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// [`ErrorKind::Unsupported`].
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    /// What these ranks did or did not do, blaming the first of them; for backends.
    ///
    /// ```
    /// use phalanx_pg::{Error, ErrorKind};
    ///
    /// let err = Error::of_ranks(ErrorKind::Timeout, &[1, 3], "did not come");
    /// assert_eq!(err.message(), "ranks 1, 3 did not come");
    /// assert_eq!(err.peer(), Some(1));
    /// ```
    pub fn of_ranks(kind: ErrorKind, ranks: &[usize], did: &str) -> Self {
        let err = Self::new(kind, format!("{} {did}", name_ranks(ranks)));
        match ranks.first() {
            Some(&first) => err.from_peer(first),
            None => err,
        }
    }

    /// What an operation on a group that `cause` has broken answers.
    pub fn broken_by(cause: &Error) -> Self {
        let message = "the group is broken, make a new one".into();
        let first = cause.cause().unwrap_or(cause).clone();
        Self::build(ErrorKind::Broken, Place::default(), message, Some(first))
    }

    /// How an operation fails that was under way when `cause` broke the group; for backends.
    ///
    /// A lost peer and an abort are every operation's own error, and so is what peers report. The
    /// failure of another operation of this rank is quoted instead.
    pub fn because(cause: &Error) -> Self {
        use ErrorKind::{Aborted, PeerLost};
        let everybodys = matches!(cause.kind(), PeerLost | Aborted);
        if cause.place().call.is_some() && !everybodys {
            return Self::broken_by(cause);
        }
        let place = Place {
            group: cause.place().group.clone(),
            rank: cause.place().rank,
            peer: cause.peer(),
            ..Place::default()
        };
        Self::build(
            cause.kind(),
            place,
            cause.0.message.clone(),
            cause.0.cause.clone(),
        )
    }

    fn build(kind: ErrorKind, place: Place, message: String, cause: Option<Error>) -> Self {
        Self(Arc::new(Inner {
            kind,
            place,
            message,
            cause,
        }))
    }

    /// The same error with what `place` knows filled in where nothing was known.
    ///
    /// But not who is at the other end of a call on a broken group: whoever broke it is at fault, and
    /// in the cause.
    pub fn at(self, place: Place) -> Self {
        let own = self.0.place.clone();
        let other_end = place.peer.filter(|_| self.0.kind != ErrorKind::Broken);
        let place = Place {
            group: own.group.or(place.group),
            rank: own.rank.or(place.rank),
            peer: own.peer.or(other_end),
            call: own.call.or(place.call),
            action: own.action.or(place.action),
            seq: own.seq.or(place.seq),
            elapsed: own.elapsed.or(place.elapsed),
        };
        Self::build(
            self.0.kind,
            place,
            self.0.message.clone(),
            self.0.cause.clone(),
        )
    }

    /// The same error, blaming `peer`.
    pub fn from_peer(self, peer: usize) -> Self {
        let own = self.0.place.clone();
        let place = Place {
            peer: own.peer.or(Some(peer)),
            ..own
        };
        let (message, cause) = (self.0.message.clone(), self.0.cause.clone());
        Self::build(self.0.kind, place, message, cause)
    }

    /// The same error as that of an action of several calls, for example `shutdown`.
    pub fn during(self, action: &'static str) -> Self {
        self.at(Place {
            action: Some(action),
            ..Place::default()
        })
    }

    /// The same error under the name that the caller knows, whatever it was the error of before.
    pub(crate) fn called(self, action: &'static str) -> Self {
        let place = Place {
            action: Some(action),
            ..self.0.place.clone()
        };
        let Inner {
            kind,
            message,
            cause,
            ..
        } = &*self.0;
        Self::build(*kind, place, message.clone(), cause.clone())
    }

    /// What kind of failure it is.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Where it happened.
    pub fn place(&self) -> &Place {
        &self.0.place
    }

    /// The rank at fault, here or in the cause.
    pub fn peer(&self) -> Option<usize> {
        self.0
            .place
            .peer
            .or_else(|| self.0.cause.as_ref().and_then(Error::peer))
    }

    /// What broke the group, for [`ErrorKind::Broken`].
    pub fn cause(&self) -> Option<&Error> {
        self.0.cause.as_ref()
    }

    /// The reason alone, without the place.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Whether the group can go on after this error.
    pub fn leaves_group_usable(&self) -> bool {
        use ErrorKind::*;
        matches!(self.0.kind, Invalid | Unsupported | QueueFull | Mismatch)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = &self.0.place;
        if let Some(rank) = place.rank {
            write!(f, "rank {rank}")?;
            if let Some(group) = &place.group {
                write!(f, " of group {group:?}")?;
            }
            f.write_str(": ")?;
        }
        let call = place.call.map(|call| call.to_string());
        if let Some(what) = place.action.or(call.as_deref()) {
            f.write_str(what)?;
            // The number of a message is none of the group's collectives.
            if let (Some(_), Some(call)) = (place.action, place.call)
                && call.is_point_to_point()
            {
                write!(f, ": {call}")?;
            }
            if let Some(seq) = place.seq {
                write!(f, " #{seq}")?;
            }
            if let Some(elapsed) = place.elapsed {
                write!(f, " after {:.3} s", elapsed.as_secs_f64())?;
            }
            f.write_str(": ")?;
        }
        let mut text = self.0.message.clone();
        if let Some(cause) = &self.0.cause {
            text.push_str("; first cause: ");
            text.push_str(&cause.to_string());
        }
        f.write_str(&text)?;
        match place.peer {
            Some(peer) if !names_rank(&text, peer) => write!(f, " (peer: rank {peer})"),
            _ => Ok(()),
        }
    }
}

/// Whether the text says which rank is at fault, so that it need not be said again.
fn names_rank(text: &str, rank: usize) -> bool {
    let name = format!("rank {rank}");
    let mut found = text.match_indices(&name);
    found.any(|(at, _)| !text[at + name.len()..].starts_with(|c: char| c.is_ascii_digit()))
}

/// The names of some ranks, not too many of them.
pub(crate) fn name_ranks(ranks: &[usize]) -> String {
    const SHOWN: usize = 8;
    let names: Vec<String> = ranks.iter().take(SHOWN).map(usize::to_string).collect();
    match ranks.len() {
        0 => "some ranks".into(),
        1 => format!("rank {}", names[0]),
        len if len <= SHOWN => format!("ranks {}", names.join(", ")),
        len => format!("ranks {} and {} more", names.join(", "), len - SHOWN),
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.cause.as_ref().map(|cause| cause as _)
    }
}

impl From<StoreError> for Error {
    fn from(err: StoreError) -> Self {
        let kind = match &err {
            StoreError::Invalid(_) => ErrorKind::Invalid,
            _ => ErrorKind::Store,
        };
        Self::new(kind, err.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_at_fault_is_named_once() {
        let unnamed = Error::new(ErrorKind::Backend, "the cable is loose").from_peer(1);
        assert_eq!(unnamed.to_string(), "the cable is loose (peer: rank 1)");
        let lost = Error::new(ErrorKind::PeerLost, "rank 1 is gone").from_peer(1);
        let broken = Error::broken_by(&lost).from_peer(1);
        let text = broken.to_string();
        assert_eq!(text.matches("rank 1").count(), 1, "{text}");
        let other = Error::new(ErrorKind::PeerLost, "rank 12 is gone").from_peer(1);
        assert!(other.to_string().ends_with("(peer: rank 1)"), "{other}");
    }

    #[test]
    fn the_other_end_of_a_call_is_not_at_fault_for_what_broke_the_group() {
        let recv = Place {
            call: Some(CallKind::Recv),
            peer: Some(1),
            ..Place::of_group("world", 0)
        };
        let lost = Error::new(ErrorKind::PeerLost, "rank 2 is lost").from_peer(2);
        let broken = Error::broken_by(&lost).at(recv.clone());
        assert_eq!(broken.peer(), Some(2), "{broken}");
        assert!(!broken.to_string().contains("rank 1"), "{broken}");
        let aborted = Error::new(ErrorKind::Aborted, "enough");
        assert_eq!(Error::broken_by(&aborted).at(recv.clone()).peer(), None);
        let late = Error::new(ErrorKind::Timeout, "nothing came").at(recv);
        assert_eq!(late.peer(), Some(1), "{late}");
    }

    #[test]
    fn a_failure_of_another_operation_is_quoted_and_a_lost_peer_is_not() {
        let recv = Place {
            call: Some(CallKind::Recv),
            ..Place::of_group("world", 0)
        };
        let place = Place {
            call: Some(CallKind::AllReduce),
            seq: Some(3),
            ..Place::default()
        };
        let late = Error::new(ErrorKind::Timeout, "rank 1 sent nothing").at(recv.clone());
        let quoted = Error::because(&late).at(place.clone());
        assert_eq!(quoted.kind(), ErrorKind::Broken);
        assert_eq!(quoted.place().call, Some(CallKind::AllReduce));
        assert!(
            quoted.to_string().contains("recv: rank 1 sent nothing"),
            "{quoted}"
        );
        let again = Error::broken_by(&quoted);
        assert_eq!(again.cause().unwrap().kind(), ErrorKind::Timeout, "{again}");
        let lost = Error::new(ErrorKind::PeerLost, "rank 1 is gone").from_peer(1);
        let own = Error::because(&lost.at(recv)).at(place);
        assert_eq!((own.kind(), own.peer()), (ErrorKind::PeerLost, Some(1)));
        let text = "rank 0 of group \"world\": allreduce #3: rank 1 is gone";
        assert_eq!(own.to_string(), text);
    }

    #[test]
    fn an_action_goes_before_the_call_that_failed_in_it() {
        let place = Place {
            call: Some(CallKind::Barrier),
            seq: Some(7),
            ..Place::of_group("world", 0)
        };
        let err = Error::new(ErrorKind::Timeout, "rank 1 did not come").at(place);
        let text = err.during("shutdown").to_string();
        let expected = "rank 0 of group \"world\": shutdown #7: rank 1 did not come";
        assert_eq!(text, expected);
        let place = Place {
            call: Some(CallKind::Recv),
            seq: Some(2),
            ..Place::of_group("world", 0)
        };
        let err = Error::new(ErrorKind::Timeout, "rank 1 sent nothing").at(place);
        let text = err.during("monitored_barrier").to_string();
        let expected = "rank 0 of group \"world\": monitored_barrier: recv #2: rank 1 sent nothing";
        assert_eq!(text, expected);
    }
}
