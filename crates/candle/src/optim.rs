//! Optimizers for parameters that stay where they are.

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, WithDType};
use parking_lot::Mutex;
use phalanx_pg::Element;
use phalanx_reducer::GradRef;

use crate::in_place::{InPlace, Views};

/// Stochastic gradient descent with momentum, as PyTorch computes it, for [`InPlace`]. Computes with
/// 32 bits.
#[derive(Debug)]
pub struct Sgd {
    lr: f64,
    momentum: f64,
    /// By parameter, from its first gradient on.
    velocity: Vec<Vec<f32>>,
}

impl Sgd {
    /// Without momentum.
    pub fn new(lr: f64) -> Self {
        Self {
            lr,
            momentum: 0.0,
            velocity: Vec::new(),
        }
    }

    /// With momentum.
    #[must_use]
    pub fn momentum(self, momentum: f64) -> Self {
        Self { momentum, ..self }
    }

    /// Another learning rate from now on.
    pub fn set_learning_rate(&mut self, lr: f64) {
        self.lr = lr;
    }

    /// Takes a step. Parameters without a gradient stay as they are, their velocity too.
    pub fn step(&mut self, parameters: &InPlace, grads: &Views) -> Result<()> {
        let (lr, momentum) = (self.lr as f32, self.momentum as f32);
        self.velocity
            .resize(parameters.parameters().len(), Vec::new());
        let all = parameters.parameters().zip(&mut self.velocity);
        for (index, ((_, tensor), velocity)) in all.enumerate() {
            let Some(grad) = grads.get(index) else {
                continue;
            };
            if momentum != 0.0 {
                velocity.resize(grad.len(), 0.0);
            }
            tensor.inplace_op1(&Update {
                grad,
                each: Mutex::new(|i: usize, value: f32, grad: f32| {
                    let step = match velocity.get_mut(i) {
                        Some(velocity) => {
                            *velocity = *velocity * momentum + grad;
                            *velocity
                        }
                        None => grad,
                    };
                    value - lr * step
                }),
            })?;
        }
        Ok(())
    }
}

/// Adam with decoupled weight decay, as `candle_nn::AdamW`, for [`InPlace`]. Computes with 32 bits.
#[derive(Debug)]
pub struct AdamW {
    params: candle_nn::ParamsAdamW,
    steps: i32,
    /// First and second moments by parameter.
    moments: Vec<Vec<[f32; 2]>>,
}

impl AdamW {
    /// With candle's options.
    pub fn new(params: candle_nn::ParamsAdamW) -> Self {
        Self {
            params,
            steps: 0,
            moments: Vec::new(),
        }
    }

    /// Another learning rate from now on.
    pub fn set_learning_rate(&mut self, lr: f64) {
        self.params.lr = lr;
    }

    /// Takes a step. Parameters without a gradient stay as they are.
    pub fn step(&mut self, parameters: &InPlace, grads: &Views) -> Result<()> {
        let params = &self.params;
        self.steps += 1;
        let correction = |beta: f64| (1.0 / (1.0 - beta.powi(self.steps))) as f32;
        let (correction1, correction2) = (correction(params.beta1), correction(params.beta2));
        let [lr, beta1, beta2, eps] =
            [params.lr, params.beta1, params.beta2, params.eps].map(|value| value as f32);
        // From 64 bits: with 32, 1 - 0.999 is wrong by one part in 20,000.
        let [new1, new2] = [params.beta1, params.beta2].map(|beta| (1.0 - beta) as f32);
        let keep = (1.0 - params.lr * params.weight_decay) as f32;
        self.moments
            .resize(parameters.parameters().len(), Vec::new());
        let all = parameters.parameters().zip(&mut self.moments);
        for (index, ((_, tensor), moments)) in all.enumerate() {
            let Some(grad) = grads.get(index) else {
                continue;
            };
            moments.resize(grad.len(), [0.0; 2]);
            tensor.inplace_op1(&Update {
                grad,
                each: Mutex::new(|i: usize, value: f32, grad: f32| {
                    let [first, second] = &mut moments[i];
                    *first = *first * beta1 + grad * new1;
                    *second = *second * beta2 + grad * grad * new2;
                    let size = (*second * correction2).sqrt() + eps;
                    value * keep - lr * (*first * correction1) / size
                }),
            })?;
        }
        Ok(())
    }
}

/// Replaces each element by what `each` makes of its index, itself and its gradient.
struct Update<'a, F> {
    grad: &'a GradRef,
    each: Mutex<F>,
}

impl<F: FnMut(usize, f32, f32) -> f32> Update<'_, F> {
    fn run<T: WithDType + Element>(&self, values: &mut [T]) -> Result<()> {
        let grads: &[T] = self.grad.as_slice().map_err(candle_core::Error::wrap)?;
        let mut each = self.each.lock();
        for (i, (value, grad)) in values.iter_mut().zip(grads).enumerate() {
            let next = each(i, value.to_f64() as f32, grad.to_f64() as f32);
            *value = T::from_f64(next.into());
        }
        Ok(())
    }
}

impl<F: FnMut(usize, f32, f32) -> f32> InplaceOp1 for Update<'_, F> {
    fn name(&self) -> &'static str {
        "ddp-update"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("a parameter that is not contiguous");
        };
        match storage {
            CpuStorage::F32(values) => self.run(&mut values[start..end]),
            CpuStorage::F16(values) => self.run(&mut values[start..end]),
            CpuStorage::BF16(values) => self.run(&mut values[start..end]),
            _ => candle_core::bail!("this optimizer takes parameters of f32, f16 and bf16"),
        }
    }
}
