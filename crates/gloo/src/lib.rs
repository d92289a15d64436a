//! The Gloo backend: the system's libgloo behind the process group trait.
//!
//! Ranks meet through any store, gloo carries the bytes over TCP. Every call, element type and
//! operator in host memory; reductions run in Rust. `docs/backends.md` says how to install it and
//! what it does when something goes wrong.
//!
//! | file | what it is |
//! |---|---|
//! | `group.rs` | the [`ProcessGroup`](phalanx_pg::ProcessGroup): collectives to the lane, the rest past it |
//! | `collective.rs` | every collective as calls of the library, or as exchanges in rank order |
//! | `messages.rs` | sends and receives, and who waits for them |
//! | `member.rs` | one rank of one group: what it is told, and how it ends |
//! | `parting.rs` | how a rank leaves, and what those do who still need it |
//! | `roll_call.rs` | who has not come, when an operation runs out of time |
//! | `links.rs`, `frame.rs` | the connections beside gloo's, over which ranks say why a group ends |
//! | `connect.rs` | how ranks find each other, and on which network |
//! | `context.rs`, `error.rs` | gloo's objects with Rust's rules; all that calls the library |
//!
//! # How a group ends
//!
//! Gloo closes all connections of a group when an operation of it times out, and that is also the
//! only way to wake what is blocked. So whoever breaks a group first says why on the links, then
//! makes gloo close. A rank that merely leaves closes nothing before everybody has what it gave.
//!
//! # Not done
//!
//! Transports other than TCP, several interfaces at once, device memory, encryption. Collectives
//! of different lengths end the process inside libgloo, see `docs/backends.md`.
#![deny(unsafe_code)]

mod collective;
mod connect;
#[expect(unsafe_code, reason = "calls into the library")]
mod context;
mod error;
mod frame;
mod group;
mod links;
mod member;
#[expect(unsafe_code, reason = "lends memory to messages")]
mod messages;
mod parting;
mod roll_call;

pub use group::GlooGroup;
