//! A layer norm that is differentiated.

use candle_core::{Module, Result, Tensor};
use candle_nn::ops::layer_norm_slow;
use candle_nn::{Init, VarBuilder};

/// Layer norm with a weight and a bias, in place of `candle_nn::LayerNorm`, which loses gradients: its
/// input's, its weight's and its bias's.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

/// A [`LayerNorm`] over the last dimension, with the names of `candle_nn::layer_norm`.
pub fn layer_norm(size: usize, eps: f64, vb: VarBuilder<'_>) -> Result<LayerNorm> {
    Ok(LayerNorm {
        weight: vb.get_with_hints(size, "weight", Init::Const(1.0))?,
        bias: vb.get_with_hints(size, "bias", Init::Const(0.0))?,
        eps,
    })
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        layer_norm_slow(x, &self.weight, &self.bias, self.eps as f32)
    }
}
