//! The MPI backend: the process group trait on the system's MPI, through the ffi layer of the crate
//! `mpi`, with every return code looked at.
//!
//! Started by `mpirun` or `srun`; rank and size are MPI's, and no store is needed. Every call,
//! element type and operator in host memory. `docs/backends.md` says how to install it and what it
//! does when something goes wrong.
//!
//! | file | what it is |
//! |---|---|
//! | `group.rs` | the [`ProcessGroup`](phalanx_pg::ProcessGroup): collectives to the lane, the rest past it |
//! | `hello.rs` | how ranks meet before each collective, and find out that they call different things |
//! | `forming.rs` | how ranks agree to form a group before they enter MPI for it |
//! | `roll_call.rs` | who has not come, when the time of a collective is up |
//! | `collective.rs` | every collective, as MPI's own or as an exchange of messages in rank order |
//! | `messages.rs` | sends and receives, and the thread that asks how they stand |
//! | `member.rs` | one rank of one group: what it runs, what it is told, and how it ends |
//! | `flight.rs` | messages on their way, which own their memory until they are through |
//! | `comm.rs`, `operators.rs`, `library.rs` | communicators, types and operators, start and end of MPI |
//!
//! # Why so
//!
//! A collective of MPI's cannot be cancelled, has no time limit, and keeps the thread that calls it.
//! So ranks meet first, in messages that can be given up, and enter MPI's collective only when all
//! are there. All threads may be in MPI at the same time (`MPI_THREAD_MULTIPLE`): with one lock
//! around blocking collectives, two groups that ranks come to in different orders would wait for
//! each other for ever.
//!
//! # Not done
//!
//! Going on after a rank has died (MPI ends the job), device memory, counts beyond 32 bits inside
//! one message (longer ones go in pieces).
#![deny(unsafe_code)]

#[expect(unsafe_code, reason = "lends memory to messages")]
mod collective;
#[expect(unsafe_code, reason = "calls into the library")]
mod comm;
#[expect(unsafe_code, reason = "calls into the library")]
mod flight;
mod forming;
mod group;
#[expect(unsafe_code, reason = "lends memory to messages")]
mod hello;
#[expect(unsafe_code, reason = "calls into the library")]
mod library;
#[expect(unsafe_code, reason = "lends memory to messages")]
mod member;
#[expect(unsafe_code, reason = "lends memory to messages")]
mod messages;
#[expect(unsafe_code, reason = "calls into the library, and back")]
mod operators;
mod roll_call;

pub use group::MpiGroup;
