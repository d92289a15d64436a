//! Distributed data parallel training for Rust.
//!
//! ```
//! use phalanx::prelude::*;
//!
//! let group = phalanx::init()?; // the ranks that the launcher started; alone: a world of one
//! let mut values = [group.rank() as f32, 1.0];
//! group.allreduce_in_place(&mut values, ReduceOp::Sum)?;
//! assert_eq!(values[1], group.size() as f32);
//! group.shutdown()?;
//! # Ok::<(), phalanx::Error>(())
//! ```
//!
//! Training is [`ddp::Ddp`] around a model: every rank computes gradients on its share of the data,
//! all take the same step with the average.
//!
//! ```
//! use phalanx::ddp::builtin::{Matrix, Net, Sgd, cross_entropy};
//! use phalanx::prelude::*;
//!
//! let group = phalanx::init()?;
//! let net = Net::new(1).linear("fc1", 4, 8).relu().linear("fc2", 8, 3);
//! let mut ddp = Ddp::new(net, group.clone(), DdpConfig::default())?;
//! let mut sgd = Sgd::new(0.1);
//! let sampler = DistributedSampler::new(12, group.size(), group.rank())?;
//! for i in sampler.indices() {
//!     let x = Matrix::new(1, 4, vec![i as f32 / 12.0; 4]);
//!     let (_loss, grad) = ddp.forward(|net| cross_entropy(&net.forward(&x.into()), &[i % 3]))?;
//!     let grads = ddp.backward(|net| net.backward(&grad))?; // averaged over all ranks
//!     ddp.update(|net| sgd.step(net, &grads));
//! }
//! group.shutdown()?;
//! # Ok::<(), phalanx::ddp::Error>(())
//! ```
//!
//! | feature | what it adds |
//! |---|---|
//! | `native` (default) | shared memory inside a host, TCP between hosts, by the name `native` |
//! | `gloo` | the system's libgloo, by the name `gloo` |
//! | `mpi` | the system's MPI, by the name `mpi`; ranks are what MPI says |
//! | `nccl` | NCCL on CUDA memory, by the name `nccl` or as in `cpu:native,cuda:nccl`; not run on a GPU by us |
//! | `log` (default) | `phalanx::log`: events on standard error, chosen by `PHALANX_LOG` |
//! | `reference` | the plain backend over TCP, by the name `reference` |
//! | `burn` | `phalanx::burn`: [burn](https://burn.dev)'s models |
//! | `candle` | `phalanx::candle`: [candle](https://github.com/huggingface/candle)'s models |
//!
//! Backends of your own are registered by [`pg::registry::register`] and found by name like the
//! built-in ones.
#![forbid(unsafe_code)]

mod backends;
pub mod checkpoint;
mod init;
#[cfg(feature = "log")]
pub mod log;
mod recording;

/// Distributed data parallel for burn's models.
#[cfg(feature = "burn")]
pub use phalanx_burn as burn;
/// Distributed data parallel for candle's models.
#[cfg(feature = "candle")]
pub use phalanx_candle as candle;
/// Distributed data parallel: the wrapper around a model, the sampler, the builtin model, and what
/// a front end for another framework implements.
pub use phalanx_ddp as ddp;
/// Process groups: the trait, buffers, works, errors, wrappers; what a backend implements.
pub use phalanx_pg as pg;
/// What averages gradients below [`ddp`], for those who bring their own wrapper: buckets, passes,
/// comm hooks, logging data.
pub use phalanx_reducer as reducer;
/// The key-value stores through which ranks meet.
pub use phalanx_store as store;

pub use backends::backends;
pub use init::{Init, env, init, init_with};
pub use pg::{Error, ErrorKind, Result};
pub use recording::{dump, recorder};
pub use store::rendezvous::LauncherEnv;

/// What most programs need: `use phalanx::prelude::*`.
pub mod prelude {
    pub use phalanx_ddp::{Ddp, DdpConfig, DistributedSampler, Join, JoinOptions};
    pub use phalanx_pg::{
        Buffer, CallOptions, DType, Device, Element, Frozen, ProcessGroup, ProcessGroupExt,
        ReduceOp, Work,
    };
    pub use phalanx_store::Store;
}
