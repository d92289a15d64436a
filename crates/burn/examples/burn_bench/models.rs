//! What is trained: the same models as in `torch_train.py`.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Distribution, Int, Tensor};

/// A model with a batch of its own.
pub(crate) trait Trained: Module + 'static {
    fn new(device: &Device) -> Self;

    /// A loss of one batch, which is the same in every step.
    fn loss(&self) -> Tensor<1>;
}

fn classes(rows: usize, device: &Device) -> Tensor<1, Int> {
    let classes: Vec<i64> = (0..rows as i64).map(|row| row % 10).collect();
    Tensor::from_data(classes.as_slice(), device)
}

fn cross_entropy(logits: Tensor<2>) -> Tensor<1> {
    let ([rows, _], device) = (logits.dims(), logits.device());
    let loss = CrossEntropyLossConfig::new().init(&device);
    loss.forward(logits, classes(rows, &device))
}

/// 784, 1024, 1024, 10; a batch of 64.
#[derive(Module, Debug)]
pub(crate) struct Mlp {
    layers: Vec<Linear>,
}

impl Trained for Mlp {
    fn new(device: &Device) -> Self {
        let widths = [784, 1024, 1024, 10];
        let layer = |pair: &[usize]| LinearConfig::new(pair[0], pair[1]).init(device);
        Self {
            layers: widths.windows(2).map(layer).collect(),
        }
    }

    fn loss(&self) -> Tensor<1> {
        let device = self.layers[0].weight.device();
        let x = Tensor::<2>::random([64, 784], Distribution::Default, &device);
        let x = relu(self.layers[0].forward(x));
        let x = relu(self.layers[1].forward(x));
        cross_entropy(self.layers[2].forward(x))
    }
}

/// Two convolutions of 16 and 32 channels and a linear layer; a batch of 64 images of 28 x 28.
#[derive(Module, Debug)]
pub(crate) struct Cnn {
    conv1: Conv2d,
    conv2: Conv2d,
    pool: MaxPool2d,
    out: Linear,
}

impl Trained for Cnn {
    fn new(device: &Device) -> Self {
        let same = PaddingConfig2d::Explicit(1, 1, 1, 1);
        let conv = |channels| Conv2dConfig::new(channels, [3, 3]).with_padding(same.clone());
        Self {
            conv1: conv([1, 16]).init(device),
            conv2: conv([16, 32]).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            out: LinearConfig::new(32 * 49, 10).init(device),
        }
    }

    fn loss(&self) -> Tensor<1> {
        let device = self.out.weight.device();
        let x = Tensor::<4>::random([64, 1, 28, 28], Distribution::Default, &device);
        let x = self.pool.forward(relu(self.conv1.forward(x)));
        let x = self.pool.forward(relu(self.conv2.forward(x)));
        cross_entropy(self.out.forward(x.flatten::<2>(1, 3)))
    }
}

/// Four blocks of width 256 with 4 heads, 1024 inside; a batch of 8 by 64.
#[derive(Module, Debug)]
pub(crate) struct Encoder {
    blocks: TransformerEncoder,
}

impl Trained for Encoder {
    fn new(device: &Device) -> Self {
        let config = TransformerEncoderConfig::new(256, 1024, 4, 4);
        Self {
            blocks: config.with_dropout(0.0).with_norm_first(true).init(device),
        }
    }

    fn loss(&self) -> Tensor<1> {
        let device = self.blocks.devices()[0].clone();
        let x = Tensor::<3>::random([8, 64, 256], Distribution::Default, &device);
        self.blocks
            .forward(TransformerEncoderInput::new(x))
            .square()
            .mean()
    }
}
