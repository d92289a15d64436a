//! The reference backend: the simplest correct process group, to compare others with and to
//! learn from.
//!
//! [`ReferenceGroup::threads`] makes the ranks threads of one process,
//! [`ReferenceGroup::connect`] lets processes meet in a store and talk over plain TCP. Both do
//! every call on every element type, in host memory. Nothing here is fast on purpose.
//!
//! # How to read it
//!
//! | file | what it is |
//! |---|---|
//! | `group.rs` | the [`ProcessGroup`](phalanx_pg::ProcessGroup): collectives to the lane, the rest past it |
//! | `collective.rs` | every collective as one exchange of messages; no sockets, no threads |
//! | `mailbox.rs` | which message answers which receive; no locks, no clock |
//! | `member/` | one rank's state between callers, transport and clock; how a group ends |
//! | `transport.rs` | what carries messages: `threads.rs`, `tcp.rs` |
//! | `connect.rs` | how ranks meet: `threads.rs`, `sockets.rs` |
//! | `wire.rs` | what travels on a connection, byte by byte |
//!
//! # How a group ends
//!
//! | what happens | what every other rank's operations fail with |
//! |---|---|
//! | [`abort`](phalanx_pg::ProcessGroup::abort) | `Aborted`, with the reason, at once |
//! | a group is dropped without a shutdown | `Aborted`, naming the rank, when it is needed |
//! | a process dies | `PeerLost`, naming the rank, when it is needed |
//! | an operation runs out of time | `Timeout`, naming the ranks that did not come |
//! | [`shutdown`](phalanx_pg::ProcessGroup::shutdown) everywhere | nothing |
//!
//! The first cause reaches everybody: whoever meets it tells all others and closes its
//! connections. Operations that another operation's failure ends say so and quote it.
//!
//! A rank that drops its group says so behind all that it has sent, and a process that dies says
//! nothing behind it. An operation that has everything it needs from that rank succeeds, whenever
//! it comes to it; one that needs more fails, and with it the group. So a rank may go as soon as its
//! own last operation is through.
//!
//! Ranks that call different things are told so, all of them and with both sides: every message of
//! a collective begins with the [`Fingerprint`](phalanx_pg::Fingerprint) of its call. That, and a
//! message of unexpected length, fails the operation only.
//!
//! # Not done
//!
//! Detection of a host that vanishes without closing its connections (operations end at their
//! timeout), encryption, device memory.
#![forbid(unsafe_code)]

mod collective;
mod connect;
mod group;
mod mailbox;
mod member;
mod options;
mod pending;
mod sockets;
mod tcp;
mod threads;
mod transport;
mod wire;

pub use group::ReferenceGroup;
pub use options::Options;
