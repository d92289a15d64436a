//! Gradients averaged across ranks while backward still runs.
//!
//! The reducer takes gradients as they become ready, packs them into buckets, starts the reduction
//! of each bucket as soon as it is full and its turn has come, and hands out the averages at the
//! end. Large ones are reduced where they are if the group is good at that. It knows no framework:
//! parameters are [`ParamSpec`]s in an agreed order, gradients are bytes. It knows no backend: it
//! speaks to an `Arc<dyn ProcessGroup>`.
//!
//! | file | what is in it |
//! |---|---|
//! | `reducer.rs`, `state.rs` | [`Reducer`]; what lasts from pass to pass: layout, rebuild, sums |
//! | `pass/` | [`Pass`] and [`Sink`]: one backward, from the first gradient to the averages |
//! | `bucket.rs`, `launch.rs` | a bucket while it fills; buckets on their way, in order |
//! | `lane.rs`, `hook.rs` | the thread for what blocks; [`CommHook`] and those built in |
//! | [`plan`], `layout.rs` | which parameters travel together, and where in the bucket |
//! | `agree.rs` | [`verify`]: whether ranks have the same; rank 0's layout for all |
//! | `accumulate.rs`, `arrivals.rs`, `copy.rs` | sums without synchronisation; the ready order; the inner loops |
//! | `door.rs` | whether a pass still takes gradients, and who is handing one over |
//! | `grad.rs`, `reduced.rs` | gradients in, [`Reduced`] out |
//! | `config.rs`, `stats.rs`, `error.rs` | options, logging data, what can go wrong |
//!
//! With `tracing`, the targets `buckets` and `graph` tell about layouts and about parameters that
//! come and go: `PHALANX_LOG=buckets,graph` in programs that call `phalanx::log::init`.
//!
//! # Not done
//!
//! Sparse gradients in device memory, and buckets of another element type than their parameters'.
#![forbid(unsafe_code)]

mod accumulate;
mod agree;
mod arrivals;
mod bucket;
mod config;
mod copy;
mod door;
mod error;
mod grad;
mod hook;
mod lane;
mod launch;
mod layout;
mod params;
mod pass;
pub mod plan;
mod reduced;
mod reducer;
mod state;
mod stats;

pub use agree::verify;
pub use config::ReducerConfig;
pub use error::{Error, ParamName, Result, Unfinished, Why};
pub use grad::{GradView, NewGrad};
pub use hook::{AllReduceHook, CommHook, CompressHook, GradBucket, HookResult};
pub use params::{ParamSpec, Slot};
pub use pass::{Pass, Sink};
pub use plan::BucketCaps;
pub use reduced::{Grad, GradRef, Reduced};
pub use reducer::{GradTarget, Reducer, Sync};
pub use stats::{BucketTimes, PassTimes, ReducerStats};
