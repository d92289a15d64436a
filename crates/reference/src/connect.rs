//! How the ranks of a group meet.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use phalanx_pg::{Error, ErrorKind, Place, Result};
use phalanx_store::Deadline;

use crate::member::Member;

/// A place where ranks come together to form groups, the first one and those split from it.
pub(crate) trait Meeting: Send + Sync + fmt::Debug {
    /// Takes a seat in a new group; may wait for the others.
    fn meet(&self, seat: &Seat<'_>) -> Result<Arc<Member>>;
}

/// One rank's place in a group that is being formed.
#[derive(Debug)]
pub(crate) struct Seat<'a> {
    pub(crate) name: String,
    /// Tells the group apart from all others that may be forming; see [`identity`].
    pub(crate) identity: String,
    pub(crate) rank: usize,
    /// The members' ranks in the world.
    pub(crate) members: Vec<usize>,
    /// For the group's operations.
    pub(crate) timeout: Duration,
    /// The group it is split from: if that breaks, there is nothing to wait for.
    pub(crate) parent: Option<&'a Member>,
}

/// The identity of the group `name` of these members, split from the group `parent`.
///
/// The members are in it, since disjoint groups may have the same name; the length, since names
/// may look like identities.
pub(crate) fn identity(parent: &str, name: &str, members: &[usize]) -> String {
    let members: Vec<String> = members.iter().map(usize::to_string).collect();
    format!("{parent}/{}:{name}[{}]", name.len(), members.join(","))
}

impl Seat<'_> {
    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    /// Where this rank's errors happen.
    pub(crate) fn place(&self) -> Place {
        self.place_of(self.rank)
    }

    /// Where errors of rank `rank` happen.
    pub(crate) fn place_of(&self, rank: usize) -> Place {
        Place::of_group(&self.name, rank)
    }

    /// The error of a second process or thread with the same rank.
    pub(crate) fn taken(&self) -> Error {
        Error::invalid(format!(
            "rank {} has joined group {:?} before; each rank joins once, and a store serves a \
             group name once",
            self.rank, self.name
        ))
    }
}

/// A wait for peers: ends at a deadline, or when it has become pointless.
pub(crate) struct Patience<'a> {
    pub(crate) deadline: Deadline,
    parent: Option<&'a Member>,
}

impl<'a> Patience<'a> {
    /// How long a rank sits still before it looks up.
    pub(crate) const GLANCE: Duration = Duration::from_millis(100);

    pub(crate) fn new(limit: Duration, parent: Option<&'a Member>) -> Self {
        Self {
            deadline: Deadline::after(limit),
            parent,
        }
    }

    /// The next stretch of waiting, or what ends it; `late` makes the error of the deadline.
    pub(crate) fn stretch(&self, late: impl FnOnce(Duration) -> String) -> Result<Duration> {
        if let Some(cause) = self.parent.and_then(Member::broken) {
            return Err(Error::broken_by(&cause));
        }
        match self.deadline.passed() {
            true => Err(Error::new(
                ErrorKind::Timeout,
                late(self.deadline.elapsed()),
            )),
            false => Ok(self.deadline.left().min(Self::GLANCE)),
        }
    }
}
