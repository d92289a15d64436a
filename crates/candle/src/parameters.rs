//! How a model's parameters are kept.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result as CandleResult, Shape, Tensor};
use candle_nn::{Init, VarMap};
use phalanx_ddp::{Averaged, Error, Result};

use crate::gate::{CopyGate, Outlet};
use crate::values::failed;

/// How parameters are kept, and where gates stand: [`Vars`] or [`InPlace`](crate::InPlace).
pub trait Parameters {
    /// What an optimizer takes.
    type Grads;

    /// Whether there is a value for a name before the model asks for it.
    fn has(&self, name: &str) -> bool;

    /// Makes a parameter, the `index`-th: when the model is first built.
    fn make(&mut self, index: usize, name: &str, wanted: Wanted<'_>) -> CandleResult<Tensor>;

    /// Makes a tensor that is not trained.
    fn make_buffer(&mut self, name: &str, wanted: Wanted<'_>) -> CandleResult<Tensor>;

    /// A parameter as its users get it in a pass, if that is another tensor than the one made.
    fn gated(&self, index: usize, made: &Tensor) -> CandleResult<Option<Tensor>>;

    /// Where gates hand in gradients.
    fn outlet(&self) -> &Outlet;

    /// Puts averages in the place of what backward has left.
    fn install(&self, made: &[&Tensor], raw: GradStore, averaged: &Averaged)
    -> Result<Self::Grads>;
}

/// What a model asks for.
#[derive(Debug, Clone)]
pub struct Wanted<'a> {
    /// Dimensions.
    pub shape: Shape,
    /// First values.
    pub init: Init,
    /// Type of the elements.
    pub dtype: DType,
    /// Where.
    pub device: &'a Device,
}

/// Parameters as `Var`s in a `VarMap`, for candle's own optimizers; copied once per pass.
pub struct Vars {
    map: VarMap,
    outlet: Outlet,
}

impl Vars {
    pub(crate) fn new(map: &VarMap) -> Self {
        Self {
            map: map.clone(),
            outlet: Outlet::default(),
        }
    }

    /// The map.
    pub fn map(&self) -> &VarMap {
        &self.map
    }
}

impl std::fmt::Debug for Vars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Vars({})", self.map.all_vars().len())
    }
}

impl Parameters for Vars {
    type Grads = GradStore;

    fn has(&self, name: &str) -> bool {
        let map = self.map.data().lock();
        map.is_ok_and(|map| map.contains_key(name))
    }

    fn make(&mut self, _: usize, name: &str, wanted: Wanted<'_>) -> CandleResult<Tensor> {
        self.make_buffer(name, wanted)
    }

    fn make_buffer(&mut self, name: &str, wanted: Wanted<'_>) -> CandleResult<Tensor> {
        let Wanted {
            shape,
            init,
            dtype,
            device,
        } = wanted;
        self.map.get(shape, name, init, dtype, device)
    }

    fn gated(&self, index: usize, made: &Tensor) -> CandleResult<Option<Tensor>> {
        if !self.outlet.takes(index) {
            return Ok(None);
        }
        let gate = CopyGate {
            parameter: index,
            outlet: self.outlet.clone(),
        };
        made.apply_op1(gate).map(Some)
    }

    fn outlet(&self) -> &Outlet {
        &self.outlet
    }

    fn install(
        &self,
        made: &[&Tensor],
        mut raw: GradStore,
        averaged: &Averaged,
    ) -> Result<GradStore> {
        for (index, tensor) in made.iter().enumerate() {
            let Some(grad) = averaged.dense(index) else {
                continue;
            };
            let bytes = grad.as_bytes()?;
            let (dtype, device) = (tensor.dtype(), tensor.device());
            let grad = Tensor::from_raw_buffer(bytes, dtype, tensor.dims(), device);
            raw.insert(tensor, grad.map_err(failed)?);
        }
        Ok(raw)
    }
}

/// What candle says of a tensor that was not there when the model was first built.
pub(crate) fn unheard_of(name: &str) -> Error {
    Error::frontend(format!(
        "the model asks for {name}, and did not when it was first built: a model is built anew in \
         every pass, and has to ask for the same tensors each time"
    ))
}
