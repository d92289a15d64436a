//! Distributed data parallel for [burn](https://burn.dev): many processes train one model.
//!
//! [`Ddp`] wraps any module whose parameters are on burn's Flex backend with autodiff. The model,
//! its optimizer, schedulers and records stay as they are:
//!
//! ```
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::{ModuleOptimizer, SgdConfig};
//! use burn::tensor::{Device, Distribution, Tensor};
//! use phalanx_burn::{Ddp, DdpConfig};
//! # use std::sync::Arc;
//! # use phalanx_pg::FakeGroup;
//!
//! let group = Arc::new(FakeGroup::new(0, 1)); // or what `phalanx::init` returns
//! let device = Device::flex().autodiff();
//! let model: Linear = LinearConfig::new(4, 2).init(&device);
//! let mut ddp = Ddp::new(model, group, DdpConfig::default())?; // verified, rank 0's values
//! let mut optim: ModuleOptimizer = SgdConfig::new().init();
//! for _ in 0..3 {
//!     let x = Tensor::<2>::random([8, 4], Distribution::Default, &device);
//!     let loss = ddp.forward(|model| model.forward(x).square().mean())?;
//!     let grads = ddp.backward(loss)?; // averaged while backward ran
//!     ddp.update(|model| optim.step(0.1, model, grads));
//! }
//! # Ok::<(), phalanx_burn::Error>(())
//! ```
//!
//! # How gradients are caught
//!
//! burn has no hooks. [`Ddp::forward`] runs on a clone of the model in which every parameter has
//! passed a *gate*: an operation that changes nothing forward and, backward, hands the parameter's
//! complete gradient to the reducer. An identity operation alone would hand all of them over at the
//! end of backward, because burn runs backward by depth, counted from the leaves, and an identity on
//! a leaf has depth one. So a gate has a second input, the *anchor*, which is not differentiated and
//! deep enough to lift the gate above everything that forward has recorded so far. See `gate.rs`.
//!
//! | file | what is in it |
//! |---|---|
//! | `ddp.rs` | [`Ddp`]: forward, backward, update as burn's users write them |
//! | `gate.rs` | gates and their anchors: gradients during backward |
//! | `model.rs` | [`BurnModel`]: the front end that `phalanx-ddp` sees |
//! | `inventory.rs`, `values.rs` | what tensors a module has; their bytes, in and out |
//! | `dataset.rs`, `seed.rs` | [`ShardedDataset`]: each rank its share; [`seed_rank`] |
//!
//! # Not done
//!
//! Other backends of burn than Flex, since gradients are read from host memory; quantised
//! parameters; sparse gradients, which burn does not have; several devices in one process.
#![forbid(unsafe_code)]

mod dataset;
mod ddp;
mod gate;
mod inventory;
mod model;
mod seed;
mod values;

pub use dataset::ShardedDataset;
pub use ddp::{Ddp, NoSync};
pub use model::BurnModel;
pub use seed::seed_rank;

pub use phalanx_ddp::{DdpConfig, Error, Result};

#[cfg(doctest)]
#[doc = include_str!("../../../docs/burn.md")]
mod page {}
