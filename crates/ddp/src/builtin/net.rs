//! Layers in a row.

use std::sync::Arc;

use phalanx_pg::{Buffer, DType, Device, ProcessGroup};
use phalanx_reducer::{Grad, GradRef, GradView, ParamSpec};

use super::layer::{self, Bag, Input, Layer, Linear, MOMENTUM, Saved};
use super::matrix::Matrix;
use crate::error::{Error, Result};
use crate::replica::{Averaged, GradSink, Replica, Tensor, TensorSpec};

/// A model of a few layers, one after the other.
///
/// Parameters have PyTorch's names, shapes and order: `fc1.weight`, `fc1.bias`.
#[derive(Debug, Clone)]
pub struct Net {
    layers: Vec<Layer>,
    params: Vec<Param>,
    buffers: Vec<(TensorSpec, Values)>,
    /// Makes initial values.
    seed: u64,
    training: bool,
    sink: Option<GradSink>,
    /// By layer, from the last forward in training.
    tape: Vec<Saved>,
    /// Copies gradients to the device and back, if they are to be there.
    courier: Option<Arc<dyn ProcessGroup>>,
}

#[derive(Debug, Clone)]
struct Param {
    spec: ParamSpec,
    values: Vec<f32>,
}

#[derive(Debug, Clone)]
enum Values {
    Floats(Vec<f32>),
    Count(i64),
}

/// The gradients of a backward, by parameter.
#[derive(Debug, Default)]
pub struct Gradients(pub(crate) Vec<Option<Gradient>>);

/// One parameter's gradient.
#[derive(Debug, Clone)]
pub enum Gradient {
    /// In memory of its own.
    Dense(Vec<f32>),
    /// In a bucket.
    View(GradRef),
    /// Rows of the first dimension.
    Sparse {
        /// Which rows; one may occur more than once.
        rows: Vec<i64>,
        /// Their values.
        values: Vec<f32>,
    },
}

impl Gradients {
    /// A parameter's gradient, if it has one.
    pub fn get(&self, parameter: usize) -> Option<&Gradient> {
        self.0.get(parameter)?.as_ref()
    }

    /// A parameter's gradient as all its elements, also if it is sparse.
    pub fn dense(&self, parameter: usize, spec: &ParamSpec) -> Option<Vec<f32>> {
        Some(match self.get(parameter)? {
            Gradient::Dense(values) => values.clone(),
            Gradient::View(view) => view.as_slice().expect("f32 in host memory").to_vec(),
            Gradient::Sparse { rows, values } => {
                let mut all = vec![0.0; spec.len()];
                let width = spec.row_len();
                for (&row, values) in rows.iter().zip(values.chunks_exact(width.max(1))) {
                    let all = all[row as usize * width..][..width].iter_mut();
                    all.zip(values).for_each(|(all, value)| *all += value);
                }
                all
            }
        })
    }
}

impl Net {
    /// No layers; `seed` makes the initial values of those to come.
    pub fn new(seed: u64) -> Self {
        Self {
            layers: Vec::new(),
            params: Vec::new(),
            buffers: Vec::new(),
            seed,
            training: true,
            sink: None,
            tape: Vec::new(),
            courier: None,
        }
    }

    /// `x W^T + b`.
    #[must_use]
    pub fn linear(mut self, name: &str, inputs: usize, outputs: usize) -> Self {
        let linear = self.add_linear(name, inputs, outputs);
        self.layers.push(Layer::Linear(linear));
        self
    }

    /// The positive part.
    #[must_use]
    pub fn relu(mut self) -> Self {
        self.layers.push(Layer::Relu);
        self
    }

    /// Sums or means of rows of a table; its gradient may be sparse. Takes [`Input::Bags`].
    #[must_use]
    pub fn embedding_bag(
        mut self,
        name: &str,
        rows: usize,
        dim: usize,
        bag: Bag,
        sparse: bool,
    ) -> Self {
        let spec = ParamSpec::new(format!("{name}.weight"), [rows, dim], DType::F32);
        let table = self.add(ParamSpec { sparse, ..spec }, 1.0);
        self.layers.push(Layer::EmbeddingBag { table, bag });
        self
    }

    /// Normalises each feature over the batch, and keeps running means and variances as buffers.
    #[must_use]
    pub fn batch_norm(mut self, name: &str, features: usize) -> Self {
        let mut add = |part: &str, value: f32| {
            let spec = ParamSpec::new(format!("{name}.{part}"), [features], DType::F32);
            let values = vec![value; features];
            self.params.push(Param { spec, values });
            self.params.len() - 1
        };
        let (weight, bias) = (add("weight", 1.0), add("bias", 0.0));
        let mut buffer = |part: &str, shape: Vec<usize>, dtype, values| {
            let name = format!("{name}.{part}");
            self.buffers
                .push((TensorSpec { name, shape, dtype }, values));
            self.buffers.len() - 1
        };
        let floats = |value| Values::Floats(vec![value; features]);
        let mean = buffer("running_mean", vec![features], DType::F32, floats(0.0));
        let var = buffer("running_var", vec![features], DType::F32, floats(1.0));
        let count = buffer("num_batches_tracked", vec![], DType::I64, Values::Count(0));
        self.layers.push(Layer::BatchNorm {
            weight,
            bias,
            mean,
            var,
            count,
        });
        self
    }

    /// `x + linear(x)`, which [`set_branch`](Net::set_branch) switches off: then its parameters
    /// are unused.
    #[must_use]
    pub fn branch(mut self, name: &str, features: usize) -> Self {
        let linear = self.add_linear(name, features, features);
        self.layers.push(Layer::Branch {
            linear,
            name: name.to_owned(),
            active: true,
        });
        self
    }

    /// Switches a branch on or off.
    pub fn set_branch(&mut self, branch: &str, on: bool) {
        for layer in &mut self.layers {
            if let Layer::Branch { name, active, .. } = layer
                && name == branch
            {
                *active = on;
            }
        }
    }

    /// Whether batch norms use the batch and backward is to follow.
    pub fn set_training(&mut self, training: bool) {
        self.training = training;
    }

    /// Hands dense gradients over in device memory of `group`'s, to try a backend for devices with
    /// a model that needs no framework. They are still computed on the host.
    #[must_use]
    pub fn with_gradients_on(mut self, device: Device, group: Arc<dyn ProcessGroup>) -> Self {
        let dense = self.params.iter_mut().filter(|param| !param.spec.sparse);
        dense.for_each(|param| param.spec.device = device);
        self.courier = Some(group);
        self
    }

    fn add_linear(&mut self, name: &str, inputs: usize, outputs: usize) -> Linear {
        let bound = 1.0 / (inputs.max(1) as f32).sqrt();
        let weight = ParamSpec::new(format!("{name}.weight"), [outputs, inputs], DType::F32);
        let bias = ParamSpec::new(format!("{name}.bias"), [outputs], DType::F32);
        Linear {
            weight: self.add(weight, bound),
            bias: self.add(bias, bound),
        }
    }

    fn add(&mut self, spec: ParamSpec, bound: f32) -> usize {
        let values = (0..spec.len()).map(|_| bound * self.random()).collect();
        self.params.push(Param { spec, values });
        self.params.len() - 1
    }

    /// Between -1 and 1: the upper bits of a linear congruential generator.
    fn random(&mut self) -> f32 {
        self.seed = self
            .seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// A parameter's values, by index.
    pub fn values(&self, parameter: usize) -> &[f32] {
        &self.params[parameter].values
    }

    /// A parameter's values, writable.
    pub fn values_mut(&mut self, parameter: usize) -> &mut [f32] {
        &mut self.params[parameter].values
    }

    /// What parameters there are, by index.
    pub fn specs(&self) -> impl Iterator<Item = &ParamSpec> {
        self.params.iter().map(|param| &param.spec)
    }

    /// The output for a batch.
    ///
    /// # Panics
    ///
    /// If the input does not fit the first layer.
    pub fn forward(&mut self, input: &Input) -> Matrix {
        let mut tape = Vec::with_capacity(self.layers.len());
        let mut x = match input {
            Input::Dense(matrix) => matrix.clone(),
            Input::Bags { .. } => Matrix::zeros(0, 0),
        };
        for layer in self.layers.clone() {
            let (out, saved) = self.forward_layer(&layer, x, input);
            tape.push(saved);
            x = out;
        }
        if self.training {
            self.tape = tape;
        }
        x
    }

    fn forward_layer(&mut self, layer: &Layer, x: Matrix, input: &Input) -> (Matrix, Saved) {
        match *layer {
            Layer::Linear(Linear { weight, bias }) => {
                let out = layer::linear(&x, self.values(weight), self.values(bias));
                (out, Saved::Input(x))
            }
            Layer::Relu => (layer::relu(&x), Saved::Input(x)),
            Layer::Branch { active: false, .. } => (x, Saved::Nothing),
            Layer::Branch { linear, .. } => {
                let mut out =
                    layer::linear(&x, self.values(linear.weight), self.values(linear.bias));
                out.data_mut()
                    .iter_mut()
                    .zip(x.data())
                    .for_each(|(out, x)| *out += x);
                (out, Saved::Input(x))
            }
            Layer::EmbeddingBag { table, bag } => {
                let Input::Bags { indices, offsets } = input else {
                    panic!("an embedding bag takes bags of indices");
                };
                let dim = self.params[table].spec.row_len();
                let out = layer::embedding_bag(self.values(table), dim, bag, indices, offsets);
                (out, Saved::Bags(indices.clone(), offsets.clone()))
            }
            Layer::BatchNorm {
                weight,
                bias,
                mean,
                var,
                count,
            } => {
                let (normal, inverse) = match self.training {
                    true => {
                        let (batch_mean, batch_var) = layer::moments(&x);
                        self.track(&x, (mean, &batch_mean), (var, &batch_var), count);
                        layer::normalize(&x, &batch_mean, &batch_var)
                    }
                    false => layer::normalize(&x, self.running(mean), self.running(var)),
                };
                let out = layer::scale_shift(&normal, self.values(weight), self.values(bias));
                (out, Saved::Norm(normal, inverse))
            }
        }
    }

    fn running(&self, buffer: usize) -> &[f32] {
        match &self.buffers[buffer].1 {
            Values::Floats(values) => values,
            Values::Count(_) => unreachable!("a count has no floats"),
        }
    }

    fn track(&mut self, x: &Matrix, mean: (usize, &[f32]), var: (usize, &[f32]), count: usize) {
        let n = x.rows() as f32;
        let unbiased = if n > 1.0 { n / (n - 1.0) } else { 1.0 };
        for ((buffer, batch), factor) in [(mean, 1.0), (var, unbiased)] {
            if let Values::Floats(running) = &mut self.buffers[buffer].1 {
                for (running, batch) in running.iter_mut().zip(batch) {
                    *running = *running * (1.0 - MOMENTUM) + batch * factor * MOMENTUM;
                }
            }
        }
        if let Values::Count(count) = &mut self.buffers[count].1 {
            *count += 1;
        }
    }

    /// Goes back through the last forward, from the gradient of its output. Each layer's
    /// gradients are handed over as soon as they are computed, if somebody takes them.
    pub fn backward(&mut self, grad: &Matrix) -> Gradients {
        let mut gradients = Gradients((0..self.params.len()).map(|_| None).collect());
        let mut grad = grad.clone();
        let tape = std::mem::take(&mut self.tape);
        for (layer, saved) in self.layers.iter().zip(tape).rev() {
            grad = self.backward_layer(layer, saved, grad, &mut gradients);
        }
        gradients
    }

    fn backward_layer(
        &self,
        layer: &Layer,
        saved: Saved,
        grad: Matrix,
        out: &mut Gradients,
    ) -> Matrix {
        match (layer, saved) {
            (Layer::Linear(linear), Saved::Input(x)) => self.linear_back(*linear, &x, &grad, out),
            (Layer::Relu, Saved::Input(x)) => layer::relu_back(&x, &grad),
            (Layer::Branch { linear, .. }, Saved::Input(x)) => {
                let mut through = self.linear_back(*linear, &x, &grad, out);
                let both = through.data_mut().iter_mut().zip(grad.data());
                both.for_each(|(through, grad)| *through += grad);
                through
            }
            (Layer::EmbeddingBag { table, bag }, Saved::Bags(indices, offsets)) => {
                let (rows, values) = layer::embedding_bag_back(&grad, *bag, &indices, &offsets);
                let gradient = Gradient::Sparse { rows, values };
                self.hand_over(*table, gradient, out);
                Matrix::zeros(0, 0)
            }
            (Layer::BatchNorm { weight, bias, .. }, Saved::Norm(normal, inverse)) => {
                let scale = self.values(*weight);
                let (back, grad_weight, grad_bias) =
                    layer::batch_norm_back(&normal, &inverse, scale, &grad);
                self.hand_over(*weight, Gradient::Dense(grad_weight), out);
                self.hand_over(*bias, Gradient::Dense(grad_bias), out);
                back
            }
            _ => grad,
        }
    }

    fn linear_back(
        &self,
        linear: Linear,
        x: &Matrix,
        grad: &Matrix,
        out: &mut Gradients,
    ) -> Matrix {
        self.hand_over(linear.bias, Gradient::Dense(grad.column_sums()), out);
        self.hand_over(
            linear.weight,
            Gradient::Dense(grad.transposed_times(x)),
            out,
        );
        grad.times(self.values(linear.weight), x.cols())
    }

    fn hand_over(&self, parameter: usize, gradient: Gradient, out: &mut Gradients) {
        let spec = &self.params[parameter].spec;
        let gradient = match gradient {
            sparse @ Gradient::Sparse { .. } if !spec.sparse => {
                let one = Gradients(vec![Some(sparse)]);
                Gradient::Dense(one.dense(0, spec).expect("just put in"))
            }
            other => other,
        };
        let Some(sink) = self.sink.as_ref().filter(|sink| sink.takes(parameter)) else {
            out.0[parameter] = Some(gradient);
            return;
        };
        // An error comes out of the end of the pass, where what could not be sent is missed.
        let _ = match gradient {
            Gradient::Dense(values) => match send(self.courier.as_deref(), spec, values) {
                Ok(buffer) => sink.grad_ready(parameter, buffer),
                Err(_) => return,
            },
            Gradient::Sparse { rows, values } => {
                sink.grad_ready(parameter, GradView::sparse(&rows, &values))
            }
            Gradient::View(_) => unreachable!("views come from the reducer"),
        };
    }
}

/// A gradient where its parameter is, which may be on a device.
fn send(
    group: Option<&dyn ProcessGroup>,
    spec: &ParamSpec,
    values: Vec<f32>,
) -> phalanx_pg::Result<Buffer> {
    let host = Buffer::from_vec(values);
    let Some(group) = group.filter(|_| spec.device != Device::Cpu) else {
        return Ok(host);
    };
    let mut buffer = group.allocate(spec.device, spec.dtype, host.len())?;
    group.copy(&host, 0..host.len(), &mut buffer, 0)?;
    Ok(buffer)
}

/// An average in memory of its own, on the host.
fn fetch(group: Option<&dyn ProcessGroup>, view: &GradRef) -> phalanx_pg::Result<Vec<f32>> {
    let (bucket, offset) = view.memory();
    match group {
        Some(group) if bucket.device() != Device::Cpu => {
            let mut host = Buffer::zeroed(DType::F32, view.len());
            group.copy(bucket, offset..offset + view.len(), &mut host, 0)?;
            host.to_vec()
        }
        _ => view.as_slice().map(<[f32]>::to_vec),
    }
}

impl Replica for Net {
    type Hooked = Net;
    type Raw = Gradients;
    type Grads = Gradients;

    fn parameters(&self) -> Vec<ParamSpec> {
        self.specs().cloned().collect()
    }

    fn buffers(&self) -> Vec<TensorSpec> {
        self.buffers.iter().map(|(spec, _)| spec.clone()).collect()
    }

    fn read(&self, tensor: Tensor, out: &mut [u8]) -> Result<()> {
        let bytes = match tensor {
            Tensor::Parameter(i) => bytemuck::cast_slice(&self.params[i].values),
            Tensor::Buffer(i) => match &self.buffers[i].1 {
                Values::Floats(values) => bytemuck::cast_slice(values),
                Values::Count(count) => bytemuck::bytes_of(count),
            },
            Tensor::Frozen(_) => return Err(Error::frontend("no parameter is frozen")),
        };
        out.copy_from_slice(bytes);
        Ok(())
    }

    fn write(&mut self, tensor: Tensor, data: &[u8]) -> Result<()> {
        let bytes = match tensor {
            Tensor::Parameter(i) => bytemuck::cast_slice_mut(&mut self.params[i].values),
            Tensor::Buffer(i) => match &mut self.buffers[i].1 {
                Values::Floats(values) => bytemuck::cast_slice_mut(values),
                Values::Count(count) => bytemuck::bytes_of_mut(count),
            },
            Tensor::Frozen(_) => return Err(Error::frontend("no parameter is frozen")),
        };
        bytes.copy_from_slice(data);
        Ok(())
    }

    fn attach(&mut self, sink: GradSink) -> Result<()> {
        self.sink = Some(sink);
        Ok(())
    }

    fn hooked(&mut self) -> &mut Net {
        self
    }

    fn detach(&mut self) {
        self.sink = None;
    }

    fn install(&mut self, mut raw: Gradients, averaged: &Averaged) -> Result<Gradients> {
        if !averaged.is_synchronized() {
            return Ok(raw);
        }
        for (parameter, gradient) in raw.0.iter_mut().enumerate() {
            if !averaged.covers(parameter) {
                continue;
            }
            *gradient = match averaged.grad(parameter) {
                None => None,
                // Whatever the options say: nobody writes to it, the reducer included.
                Some(Grad::Dense(view)) if self.courier.is_none() => Some(Gradient::View(view)),
                Some(Grad::Dense(view)) => {
                    Some(Gradient::Dense(fetch(self.courier.as_deref(), &view)?))
                }
                Some(Grad::Sparse(sparse)) => Some(Gradient::Sparse {
                    rows: sparse.indices.clone(),
                    values: sparse.values.to_vec()?,
                }),
            };
        }
        Ok(raw)
    }
}
