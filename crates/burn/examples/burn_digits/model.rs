//! The model: plain burn, which knows nothing of other processes.

use burn::module::Module;
use burn::nn::PaddingConfig2d;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};

/// Two convolutions with batch norm, and a linear layer.
#[derive(Module, Debug)]
pub(crate) struct Cnn {
    conv1: Conv2d,
    norm1: BatchNorm,
    conv2: Conv2d,
    norm2: BatchNorm,
    pool: MaxPool2d,
    dropout: Dropout,
    out: Linear,
}

impl Cnn {
    pub(crate) fn new(device: &Device) -> Self {
        let same = PaddingConfig2d::Explicit(1, 1, 1, 1);
        let conv = |channels| Conv2dConfig::new(channels, [3, 3]).with_padding(same.clone());
        Self {
            conv1: conv([1, 16]).init(device),
            norm1: BatchNormConfig::new(16).init(device),
            conv2: conv([16, 32]).init(device),
            norm2: BatchNormConfig::new(32).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            dropout: DropoutConfig::new(0.2).init(),
            out: LinearConfig::new(32 * 4 * 4, 10).init(device),
        }
    }

    /// Scores of the ten digits.
    pub(crate) fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = relu(self.norm1.forward(self.conv1.forward(images)));
        let x = relu(self.norm2.forward(self.conv2.forward(x)));
        let x = self.dropout.forward(self.pool.forward(x));
        self.out.forward(x.flatten::<2>(1, 3))
    }
}
