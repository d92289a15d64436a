//! What a front end implements.

use std::sync::Arc;

use phalanx_pg::DType;
use phalanx_reducer::{Grad, GradRef, NewGrad, ParamSpec, Reduced, Sink, Slot};
use serde::{Deserialize, Serialize};

use crate::error::Result;

/// One rank's copy of a model: where a framework meets [`Ddp`](crate::Ddp).
///
/// A front end for another framework is an implementation of this trait, in any crate. It says
/// which tensors there are, reads and writes them as bytes, and catches gradients:
///
/// 1. Before the first forward of a backward, [`attach`](Replica::attach) gets a [`GradSink`]. The
///    front end arranges that backward calls [`grad_ready`](GradSink::grad_ready) with each
///    parameter's gradient when it is complete: by hooks where a framework has them, by identity
///    operations where it has none. A gradient that nobody else has is best given with its memory
///    ([`Buffer`](phalanx_pg::Buffer)): a large one need not be copied then. (But see docs/ddp.md
///    on allocators.)
/// 2. The user's forward runs on [`hooked`](Replica::hooked), maybe several times, then backward.
/// 3. [`detach`](Replica::detach) takes the hooks away.
/// 4. [`install`](Replica::install) puts the averages where the optimizer looks for gradients.
///
/// Parameters are known by their index in [`parameters`](Replica::parameters): the same order on
/// all ranks, with names that are the same on all ranks, shared ones listed once.
pub trait Replica {
    /// What forward runs on: the model itself, or a clone with hooks in it.
    type Hooked;
    /// What the framework's backward returns.
    type Raw;
    /// What the optimizer takes.
    type Grads;

    /// What is wrong with this model, whatever other ranks have: every rank hears of it.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// The parameters that need gradients.
    fn parameters(&self) -> Vec<ParamSpec>;

    /// Parameters that need none. They are broadcast once, like the others.
    fn frozen(&self) -> Vec<TensorSpec> {
        Vec::new()
    }

    /// What is not trained but changes in training: running means. May change from call to call.
    fn buffers(&self) -> Vec<TensorSpec>;

    /// Copies a tensor's elements out, in row-major order. `out` has exactly their length.
    fn read(&self, tensor: Tensor, out: &mut [u8]) -> Result<()>;

    /// Copies a tensor's elements in.
    fn write(&mut self, tensor: Tensor, data: &[u8]) -> Result<()>;

    /// Reads several tensors, for front ends that find them by a walk through the model.
    fn read_all(&self, tensors: &mut [(Tensor, &mut [u8])]) -> Result<()> {
        let mut each = tensors.iter_mut();
        each.try_for_each(|(tensor, out)| self.read(*tensor, out))
    }

    /// Writes several tensors; see [`read_all`](Replica::read_all).
    fn write_all(&mut self, tensors: &[(Tensor, &[u8])]) -> Result<()> {
        let mut each = tensors.iter();
        each.try_for_each(|(tensor, data)| self.write(*tensor, data))
    }

    /// Hands gradients of the coming backward to `sink`. Replaces an earlier sink.
    fn attach(&mut self, sink: GradSink) -> Result<()>;

    /// The model as forward sees it, between `attach` and `detach` with hooks.
    fn hooked(&mut self) -> &mut Self::Hooked;

    /// Hands gradients to nobody.
    fn detach(&mut self);

    /// Puts averages in the place of this rank's own gradients, which `raw` may hold still.
    ///
    /// A parameter whose average is `None` keeps no gradient, and one that the sink does not
    /// [take](GradSink::takes) keeps its own.
    fn install(&mut self, raw: Self::Raw, averaged: &Averaged) -> Result<Self::Grads>;

    /// Runs before each forward: where tensor parallelism assembles its parameters.
    fn before_forward(&mut self) -> Result<()> {
        Ok(())
    }

    /// Runs after each forward: where it takes them apart again.
    fn after_forward(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A tensor of a [`Replica`], by its index in the list it comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tensor {
    /// Of [`Replica::parameters`].
    Parameter(usize),
    /// Of [`Replica::frozen`].
    Frozen(usize),
    /// Of [`Replica::buffers`].
    Buffer(usize),
}

/// A tensor without its values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// A name that is the same on all ranks.
    pub name: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Type of its elements.
    pub dtype: DType,
}

impl TensorSpec {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of bytes.
    pub fn byte_len(&self) -> usize {
        self.len() * self.dtype.size()
    }
}

impl From<&ParamSpec> for TensorSpec {
    fn from(param: &ParamSpec) -> Self {
        Self {
            name: param.name.clone(),
            shape: param.shape.clone(),
            dtype: param.dtype,
        }
    }
}

/// Where a front end hands in gradients, by parameter index.
#[derive(Debug, Clone)]
pub struct GradSink {
    pub(crate) sink: Sink,
    pub(crate) slots: Arc<[Option<Slot>]>,
}

impl GradSink {
    /// Whether this parameter's gradient is averaged: not if it is on the ignore list.
    pub fn takes(&self, parameter: usize) -> bool {
        self.slots.get(parameter).is_some_and(Option::is_some)
    }

    /// Takes a complete gradient; see [`Sink::grad_ready`]. One that is ignored is left alone.
    pub fn grad_ready<'a>(&self, parameter: usize, grad: impl Into<NewGrad<'a>>) -> Result<()> {
        match self.slots.get(parameter) {
            Some(Some(slot)) => Ok(self.sink.grad_ready(*slot, grad)?),
            Some(None) => Ok(()),
            None => {
                let what = format!("there is no parameter {parameter}");
                Err(crate::Error::invalid(what))
            }
        }
    }
}

/// Averages, by parameter index.
#[derive(Debug)]
pub struct Averaged {
    pub(crate) reduced: Reduced,
    pub(crate) slots: Arc<[Option<Slot>]>,
    pub(crate) as_views: bool,
}

impl Averaged {
    /// Whether there are averages; otherwise this backward only accumulated.
    pub fn is_synchronized(&self) -> bool {
        self.reduced.is_synchronized()
    }

    /// Whether gradients should be views of the buckets even if the framework can write to them; see
    /// [`gradient_as_bucket_view`](crate::DdpConfig::gradient_as_bucket_view).
    pub fn as_views(&self) -> bool {
        self.as_views
    }

    /// Whether this parameter is averaged at all.
    pub fn covers(&self, parameter: usize) -> bool {
        self.slots.get(parameter).is_some_and(Option::is_some)
    }

    /// The average of a parameter's gradient; `None` if no rank has one.
    pub fn grad(&self, parameter: usize) -> Option<Grad> {
        self.reduced.grad((*self.slots.get(parameter)?)?)
    }

    /// The same for a dense gradient.
    pub fn dense(&self, parameter: usize) -> Option<GradRef> {
        self.reduced.dense((*self.slots.get(parameter)?)?)
    }
}
