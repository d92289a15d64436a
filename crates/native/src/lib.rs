//! The default backend: shared memory inside a host, TCP between hosts, nothing to install.
//!
//! ```no_run
//! use phalanx_native::NativeGroup;
//! use phalanx_pg::{DType, Device, ProcessGroupExt, ReduceOp, registry::GroupInit};
//! # fn example(init: &GroupInit) -> phalanx_pg::Result<()> {
//! let group = NativeGroup::connect(init)?;
//! // Memory that peers on this host can reach: reduced where it is, without a copy.
//! let gradients = group.allocate(Device::Cpu, DType::F32, 1 << 20)?;
//! let sum = group.allreduce(gradients, ReduceOp::Sum)?.wait()?;
//! # drop(sum);
//! group.shutdown()
//! # }
//! ```
//!
//! How it works, what happens when ranks die, and who is trusted with what is told in
//! `docs/native-backend.md`.
//!
//! | file | what is in it |
//! |---|---|
//! | `group.rs`, `member/` | the process group; one rank of it, where callers, peers and the clock meet |
//! | `meet.rs`, `host_map.rs` | how processes find each other; who shares a host |
//! | `domain/` | one process of a job: connections, frames, the thread that listens to peers |
//! | `shm/`, `maps.rs` | shared memory: segments, arenas, how much may be taken; the peers' arenas |
//! | `host/` | collectives of the ranks that share a host |
//! | `between/` | collectives of groups on several hosts |
//! | `message/` | sends and receives |
//! | `kernels/` | loops over elements: reductions and copies |
//! | `room.rs` | private memory for partial sums |
//! | `roof.rs` | what an all-reduce cannot do without, to be measured |
//!
//! # What it can do
//!
//! All calls, on host memory, with any mix of registered and plain memory and of blocking and
//! asynchronous callers:
//!
//! | operator | f16 bf16 f32 f64 | i8 u8 i16 i32 i64 | bool | complex64 |
//! |---|---|---|---|---|
//! | sum, product | yes | yes | yes | yes |
//! | avg, premul-sum | yes | no | no | yes |
//! | min, max | yes | yes | yes | no |
//! | bitwise and, or, xor | no | yes | yes | no |
//!
//! What has "no" has no meaning and is refused by every backend. Calls that only move data take all
//! types.
//!
//! # Not done
//!
//! Several threads per slice or for the streams of a rank, and NUMA; messages on several streams;
//! algorithms for many hosts other than direct exchange; encryption between hosts; systems other
//! than Linux. ARM is expected to work and has not been run by us.

mod between;
mod domain;
mod group;
mod host;
mod host_map;
mod kernels;
mod maps;
mod meet;
mod member;
mod message;
mod roof;
mod room;
mod shm;

pub use group::NativeGroup;
pub use roof::sum_into_all;
