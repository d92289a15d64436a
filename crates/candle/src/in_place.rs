//! Parameters that are updated where they are, without a copy.

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, DType, Device, Result as CandleResult, Storage, Tensor, Var};
use parking_lot::Mutex;
use phalanx_ddp::{Averaged, Result};
use phalanx_reducer::GradRef;

use crate::gate::{Outlet, SourceGate};
use crate::parameters::{Parameters, Wanted};

/// Parameters that stay where they are: a pass copies neither them nor their averages.
///
/// They are the results of operations, not `Var`s, so candle's optimizers do not know them;
/// [`Sgd`](crate::Sgd) and [`AdamW`](crate::AdamW) do. [`tensors`](InPlace::tensors) has their values,
/// for checkpoints.
#[derive(Debug, Default)]
pub struct InPlace {
    outlet: Outlet,
    /// By index.
    parameters: Vec<(String, Tensor)>,
    buffers: Vec<(String, Var)>,
}

/// Averages as views of the buckets, by parameter; `None` where no rank has a gradient.
///
/// The reducer uses a bucket again only when no view of it is left: drop them after the update.
#[derive(Debug)]
pub struct Views(pub(crate) Vec<Option<GradRef>>);

impl Views {
    /// A parameter's average, by its index.
    pub fn get(&self, parameter: usize) -> Option<&GradRef> {
        self.0.get(parameter)?.as_ref()
    }
}

impl InPlace {
    /// Parameters and buffers by name: what `candle_core::safetensors::save` takes. They share
    /// memory with the model.
    pub fn tensors(&self) -> HashMap<String, Tensor> {
        let parameters = self.parameters.iter().cloned();
        let buffers = self.buffers.iter();
        let buffers = buffers.map(|(name, var)| (name.clone(), var.as_tensor().clone()));
        parameters
            .map(|(name, tensor)| (name, tensor.detach()))
            .chain(buffers)
            .collect()
    }

    /// The parameters, by index.
    pub fn parameters(&self) -> impl ExactSizeIterator<Item = (&str, &Tensor)> {
        self.parameters
            .iter()
            .map(|(name, tensor)| (&**name, tensor))
    }
}

impl Parameters for InPlace {
    type Grads = Views;

    fn has(&self, _: &str) -> bool {
        false
    }

    fn make(&mut self, index: usize, name: &str, wanted: Wanted<'_>) -> CandleResult<Tensor> {
        let values = wanted.init.var(wanted.shape, wanted.dtype, wanted.device)?;
        let gate = SourceGate {
            parameter: index,
            outlet: self.outlet.clone(),
            values: Mutex::new(Some((storage_of(&values)?, values.shape().clone()))),
        };
        // A number that is differentiated, so that backward comes as far as the gate.
        let source = Var::zeros((), DType::F32, &Device::Cpu)?;
        let parameter = source.apply_op1(gate)?;
        self.parameters.push((name.to_owned(), parameter.clone()));
        Ok(parameter)
    }

    fn make_buffer(&mut self, name: &str, wanted: Wanted<'_>) -> CandleResult<Tensor> {
        let var = wanted.init.var(wanted.shape, wanted.dtype, wanted.device)?;
        self.buffers.push((name.to_owned(), var.clone()));
        Ok(var.as_tensor().clone())
    }

    fn gated(&self, _: usize, _: &Tensor) -> CandleResult<Option<Tensor>> {
        Ok(None)
    }

    fn outlet(&self) -> &Outlet {
        &self.outlet
    }

    fn install(&self, made: &[&Tensor], _: GradStore, averaged: &Averaged) -> Result<Views> {
        let indices = 0..made.len();
        Ok(Views(indices.map(|index| averaged.dense(index)).collect()))
    }
}

fn storage_of(tensor: &Tensor) -> CandleResult<CpuStorage> {
    let (storage, _) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => Ok(storage.clone()),
        _ => candle_core::bail!("a parameter outside host memory"),
    }
}
