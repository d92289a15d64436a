//! What carries messages between ranks.

use std::time::Duration;

use crate::mailbox::{Data, Label};
use phalanx_pg::Notice;

/// The number of a send, by which its [`Member`](crate::member::Member) knows it.
pub(crate) type Ticket = u64;

/// One rank's ways to the others. What arrives goes to the [`Member`](crate::member::Member).
///
/// No method but [`join`](Transport::join) blocks, and none is called with a lock held.
pub(crate) trait Transport: Send + Sync {
    /// Sends to `peer`; the member hears of it through `sent` if there is a ticket. Messages to
    /// one peer arrive in the order of their sending. After [`close`](Transport::close) it does
    /// nothing.
    fn send(&self, peer: usize, label: Label, data: Data, ticket: Option<Ticket>);

    /// The last thing this rank says to all others.
    fn close(&self, farewell: Farewell);

    /// Waits until the farewell has gone out, for `limit` at most.
    fn join(&self, limit: Duration);
}

/// How a rank leaves its group.
#[derive(Debug, Clone)]
pub(crate) enum Farewell {
    /// In order.
    Goodbye,
    /// It has dropped the group, or found that another rank has left it. Goes out behind all that
    /// was sent before, which the others may still use.
    Left(Notice),
    /// The group is broken, for this reason; what has not gone out yet is forgotten.
    Abort(Notice),
}
