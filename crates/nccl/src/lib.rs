//! NCCL as a backend: collectives on CUDA memory.
//!
//! ```no_run
//! use phalanx_nccl::NcclGroup;
//! use phalanx_pg::{DType, ProcessGroupExt, ReduceOp, registry::GroupInit};
//! # fn example(init: &GroupInit) -> phalanx_pg::Result<()> {
//! let group = NcclGroup::connect(init)?; // on a machine without a driver: an error that says so
//! let gradients = group.allocate(group.device(), DType::F32, 1 << 20)?;
//! // Runs behind what is on the buffer's stream; `wait` makes that stream wait, not the host.
//! let sum = group.allreduce(gradients, ReduceOp::Avg)?.wait()?;
//! # drop(sum);
//! group.shutdown()
//! # }
//! ```
//!
//! Nothing of CUDA is needed to build it; driver and library are looked for at run time. **It has
//! not been run on a GPU by us**: what was shown, and how, is in `docs/nccl.md`.
//!
//! | file | what is in it |
//! |---|---|
//! | `group.rs`, `options.rs` | the process group; how it is to behave |
//! | `core.rs` | what callers, watchdog and connecting threads share: order, numbers, the broken state |
//! | `connect.rs` | how communicators come to be |
//! | `channel.rs` | a communicator with its stream and the operations on it |
//! | `turn.rs` | waiting for a lock that a thread may hold inside the library |
//! | `op.rs` | one operation: its events, its memory, its end |
//! | `step.rs` | a call in terms of NCCL's functions |
//! | `comm.rs` | the thin layer over NCCL's handle |
//! | `driver.rs`, `memory.rs` | devices, streams, events; device memory and copies |
//! | `slices.rs` | with the feature `cudarc-0_19`: buffers from slices of cudarc's |
//! | `tensors.rs` | with the feature `candle-0_11`: candle's tensors |
//! | `board.rs` | what ranks tell each other through the store: ids, and why a group broke |
//! | `watchdog.rs` | a thread per group that sees to it that every operation ends |
//!
//! # What it can do
//!
//! All calls but receiving from anybody, on device memory; messages match by their order and have
//! no tags.
//!
//! | operator | f16 bf16 f32 f64 | i8 u8 i32 i64 | bool | complex64 |
//! |---|---|---|---|---|
//! | sum | yes | yes | yes | yes |
//! | product | yes | yes | yes | not in NCCL |
//! | avg, premul-sum | yes | no | no | yes |
//! | min, max | yes | yes | yes | no |
//!
//! NCCL has no 16-bit integers and no bitwise operators. "No" has no meaning for any backend.
//!
//! # Not done
//!
//! Several devices in one process; registered memory (`ncclMemAlloc`, windows); CUDA graphs;
//! shrinking and growing communicators; a check for NaNs, which needs a kernel.
#![allow(
    non_upper_case_globals,
    reason = "the names of constants in patterns are NCCL's"
)]

mod board;
mod channel;
mod comm;
mod connect;
mod core;
mod driver;
mod group;
mod memory;
mod op;
mod options;
#[cfg(feature = "cudarc-0_19")]
mod slices;
mod step;
#[cfg(feature = "candle-0_11")]
mod tensors;
mod turn;
mod watchdog;

pub use group::{NcclGroup, capabilities};
pub use options::Options;
#[cfg(feature = "cudarc-0_19")]
pub use slices::buffer_from_slice;
#[cfg(feature = "candle-0_11")]
pub use tensors::{allreduce_tensor, buffer_over_tensor};
