//! The wrapper around a burn module.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use phalanx_ddp::{DdpConfig, Error, Result};
use phalanx_pg::ProcessGroup;
use phalanx_reducer::Sync;

use crate::model::BurnModel;

/// A burn module that is trained by many processes at once.
///
/// [`forward`](Ddp::forward), [`backward`](Ddp::backward) and [`update`](Ddp::update) take the
/// place of the model's forward, the loss's backward and the optimizer's step; see the
/// [crate's example](crate). What is the same for all frameworks (logging data, comm hooks, joining,
/// another group) comes with [`phalanx_ddp::Ddp`], which this dereferences to.
///
/// All ranks construct it, and run forward and backward equally often.
pub struct Ddp<M: Module> {
    common: phalanx_ddp::Ddp<BurnModel<M>>,
}

impl<M: Module> Ddp<M> {
    /// Verifies that all ranks have the same model and options, gives them rank 0's values, and
    /// plans the buckets. Collective.
    ///
    /// Parameters go by their path in the module, so ranks may have made theirs from different
    /// seeds. Gradients are always views of the buckets, whatever
    /// [`gradient_as_bucket_view`](DdpConfig::gradient_as_bucket_view) says: burn copies before it
    /// writes to them.
    pub fn new(model: M, group: Arc<dyn ProcessGroup>, config: DdpConfig) -> Result<Self> {
        let config = DdpConfig {
            gradient_as_bucket_view: true,
            ..config
        };
        let common = phalanx_ddp::Ddp::new(BurnModel::new(model), group, config)?;
        Ok(Self { common })
    }

    /// Runs a forward whose gradients will be averaged; usually it ends with the loss.
    ///
    /// The closure gets a clone of the model with gates in it. Everything that the loss takes from
    /// the model has to come from there. Several forwards may precede one
    /// [`backward`](Ddp::backward), whose loss is then made of all of theirs.
    pub fn forward<T>(&mut self, f: impl FnOnce(&M) -> T) -> Result<T> {
        self.common.forward(|model| f(model.for_forward()))
    }

    /// Runs backward, during which gradients are averaged, and returns the averages: what an
    /// optimizer takes.
    ///
    /// Inside [`no_sync`](Ddp::no_sync) gradients are only added up, and nothing is returned. A
    /// parameter that was used outside [`forward`](Ddp::forward) is an error.
    pub fn backward<const D: usize>(&mut self, loss: Tensor<D>) -> Result<GradientsParams> {
        if !loss.is_tracked() {
            return Err(Error::invalid(
                "the loss depends on no parameter: compute it from the model that forward's \
                 closure gets, on a device with autodiff",
            ));
        }
        self.common
            .try_backward(|model| model.backward(move || loss.backward()))
    }

    /// Changes the model: the optimizer's step, or a record that is loaded. All ranks must do the
    /// same.
    pub fn update(&mut self, f: impl FnOnce(M) -> M) {
        self.common.update(|model| model.update(f));
    }

    /// Runs a forward for evaluation: on the model without autodiff and with dropout and the like
    /// switched off, as burn's `valid` makes it.
    ///
    /// If the model has buffers, the first one after training is collective: it gives all ranks
    /// rank 0's.
    pub fn infer<T>(&mut self, f: impl FnOnce(&M) -> T) -> Result<T> {
        self.common.infer(|model| f(&model.plain().valid()))
    }

    /// Adds gradients up without averaging, as long as the guard lives. The next backward outside
    /// averages the whole sum.
    pub fn no_sync(&mut self) -> NoSync<'_, M> {
        let before = self.common.set_sync(Sync::No);
        NoSync { ddp: self, before }
    }

    /// The plain model: for records, and whatever needs no averaging.
    pub fn model(&self) -> &M {
        self.common.model().plain()
    }

    /// The plain model, for good.
    pub fn into_inner(self) -> M {
        self.common.into_inner().into_plain()
    }
}

impl<M: Module> Deref for Ddp<M> {
    type Target = phalanx_ddp::Ddp<BurnModel<M>>;

    fn deref(&self) -> &Self::Target {
        &self.common
    }
}

impl<M: Module> DerefMut for Ddp<M> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.common
    }
}

impl<M: Module> fmt::Debug for Ddp<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.common.fmt(f)
    }
}

/// A [`Ddp`] that adds gradients up without averaging; see [`Ddp::no_sync`].
#[derive(Debug)]
pub struct NoSync<'a, M: Module> {
    ddp: &'a mut Ddp<M>,
    before: Sync,
}

impl<M: Module> Deref for NoSync<'_, M> {
    type Target = Ddp<M>;

    fn deref(&self) -> &Ddp<M> {
        self.ddp
    }
}

impl<M: Module> DerefMut for NoSync<'_, M> {
    fn deref_mut(&mut self) -> &mut Ddp<M> {
        self.ddp
    }
}

impl<M: Module> Drop for NoSync<'_, M> {
    fn drop(&mut self) {
        self.ddp.common.set_sync(self.before);
    }
}
