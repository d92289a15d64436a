//! How the ranks of a group meet.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use phalanx_pg::{Error, Place, Result};

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
    /// Tells the group apart from all others that may be forming; see
    /// [`group_identity`](phalanx_pg::group_identity).
    pub(crate) identity: String,
    pub(crate) rank: usize,
    /// The members' ranks in the world.
    pub(crate) members: Vec<usize>,
    /// For the group's operations.
    pub(crate) timeout: Duration,
    /// The group it is split from, and the members' ranks there: if that breaks, or if one of them
    /// has left it, there is nothing to wait for.
    pub(crate) parent: Option<(&'a Member, &'a [usize])>,
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
