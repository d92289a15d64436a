//! What tensors a module has.

use std::collections::HashMap;

use burn::backend::Autodiff;
use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, DType, Device, Int, Shape, Tensor};
use phalanx_ddp::{Error, Result, Tensor as Place, TensorSpec};
use phalanx_reducer::ParamSpec;

use crate::values::dtype_of;

/// The tensors of a module, by what becomes of them, named by their paths.
///
/// burn's ids of parameters are random numbers, other ones in each process and after a record is
/// loaded. The order of a walk through the module is the order of its fields: the same everywhere.
#[derive(Debug, Default)]
pub(crate) struct Inventory {
    pub(crate) parameters: Vec<ParamSpec>,
    pub(crate) frozen: Vec<TensorSpec>,
    pub(crate) buffers: Vec<TensorSpec>,
    /// Tensors of floats by their position in a walk, others not counted. A parameter that occurs in
    /// several fields has several positions.
    pub(crate) floats: Vec<Place>,
    /// Tensors of integers and booleans by their position among themselves.
    pub(crate) others: Vec<Place>,
    /// Whether any does.
    pub(crate) has_tied: bool,
    /// The first tensor that cannot be dealt with.
    pub(crate) problem: Option<Error>,
}

impl Inventory {
    pub(crate) fn of<M: Module>(module: &M) -> Self {
        let found = walk(module);
        // Running states are shown like parameters that need no gradient, and never take one.
        let would_train = walk(&module.clone().set_require_grad(true));
        let mut inventory = Self::default();
        let mut known = HashMap::new();
        for (tensor, trainable) in found.into_iter().zip(would_train) {
            let (id, is_float) = (tensor.id, tensor.is_float);
            let entered = match known.get(&id) {
                Some(&place) => {
                    inventory.has_tied = true;
                    Ok(place)
                }
                None => inventory.enter(tensor, is_float && !trainable.needs_grad),
            };
            let place = match entered {
                Ok(place) => place,
                Err(err) => {
                    inventory.problem = Some(err);
                    break;
                }
            };
            known.insert(id, place);
            match is_float {
                true => inventory.floats.push(place),
                false => inventory.others.push(place),
            }
        }
        inventory
    }

    fn enter(&mut self, tensor: Found, is_buffer: bool) -> Result<Place> {
        let named = |err: Error| Error::frontend(format!("{}: {err}", tensor.name));
        let spec = TensorSpec {
            name: tensor.name.clone(),
            shape: tensor.shape.to_vec(),
            dtype: dtype_of(tensor.dtype).map_err(named)?,
        };
        if tensor.needs_grad {
            if !tensor.is_on_flex {
                return Err(Error::frontend(format!(
                    "parameter {} is on {:?}: gradients are taken on burn's Flex backend only, so \
                     put the model on Device::flex().autodiff()",
                    tensor.name, tensor.device
                )));
            }
            let param = ParamSpec::new(spec.name, spec.shape, spec.dtype);
            self.parameters.push(param);
            return Ok(Place::Parameter(self.parameters.len() - 1));
        }
        let (list, place): (_, fn(usize) -> Place) = match is_buffer {
            true => (&mut self.buffers, Place::Buffer),
            false => (&mut self.frozen, Place::Frozen),
        };
        list.push(spec);
        Ok(place(list.len() - 1))
    }
}

/// A tensor that a walk came by.
struct Found {
    id: ParamId,
    name: String,
    shape: Shape,
    dtype: DType,
    device: Device,
    is_float: bool,
    needs_grad: bool,
    is_on_flex: bool,
}

fn walk<M: Module>(module: &M) -> Vec<Found> {
    let mut walker = Walker::default();
    module.visit(&mut walker);
    walker.found
}

#[derive(Default)]
struct Walker {
    path: Vec<String>,
    found: Vec<Found>,
}

impl Walker {
    fn enter(&mut self, id: ParamId, shape: Shape, dtype: DType, device: Device) -> &mut Found {
        self.found.push(Found {
            id,
            name: self.path.join("."),
            shape,
            dtype,
            device,
            is_float: false,
            needs_grad: false,
            is_on_flex: false,
        });
        self.found.last_mut().expect("just put in")
    }
}

impl ModuleVisitor for Walker {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.base();
        let (shape, dtype, device) = (tensor.shape(), tensor.dtype(), tensor.device());
        let found = self.enter(param.id, shape, dtype, device);
        found.is_float = true;
        found.needs_grad = tensor.is_require_grad();
        let balanced = tensor.clone();
        found.is_on_flex = tensor.try_into_primitive::<Autodiff<Flex>>().is_ok()
            || balanced
                .try_into_primitive::<Autodiff<Flex, BalancedCheckpointing>>()
                .is_ok();
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let tensor = param.base();
        self.enter(param.id, tensor.shape(), tensor.dtype(), tensor.device());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let tensor = param.base();
        self.enter(param.id, tensor.shape(), tensor.dtype(), tensor.device());
    }
}
