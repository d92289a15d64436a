//! The wrapper around a candle model.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use candle_core::{DType, Result as CandleResult, Tensor};
use candle_nn::{VarBuilder, VarMap};
use phalanx_ddp::{DdpConfig, Error, Replica, Result};
use phalanx_pg::ProcessGroup;
use phalanx_reducer::Sync;

use crate::in_place::InPlace;
use crate::model::CandleModel;
use crate::parameters::{Parameters, Vars};
use crate::values::failed;

/// A candle model that is trained by many processes at once.
///
/// [`forward`](Ddp::forward), [`backward`](Ddp::backward) and [`update`](Ddp::update) take the
/// place of the model's forward, the loss's backward and the optimizer's step; see the
/// [crate's example](crate). What is the same for all frameworks (logging data, comm hooks, joining,
/// another group) comes with [`phalanx_ddp::Ddp`], which this dereferences to.
///
/// All ranks construct it, and run forward and backward equally often.
pub struct Ddp<M, P: Parameters + Send + 'static = Vars> {
    common: phalanx_ddp::Ddp<CandleModel<M, P>>,
}

impl<M> Ddp<M> {
    /// Builds the model with parameters in `vars`, verifies that all ranks have the same, gives
    /// them rank 0's values, and plans the buckets. Collective.
    ///
    /// `build` runs once now and once in every pass, and asks for the same tensors each time.
    /// Tensors named `running_mean` or `running_var` are buffers: broadcast before each forward, not
    /// trained.
    pub fn new(
        vars: &VarMap,
        dtype: DType,
        build: impl Fn(VarBuilder<'_>) -> CandleResult<M> + Send + 'static,
        group: Arc<dyn ProcessGroup>,
        config: DdpConfig,
    ) -> Result<Self> {
        Self::with(Vars::new(vars), dtype, build, group, config)
    }
}

impl<M> Ddp<M, InPlace> {
    /// As [`new`](Ddp::new), with parameters that are never copied; see [`InPlace`]. None of them may
    /// be on the [ignore list](DdpConfig::ignore): its gradient would have nowhere to go.
    pub fn in_place(
        dtype: DType,
        build: impl Fn(VarBuilder<'_>) -> CandleResult<M> + Send + 'static,
        group: Arc<dyn ProcessGroup>,
        config: DdpConfig,
    ) -> Result<Self> {
        let ddp = Self::with(InPlace::default(), dtype, build, group, config)?;
        let parameters = ddp.common.model().parameters();
        match parameters
            .iter()
            .find(|p| ddp.config().ignore.contains(&p.name))
        {
            None => Ok(ddp),
            Some(ignored) => Err(Error::invalid(format!(
                "parameter {} is on the ignore list, and parameters in place cannot be ignored",
                ignored.name
            ))),
        }
    }
}

impl<M, P: Parameters + Send + 'static> Ddp<M, P> {
    fn with(
        parameters: P,
        dtype: DType,
        build: impl Fn(VarBuilder<'_>) -> CandleResult<M> + Send + 'static,
        group: Arc<dyn ProcessGroup>,
        config: DdpConfig,
    ) -> Result<Self> {
        let model = CandleModel::new(parameters, dtype, build)?;
        let common = phalanx_ddp::Ddp::new(model, group, config)?;
        Ok(Self { common })
    }

    /// Runs a forward whose gradients will be averaged; usually it ends with the loss.
    ///
    /// Everything that the loss takes from the model has to come from the one that the closure
    /// gets. Several forwards may precede one [`backward`](Ddp::backward).
    pub fn forward<T>(&mut self, f: impl FnOnce(&M) -> CandleResult<T>) -> Result<T> {
        let out = self.common.forward(|model| f(model.for_forward()))?;
        out.map_err(failed)
    }

    /// Runs backward, during which gradients are averaged, and returns the averages: what an
    /// optimizer takes.
    ///
    /// Inside [`no_sync`](Ddp::no_sync) gradients are only added up, and what is returned is not
    /// meant for an optimizer.
    pub fn backward(&mut self, loss: &Tensor) -> Result<P::Grads> {
        let grads = self.common.try_backward(|model| model.backward(loss));
        grads.map_err(explain)
    }

    /// Changes the parameters: the optimizer's step. All ranks must do the same.
    pub fn update<T>(&mut self, f: impl FnOnce(&P) -> CandleResult<T>) -> Result<T> {
        let out = self.common.update(|model| model.with_parameters(f));
        out.map_err(failed)
    }

    /// Runs a forward for evaluation, without gates.
    ///
    /// If the model has buffers, the first one after training is collective: it gives all ranks
    /// rank 0's.
    pub fn infer<T>(&mut self, f: impl FnOnce(&M) -> CandleResult<T>) -> Result<T> {
        let out = self.common.infer(|model| f(model.plain()))?;
        out.map_err(failed)
    }

    /// Adds gradients up without averaging, as long as the guard lives. The next backward outside
    /// averages the whole sum.
    pub fn no_sync(&mut self) -> NoSync<'_, M, P> {
        let before = self.common.set_sync(Sync::No);
        NoSync { ddp: self, before }
    }

    /// The plain model.
    pub fn model(&self) -> &M {
        self.common.model().plain()
    }
}

/// Says what may be behind parameters without a gradient.
fn explain(err: Error) -> Error {
    match &err {
        Error::Reducer(phalanx_reducer::Error::Unfinished(_)) => Error::frontend(format!(
            "{err}; candle_nn's LayerNorm, softmax_last_dim and rms_norm have no backward and end all \
             gradients without a word: use phalanx_candle::layer_norm and candle_nn::ops::softmax"
        )),
        _ => err,
    }
}

impl<M, P: Parameters + Send + 'static> Deref for Ddp<M, P> {
    type Target = phalanx_ddp::Ddp<CandleModel<M, P>>;

    fn deref(&self) -> &Self::Target {
        &self.common
    }
}

impl<M, P: Parameters + Send + 'static> DerefMut for Ddp<M, P> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.common
    }
}

impl<M, P: Parameters + Send + 'static> fmt::Debug for Ddp<M, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.common.fmt(f)
    }
}

/// A [`Ddp`] that adds gradients up without averaging; see [`Ddp::no_sync`].
#[derive(Debug)]
pub struct NoSync<'a, M, P: Parameters + Send + 'static = Vars> {
    ddp: &'a mut Ddp<M, P>,
    before: Sync,
}

impl<M, P: Parameters + Send + 'static> Deref for NoSync<'_, M, P> {
    type Target = Ddp<M, P>;

    fn deref(&self) -> &Ddp<M, P> {
        self.ddp
    }
}

impl<M, P: Parameters + Send + 'static> DerefMut for NoSync<'_, M, P> {
    fn deref_mut(&mut self) -> &mut Ddp<M, P> {
        self.ddp
    }
}

impl<M, P: Parameters + Send + 'static> Drop for NoSync<'_, M, P> {
    fn drop(&mut self) {
        self.ddp.common.set_sync(self.before);
    }
}
