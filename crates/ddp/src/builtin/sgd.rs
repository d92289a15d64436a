//! The optimizer.

use super::net::{Gradients, Net};

/// Stochastic gradient descent with momentum, as PyTorch computes it.
#[derive(Debug, Clone)]
pub struct Sgd {
    lr: f32,
    momentum: f32,
    /// By parameter, from its first gradient on.
    velocity: Vec<Option<Vec<f32>>>,
}

impl Sgd {
    /// Without momentum.
    pub fn new(lr: f32) -> Self {
        Self {
            lr,
            momentum: 0.0,
            velocity: Vec::new(),
        }
    }

    /// With momentum.
    #[must_use]
    pub fn momentum(self, momentum: f32) -> Self {
        Self { momentum, ..self }
    }

    /// Takes a step. Parameters without a gradient stay as they are, their velocity too.
    pub fn step(&mut self, net: &mut Net, gradients: &Gradients) {
        let specs: Vec<_> = net.specs().cloned().collect();
        self.velocity.resize(specs.len(), None);
        for (i, spec) in specs.iter().enumerate() {
            let Some(mut step) = gradients.dense(i, spec) else {
                continue;
            };
            if self.momentum != 0.0 {
                if let Some(velocity) = &self.velocity[i] {
                    let pairs = step.iter_mut().zip(velocity);
                    pairs.for_each(|(step, velocity)| *step += velocity * self.momentum);
                }
                self.velocity[i] = Some(step.clone());
            }
            let values = net.values_mut(i).iter_mut();
            values
                .zip(step)
                .for_each(|(value, step)| *value -= self.lr * step);
        }
    }
}
