//! Ranks that are threads of one process: a message goes straight into the peer's mailbox.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use phalanx_pg::Result;

use crate::connect::{Meeting, Seat};
use crate::mailbox::{Data, Label};
use crate::member::Member;
use crate::transport::{Farewell, Ticket, Transport};

/// Where the threads of a process meet.
///
/// The first who comes for a group makes all its members, so nobody waits here: what is sent to
/// a rank before it comes is kept for it.
#[derive(Debug, Default)]
pub(crate) struct Hall {
    /// By identity, until the last member has been fetched.
    forming: Mutex<HashMap<String, Vec<Option<Arc<Member>>>>>,
}

impl Meeting for Hall {
    fn meet(&self, seat: &Seat<'_>) -> Result<Arc<Member>> {
        let mut forming = self.forming.lock();
        let members = forming
            .entry(seat.identity.clone())
            .or_insert_with(|| make_members(seat).into_iter().map(Some).collect());
        let member = members[seat.rank].take();
        if members.iter().all(Option::is_none) {
            forming.remove(&seat.identity);
        }
        member.ok_or_else(|| seat.taken())
    }
}

fn make_members(seat: &Seat<'_>) -> Vec<Arc<Member>> {
    let members: Vec<Arc<Member>> = (0..seat.size())
        .map(|rank| Member::new(seat, rank))
        .collect();
    for (rank, member) in members.iter().enumerate() {
        let all = members.iter().map(Arc::downgrade).collect();
        member.attach(Arc::new(Threads { rank, all }));
    }
    members
}

/// One thread's ways to the others.
struct Threads {
    rank: usize,
    /// Weak, so that a dropped group is gone.
    all: Vec<Weak<Member>>,
}

impl Transport for Threads {
    fn send(&self, peer: usize, label: Label, data: Data, ticket: Option<Ticket>) {
        // A peer that is gone has said so.
        if let Some(peer) = self.all[peer].upgrade() {
            peer.deliver(self.rank, label, data);
        }
        if let (Some(ticket), Some(own)) = (ticket, self.all[self.rank].upgrade()) {
            own.sent(ticket);
        }
    }

    fn close(&self, farewell: Farewell) {
        let others = self.all.iter().enumerate();
        let others = others.filter(|(rank, _)| *rank != self.rank);
        for peer in others.filter_map(|(_, peer)| peer.upgrade()) {
            match &farewell {
                Farewell::Goodbye => peer.said_goodbye(self.rank),
                Farewell::Left(notice) => peer.left(self.rank, notice),
                Farewell::Abort(notice) => peer.told(notice),
            }
        }
    }

    fn join(&self, _: Duration) {}
}
