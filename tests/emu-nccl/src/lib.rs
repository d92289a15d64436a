//! For tests only: the part of `libnccl.so.2` that the NCCL backend calls, without a GPU.
//!
//! Runs on the emulated `libcuda.so.1` of `tests/emu-cuda` and refuses a real driver. Ranks are
//! real processes and bytes really travel; every operation is a job on its stream, so one that is
//! issued without waiting for its input gives a wrong result here too.
//!
//! | file | what is in it |
//! |---|---|
//! | `api/` | the exported functions |
//! | `comm.rs` | communicators: state, connection, abort |
//! | `op.rs` | operations: collected in groups, run on streams |
//! | `hub.rs` | a thread in the process that made the unique id: matches what ranks call |
//! | `wire.rs` | what ranks and hub say to each other |
//! | `fault.rs` | faults on purpose |
//! | `driver.rs`, `last_error.rs` | the emulated driver; what `ncclGetLastError` says |
//! | `tally.rs` | how often something was called, for tests to ask |
//!
//! # What it is true to
//!
//! * Communicators are made by all ranks with one id; non-blocking ones answer `ncclInProgress`
//!   from every call, and what was called is on the stream only when the state is `ncclSuccess`.
//! * Collectives match by their order, sends and receives by peer. A rank that calls something
//!   else is found out and everybody gets an asynchronous error.
//! * An operation that cannot go on keeps its stream busy until `ncclCommAbort`, as a spinning
//!   kernel does.
//! * A communicator that was freed, or that two threads call at the same time, is an error.
//!
//! # What it cannot show
//!
//! Speed, algorithms and their rounding (sums are in rank order), kernels that wait for each other
//! because a device has no room, when NCCL notices a dead peer. Its meaning of each call is our
//! reading of NCCL's documentation.
//!
//! Variables: `EMU_NCCL_VERSION`, what to answer to `ncclGetVersion`; `EMU_NCCL_FAULT`, see
//! `fault.rs`; `EMU_NCCL_PEER_DEATH=remote_error`, so that ranks learn that a peer is gone
//! (otherwise they hang, which NCCL may do too); `EMU_NCCL_CONNECT=lazy`, so that a communicator's
//! first operation is in progress until those of all its ranks are: NCCL connects its transports
//! then.
#![allow(
    non_upper_case_globals,
    reason = "the names of constants in patterns are NCCL's"
)]

mod api;
mod comm;
mod driver;
mod fault;
mod hub;
mod last_error;
mod op;
mod tally;
mod wire;
