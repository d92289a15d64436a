//! A burn module as the replica that `phalanx-ddp` trains.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{AllocationProperty, Bytes, Device, Gradients, Tensor, TensorData};
use parking_lot::Mutex;
use phalanx_ddp::{Averaged, Error, GradSink, Replica, Result, Tensor as Place, TensorSpec};
use phalanx_reducer::{GradRef, ParamSpec};

use crate::gate::{Anchors, Gates};
use crate::inventory::Inventory;
use crate::values::{self, changed};

/// A burn module on its way through [`Ddp`](crate::Ddp): the plain one, and during a pass its clone
/// with gates. Of use to whoever needs the common parts of `phalanx-ddp`; see
/// [`Ddp`](crate::Ddp)'s `Deref`.
pub struct BurnModel<M> {
    /// Missing only while an update runs.
    plain: Option<M>,
    gated: Option<M>,
    /// Of the pass that is open.
    gates: Option<Arc<Gates>>,
    /// Second handles on the averages of the last pass. burn writes to a tensor that it alone has,
    /// which here would mean to copy it first; it reads one that is shared and writes the result
    /// elsewhere, which is half the work.
    shared: Vec<Box<dyn Any + Send>>,
    anchors: Arc<Mutex<Anchors>>,
    inventory: Arc<Inventory>,
}

impl<M: Module> BurnModel<M> {
    pub(crate) fn new(model: M) -> Self {
        let inventory = Arc::new(Inventory::of(&model));
        Self {
            plain: Some(model),
            gated: None,
            gates: None,
            shared: Vec::new(),
            anchors: Arc::default(),
            inventory,
        }
    }

    /// The module, without gates.
    ///
    /// # Panics
    ///
    /// If an update has panicked: it took the module with it.
    pub fn plain(&self) -> &M {
        self.plain.as_ref().expect("an update has lost the model")
    }

    pub(crate) fn into_plain(self) -> M {
        self.plain.expect("an update has lost the model")
    }

    /// What forward runs on: with gates while a pass is open.
    pub(crate) fn for_forward(&self) -> &M {
        self.gated.as_ref().unwrap_or_else(|| self.plain())
    }

    /// Changes the module. If a pass is open, coming forwards of it see the change.
    pub(crate) fn update(&mut self, f: impl FnOnce(M) -> M) {
        let model = f(self.plain.take().expect("an update has lost the model"));
        self.plain = Some(match self.inventory.has_tied {
            true => model.map(&mut Retie::new(&self.inventory.floats)),
            false => model,
        });
        if let Some(gates) = self.gates.clone() {
            self.gated = Some(self.gate(&gates).0);
        }
    }

    fn gate(&self, gates: &Arc<Gates>) -> (M, Result<()>) {
        let mut gating = Gating {
            inventory: &self.inventory,
            position: 0,
            gates,
            tied: HashMap::new(),
            result: Ok(()),
        };
        let gated = self.plain().clone().map(&mut gating);
        let whole = gating.position == self.inventory.floats.len();
        (
            gated,
            gating
                .result
                .and(if whole { Ok(()) } else { Err(changed()) }),
        )
    }

    /// Runs backward, and finds out whether a parameter has got a gradient past its gate.
    pub(crate) fn backward(&mut self, f: impl FnOnce() -> Gradients) -> Result<Gradients> {
        // Nothing may hold on to what backward consumes.
        self.gated = None;
        let raw = f();
        let Some(gates) = &self.gates else {
            return Ok(raw);
        };
        let mut search = Outside {
            inventory: &self.inventory,
            position: 0,
            gates,
            raw: &raw,
            found: None,
        };
        self.plain().visit(&mut search);
        match search.found {
            None => Ok(raw),
            Some(name) => Err(Error::invalid(format!(
                "parameter {name} was used outside Ddp::forward, so a part of its gradient would \
                 stay on this rank: compute all of the loss from the model that forward's closure \
                 gets"
            ))),
        }
    }

    /// Takes over what forwards have left to be averaged over threads, which otherwise happens one
    /// forward later and over whatever is written in between.
    fn settle_running_states(&self, places: impl IntoIterator<Item = Place>) {
        let mut places = places.into_iter();
        if places.any(|place| matches!(place, Place::Buffer(_))) {
            drop(self.plain().valid());
        }
    }
}

impl<M: Module> Replica for BurnModel<M> {
    type Hooked = Self;
    type Raw = Gradients;
    type Grads = GradientsParams;

    fn check(&self) -> Result<()> {
        self.inventory.problem.clone().map_or(Ok(()), Err)
    }

    fn parameters(&self) -> Vec<ParamSpec> {
        self.inventory.parameters.clone()
    }

    fn frozen(&self) -> Vec<TensorSpec> {
        self.inventory.frozen.clone()
    }

    fn buffers(&self) -> Vec<TensorSpec> {
        self.inventory.buffers.clone()
    }

    fn read(&self, tensor: Place, out: &mut [u8]) -> Result<()> {
        self.read_all(&mut [(tensor, out)])
    }

    fn read_all(&self, tensors: &mut [(Place, &mut [u8])]) -> Result<()> {
        self.settle_running_states(tensors.iter().map(|(place, _)| *place));
        values::read(self.plain(), &self.inventory, tensors)
    }

    fn write(&mut self, tensor: Place, data: &[u8]) -> Result<()> {
        self.write_all(&[(tensor, data)])
    }

    fn write_all(&mut self, tensors: &[(Place, &[u8])]) -> Result<()> {
        self.settle_running_states(tensors.iter().map(|(place, _)| *place));
        let inventory = Arc::clone(&self.inventory);
        let mut result = Ok(());
        self.update(|model| {
            let (model, written) = values::write(model, &inventory, tensors);
            result = written;
            model
        });
        result
    }

    fn attach(&mut self, sink: GradSink) -> Result<()> {
        // The pass is about to write to the buckets.
        self.shared.clear();
        let gates = Gates::new(sink, Arc::clone(&self.anchors));
        let (gated, result) = self.gate(&gates);
        self.gated = Some(gated);
        self.gates = Some(gates);
        result
    }

    fn hooked(&mut self) -> &mut Self {
        self
    }

    fn detach(&mut self) {
        self.gated = None;
        self.gates = None;
    }

    fn install(&mut self, raw: Gradients, averaged: &Averaged) -> Result<GradientsParams> {
        let mut installer = Installer {
            places: self.inventory.floats.iter(),
            averaged,
            raw,
            grads: GradientsParams::new(),
            shared: Vec::new(),
            result: Ok(()),
        };
        self.plain().visit(&mut installer);
        installer.result?;
        self.shared = installer.shared;
        Ok(installer.grads)
    }
}

impl<M> fmt::Debug for BurnModel<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, parameters) = (std::any::type_name::<M>(), self.inventory.parameters.len());
        write!(f, "BurnModel({name}, {parameters} parameters)")
    }
}

/// Puts gates before parameters. Each is made when forward first asks for its parameter, which is
/// when it can be anchored above everything that forward has done until then.
struct Gating<'a> {
    inventory: &'a Inventory,
    position: usize,
    gates: &'a Arc<Gates>,
    /// Parameters that have a gate; a clone shares it.
    tied: HashMap<usize, Box<dyn Any>>,
    result: Result<()>,
}

impl Gating<'_> {
    fn behind_gate<const D: usize>(
        &mut self,
        parameter: usize,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        let known = self.tied.get(&parameter);
        if let Some(gated) = known.and_then(|known| known.downcast_ref::<Param<Tensor<D>>>()) {
            return gated.clone();
        }
        let (id, leaf, _) = param.consume();
        let (device, shape) = (leaf.device(), leaf.shape());
        let gates = Arc::clone(self.gates);
        let pass = move |_: &Device, _: bool| gates.pass(parameter, leaf);
        let gated = Param::uninitialized(id, pass, device, true, shape);
        if self.inventory.has_tied {
            self.tied.insert(parameter, Box::new(gated.clone()));
        }
        gated
    }
}

impl ModuleMapper for Gating<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let place = self.inventory.floats.get(self.position).copied();
        self.position += 1;
        let needs_grad = param.is_require_grad();
        match place {
            Some(Place::Parameter(parameter)) if needs_grad && self.gates.takes(parameter) => {
                self.behind_gate(parameter, param)
            }
            Some(Place::Frozen(frozen)) if needs_grad && self.result.is_ok() => {
                let name = &self.inventory.frozen[frozen].name;
                self.result = Err(Error::invalid(format!(
                    "{name} needs a gradient now and did not when Ddp was made; make a new Ddp \
                     after changing what is trained"
                )));
                param
            }
            _ => param,
        }
    }
}

/// Looks for parameters that have a gate and a gradient too.
struct Outside<'a> {
    inventory: &'a Inventory,
    position: usize,
    gates: &'a Gates,
    raw: &'a Gradients,
    found: Option<String>,
}

impl ModuleVisitor for Outside<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let place = self.inventory.floats.get(self.position);
        self.position += 1;
        if let Some(&Place::Parameter(parameter)) = place
            && self.found.is_none()
            && self.gates.takes(parameter)
            && param.base().grad(self.raw).is_some()
        {
            self.found = Some(self.inventory.parameters[parameter].name.clone());
        }
    }
}

/// Puts averages where burn's optimizers look for gradients, as views of the buckets.
struct Installer<'a> {
    places: std::slice::Iter<'a, Place>,
    averaged: &'a Averaged,
    raw: Gradients,
    grads: GradientsParams,
    shared: Vec<Box<dyn Any + Send>>,
    result: Result<()>,
}

impl ModuleVisitor for Installer<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&Place::Parameter(parameter)) = self.places.next() else {
            return;
        };
        let leaf = param.base();
        let grad = match self.averaged.covers(parameter) {
            true => self.averaged.dense(parameter).map(|grad| view(grad, &leaf)),
            // It is on the ignore list: this rank's own.
            false => leaf.grad_remove(&mut self.raw).map(Ok),
        };
        match grad.transpose() {
            Ok(Some(grad)) => {
                self.shared.push(Box::new(grad.clone()));
                self.grads.register(param.id, grad);
            }
            Ok(None) => {}
            Err(err) => self.result = Err(err),
        }
    }
}

/// A tensor in the memory of a bucket. burn copies before it writes to it, and as long as anybody
/// has it, the reducer does not use the bucket again.
fn view<const D: usize>(grad: GradRef, leaf: &Tensor<D>) -> Result<Tensor<D>> {
    grad.as_bytes()?;
    let bytes = bytes::Bytes::from_owner(View(grad));
    let bytes = Bytes::from_shared(bytes, AllocationProperty::Other);
    let data = TensorData::from_bytes(bytes, leaf.shape(), leaf.dtype());
    let device = leaf.device().without_autodiff();
    Ok(Tensor::from_data(data, (&device, leaf.dtype())))
}

struct View(GradRef);

impl AsRef<[u8]> for View {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes().expect("looked at before, in host memory")
    }
}

/// Gives all fields that share a parameter its value: burn's optimizers change the first only.
struct Retie<'a> {
    places: std::slice::Iter<'a, Place>,
    known: HashMap<Place, Box<dyn Any>>,
}

impl<'a> Retie<'a> {
    fn new(places: &'a [Place]) -> Self {
        Self {
            places: places.iter(),
            known: HashMap::new(),
        }
    }
}

impl ModuleMapper for Retie<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(&place) = self.places.next() else {
            return param;
        };
        let known = self.known.get(&place);
        if let Some(first) = known.and_then(|known| known.downcast_ref::<Param<Tensor<D>>>()) {
            return first.clone();
        }
        self.known.insert(place, Box::new(param.clone()));
        param
    }
}
