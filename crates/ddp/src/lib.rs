//! Distributed data parallel: one model, many processes, averaged gradients.
//!
//! [`Ddp`] wraps a model. Every rank has a replica with the same parameters, computes gradients on
//! its share of the data, and gets everybody's average, which a [`Reducer`](phalanx_reducer::Reducer)
//! computes while backward still runs. So all replicas take the same step and stay the same.
//!
//! What differs between frameworks is behind [`Replica`]: how parameters are read and written, how
//! gradients are caught during backward, how averages get to the optimizer. [`builtin`] is a small
//! model without any framework, with a backward written by hand.
//!
//! | file | what is in it |
//! |---|---|
//! | `ddp.rs` | [`Ddp`]: forward, backward, update |
//! | `construct.rs` | verification across ranks, the first broadcast |
//! | `replica.rs` | [`Replica`]: what a front end implements |
//! | `buffers.rs` | buffers kept equal: broadcast, or a [`BufferHook`] |
//! | `join.rs`, `joined.rs` | [`Join`]: ranks with different numbers of inputs; what [`Ddp`] does there |
//! | `config.rs`, `log.rs`, `error.rs` | options, logging data, what can go wrong |
//! | `sampler.rs`, `mt19937.rs` | [`DistributedSampler`]: which examples are whose, in PyTorch's order |
//! | [`builtin`] | linear, ReLU, embedding bag, batch norm, cross entropy, SGD |
#![forbid(unsafe_code)]

mod buffers;
pub mod builtin;
mod config;
mod construct;
mod ddp;
mod error;
mod join;
mod joined;
mod log;
mod mt19937;
mod replica;
mod sampler;

pub use buffers::{BufferHook, NamedBuffer, When};
pub use config::DdpConfig;
pub use ddp::{Ddp, NoSync};
pub use error::{Error, Result};
pub use join::{Join, JoinConfig, JoinHook, JoinOptions, Joinable};
pub use log::DdpLog;
pub use replica::{Averaged, GradSink, Replica, Tensor, TensorSpec};
pub use sampler::{DistributedSampler, randperm};

pub use phalanx_reducer as reducer;
