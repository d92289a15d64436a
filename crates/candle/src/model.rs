//! A candle model as the replica that `phalanx-ddp` trains.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result as CandleResult, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use parking_lot::Mutex;
use phalanx_ddp::{Averaged, Error, GradSink, Replica, Result, Tensor as Place, TensorSpec};
use phalanx_reducer::ParamSpec;

use crate::parameters::{Parameters, Wanted, unheard_of};
use crate::values::{self, dtype_of, failed};

/// Tensors whose names end like this are not trained but change in training.
const BUFFERS: [&str; 2] = ["running_mean", "running_var"];

type Build<M> = Box<dyn Fn(VarBuilder<'_>) -> CandleResult<M> + Send>;

/// A candle model on its way through [`Ddp`](crate::Ddp): the plain one, and during a pass one
/// whose parameters are behind gates. Of use to whoever needs the common parts of `phalanx-ddp`.
pub struct CandleModel<M, P> {
    build: Build<M>,
    dtype: DType,
    plain: M,
    /// Of the pass that is open, if its tensors are others than the plain model's.
    gated: Option<M>,
    parameters: Arc<Mutex<P>>,
    catalog: Arc<Catalog>,
}

/// The tensors that a model asked for when it was first built, in that order.
#[derive(Debug, Clone, Default)]
struct Catalog {
    tensors: Vec<(Place, Tensor)>,
    by_name: HashMap<String, usize>,
    parameters: Vec<ParamSpec>,
    buffers: Vec<TensorSpec>,
}

impl<M, P: Parameters + Send + 'static> CandleModel<M, P> {
    pub(crate) fn new(
        parameters: P,
        dtype: DType,
        build: impl Fn(VarBuilder<'_>) -> CandleResult<M> + Send + 'static,
    ) -> Result<Self> {
        let parameters = Arc::new(Mutex::new(parameters));
        let recorder = Recorder {
            parameters: Arc::clone(&parameters),
            catalog: Arc::default(),
        };
        let catalog = Arc::clone(&recorder.catalog);
        let builder = VarBuilder::from_backend(Box::new(recorder), dtype, Device::Cpu);
        let plain = build(builder).map_err(failed)?;
        let catalog = catalog.lock().clone();
        Ok(Self {
            build: Box::new(build),
            dtype,
            plain,
            gated: None,
            parameters,
            catalog: Arc::new(catalog),
        })
    }

    /// The model, without gates if they can be told apart.
    pub fn plain(&self) -> &M {
        &self.plain
    }

    pub(crate) fn for_forward(&self) -> &M {
        self.gated.as_ref().unwrap_or(&self.plain)
    }

    pub(crate) fn with_parameters<T>(&self, f: impl FnOnce(&P) -> T) -> T {
        f(&self.parameters.lock())
    }

    pub(crate) fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        let raw = loss.backward().map_err(failed)?;
        let parameters = self.parameters.lock();
        let mut names = self.catalog.parameters.iter().enumerate();
        let outside = names.find(|(index, _)| {
            parameters.outlet().takes(*index) && raw.get(self.catalog.parameter(*index)).is_some()
        });
        match outside {
            None => Ok(raw),
            Some((_, param)) => Err(Error::invalid(format!(
                "parameter {} was used outside Ddp::forward, so a part of its gradient would stay \
                 on this rank: compute all of the loss from the model that forward's closure gets",
                param.name
            ))),
        }
    }

    fn tensor(&self, place: Place) -> Result<&Tensor> {
        let mut tensors = self.catalog.tensors.iter();
        let found = tensors.find(|(other, _)| *other == place);
        let tensor = found.map(|(_, tensor)| tensor);
        tensor.ok_or_else(|| Error::frontend(format!("there is no {place:?}")))
    }
}

impl<M, P: Parameters + Send + 'static> Replica for CandleModel<M, P> {
    type Hooked = Self;
    type Raw = GradStore;
    type Grads = P::Grads;

    fn parameters(&self) -> Vec<ParamSpec> {
        self.catalog.parameters.clone()
    }

    fn buffers(&self) -> Vec<TensorSpec> {
        self.catalog.buffers.clone()
    }

    fn read(&self, tensor: Place, out: &mut [u8]) -> Result<()> {
        values::read(self.tensor(tensor)?, out)
    }

    fn write(&mut self, tensor: Place, data: &[u8]) -> Result<()> {
        values::write(self.tensor(tensor)?, data)
    }

    fn attach(&mut self, sink: GradSink) -> Result<()> {
        self.parameters.lock().outlet().open(sink);
        let gates = Gates {
            parameters: Arc::clone(&self.parameters),
            catalog: Arc::clone(&self.catalog),
            made: Mutex::default(),
        };
        if gates.has_any().map_err(failed)? {
            let builder = VarBuilder::from_backend(Box::new(gates), self.dtype, Device::Cpu);
            self.gated = Some((self.build)(builder).map_err(failed)?);
        }
        Ok(())
    }

    fn hooked(&mut self) -> &mut Self {
        self
    }

    fn detach(&mut self) {
        self.gated = None;
        self.parameters.lock().outlet().close();
    }

    fn install(&mut self, raw: GradStore, averaged: &Averaged) -> Result<P::Grads> {
        let indices = 0..self.catalog.parameters.len();
        let made: Vec<&Tensor> = indices.map(|index| self.catalog.parameter(index)).collect();
        self.parameters.lock().install(&made, raw, averaged)
    }
}

impl<M, P> fmt::Debug for CandleModel<M, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, parameters) = (std::any::type_name::<M>(), self.catalog.parameters.len());
        write!(f, "CandleModel({name}, {parameters} parameters)")
    }
}

impl Catalog {
    fn get(&self, name: &str) -> Option<&(Place, Tensor)> {
        self.by_name.get(name).map(|&index| &self.tensors[index])
    }

    fn parameter(&self, index: usize) -> &Tensor {
        let mut tensors = self.tensors.iter();
        let found = tensors.find(|(place, _)| *place == Place::Parameter(index));
        &found.expect("parameters are counted from zero").1
    }

    fn enter(&mut self, name: &str, place: Place, tensor: Tensor) -> Result<()> {
        let (shape, dtype) = (tensor.dims().to_vec(), dtype_of(tensor.dtype())?);
        let name = name.to_owned();
        match place {
            Place::Buffer(_) => self.buffers.push(TensorSpec {
                name: name.clone(),
                shape,
                dtype,
            }),
            _ => self.parameters.push(ParamSpec::new(&name, shape, dtype)),
        }
        self.by_name.insert(name, self.tensors.len());
        self.tensors.push((place, tensor));
        Ok(())
    }
}

fn is_buffer(name: &str, dtype: DType) -> bool {
    !dtype.is_float() || BUFFERS.iter().any(|end| name.ends_with(end))
}

/// Notes what a model asks for.
struct Recorder<P> {
    parameters: Arc<Mutex<P>>,
    catalog: Arc<Mutex<Catalog>>,
}

impl<P: Parameters + Send> SimpleBackend for Recorder<P> {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> CandleResult<Tensor> {
        let mut catalog = self.catalog.lock();
        if let Some((_, tensor)) = catalog.get(name) {
            return same_shape(name, tensor, &shape);
        }
        let wanted = Wanted {
            shape,
            init,
            dtype,
            device,
        };
        let mut parameters = self.parameters.lock();
        let (place, tensor) = match is_buffer(name, dtype) {
            true => {
                let place = Place::Buffer(catalog.buffers.len());
                (place, parameters.make_buffer(name, wanted)?)
            }
            false => {
                let index = catalog.parameters.len();
                (
                    Place::Parameter(index),
                    parameters.make(index, name, wanted)?,
                )
            }
        };
        let entered = catalog.enter(name, place, tensor.clone());
        entered.map_err(candle_core::Error::wrap)?;
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> CandleResult<Tensor> {
        candle_core::bail!("the shape of {name} has to be known: use `get`");
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.catalog.lock().get(name).is_some() || self.parameters.lock().has(name)
    }
}

/// Gives the model its tensors again, parameters behind gates.
struct Gates<P> {
    parameters: Arc<Mutex<P>>,
    catalog: Arc<Catalog>,
    /// One gate for all who ask for a parameter.
    made: Mutex<HashMap<usize, Tensor>>,
}

impl<P: Parameters> Gates<P> {
    /// Whether the model has to be built anew to get them.
    fn has_any(&self) -> CandleResult<bool> {
        for index in 0..self.catalog.parameters.len() {
            if self.gate(index, self.catalog.parameter(index))?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn gate(&self, index: usize, tensor: &Tensor) -> CandleResult<Option<Tensor>> {
        let mut made = self.made.lock();
        if let Some(gated) = made.get(&index) {
            return Ok(Some(gated.clone()));
        }
        let gated = self.parameters.lock().gated(index, tensor)?;
        made.extend(gated.clone().map(|gated| (index, gated)));
        Ok(gated)
    }
}

impl<P: Parameters + Send> SimpleBackend for Gates<P> {
    fn get(&self, shape: Shape, name: &str, _: Init, _: DType, _: &Device) -> CandleResult<Tensor> {
        let Some((place, tensor)) = self.catalog.get(name) else {
            return Err(candle_core::Error::wrap(unheard_of(name)));
        };
        let tensor = same_shape(name, tensor, &shape)?;
        match place {
            Place::Parameter(index) => Ok(self.gate(*index, &tensor)?.unwrap_or(tensor)),
            _ => Ok(tensor),
        }
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> CandleResult<Tensor> {
        candle_core::bail!("the shape of {name} has to be known: use `get`");
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.catalog.get(name).is_some()
    }
}

fn same_shape(name: &str, tensor: &Tensor, wanted: &Shape) -> CandleResult<Tensor> {
    if tensor.shape() != wanted {
        candle_core::bail!(
            "{name} is {:?}, and {wanted:?} is asked for",
            tensor.shape()
        );
    }
    Ok(tensor.clone())
}
