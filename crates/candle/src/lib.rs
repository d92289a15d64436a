//! Distributed data parallel for [candle](https://github.com/huggingface/candle): many processes
//! train one model.
//!
//! A model is built by a closure over a `VarBuilder`, as candle's models are. Parameters stay `Var`s
//! in a `VarMap`, and candle's optimizers take the averages:
//!
//! ```
//! use candle_core::{DType, Device, Module, Tensor};
//! use candle_nn::{Linear, Optimizer, SGD, VarMap, linear};
//! use phalanx_candle::{Ddp, DdpConfig};
//! # use std::sync::Arc;
//! # use phalanx_pg::FakeGroup;
//!
//! let group = Arc::new(FakeGroup::new(0, 1)); // or what `phalanx::init` returns
//! let vars = VarMap::new();
//! let model = |vb: candle_nn::VarBuilder<'_>| linear(4, 2, vb.pp("fc"));
//! let mut ddp = Ddp::new(&vars, DType::F32, model, group, DdpConfig::default())?;
//! let mut sgd = SGD::new(vars.all_vars(), 0.1)?;
//! for _ in 0..3 {
//!     let x = Tensor::randn(0f32, 1.0, (8, 4), &Device::Cpu)?;
//!     let loss = ddp.forward(|model: &Linear| model.forward(&x)?.sqr()?.mean_all())?;
//!     let grads = ddp.backward(&loss)?; // averaged while backward ran
//!     ddp.update(|_| sgd.step(&grads))?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What candle does not differentiate
//!
//! `candle_nn::LayerNorm`, `candle_nn::ops::softmax_last_dim` and `candle_nn::ops::rms_norm` are fused
//! operations without a backward: gradients end there, and nobody says so. Here parameters that
//! get no gradient are an error that names them. [`layer_norm`] and `candle_nn::ops::softmax` work.
//!
//! # Two ways to keep parameters
//!
//! [`Vars`], the default, puts a gate before each parameter in every pass; a gate is an operation,
//! and candle's operations return new memory, so all parameters are copied once per pass. With
//! [`InPlace`], the parameters themselves are the results of gates, made once, and nothing is
//! copied: neither parameters nor averages. They are no `Var`s then, so optimizers of this
//! crate update them: [`Sgd`] and [`AdamW`].
//!
//! | file | what is in it |
//! |---|---|
//! | `ddp.rs` | [`Ddp`]: forward, backward, update as candle's users write them |
//! | `model.rs` | [`CandleModel`]: the front end that `phalanx-ddp` sees |
//! | `parameters.rs` | [`Parameters`], and [`Vars`]: parameters in a `VarMap` |
//! | `in_place.rs`, `optim.rs` | [`InPlace`]: parameters without copies; their optimizers |
//! | `gate.rs`, `values.rs` | gradients during backward; tensors as bytes, in and out |
//! | `layer_norm.rs` | [`layer_norm`] with a backward |
//!
//! # Not done
//!
//! Tensors outside host memory; sparse gradients, which candle does not have.
#![forbid(unsafe_code)]

mod ddp;
mod gate;
mod in_place;
mod layer_norm;
mod model;
mod optim;
mod parameters;
mod values;

pub use ddp::{Ddp, NoSync};
pub use gate::Outlet;
pub use in_place::{InPlace, Views};
pub use layer_norm::{LayerNorm, layer_norm};
pub use model::CandleModel;
pub use optim::{AdamW, Sgd};
pub use parameters::{Parameters, Vars, Wanted};

pub use phalanx_ddp::{DdpConfig, Error, Result};

#[cfg(doctest)]
#[doc = include_str!("../../../docs/candle.md")]
mod page {}
