//! Models and data.
#![allow(dead_code, reason = "each test file uses a part")]

pub(crate) mod ranks;

use std::ops::Range;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, Linear,
    LinearConfig, PaddingConfig2d,
};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor, TensorData};

pub(crate) fn device() -> Device {
    Device::flex().autodiff()
}

/// The values of a module's parameters that are trained, in the order of a walk.
pub(crate) fn weights<M: Module>(module: &M) -> Vec<f32> {
    struct Weights(Vec<f32>);
    impl ModuleVisitor for Weights {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.is_require_grad() {
                let data = param.base().into_data();
                self.0.extend(data.try_to_vec::<f32>().unwrap());
            }
        }
    }
    let mut weights = Weights(Vec::new());
    module.visit(&mut weights);
    weights.0
}

/// Numbers that anybody can make, different for each example.
pub(crate) fn numbers<const D: usize>(
    rows: Range<usize>,
    shape: [usize; D],
    step: usize,
) -> Tensor<D> {
    let each: usize = shape[1..].iter().product();
    let number = |(row, i): (usize, usize)| {
        let phase = (row * 7919 + i * 104_729 + step * 1_299_709) % 10_007;
        (phase as f32 * 0.37).sin()
    };
    let all = rows
        .clone()
        .flat_map(|row| (0..each).map(move |i| (row, i)));
    let mut dims = shape;
    dims[0] = rows.len();
    let data = TensorData::new(all.map(number).collect::<Vec<f32>>(), dims);
    Tensor::from_data(data, &device())
}

pub(crate) fn classes(rows: Range<usize>, classes: usize, step: usize) -> Tensor<1, Int> {
    let class = |row: usize| ((row * 31 + step * 17) % classes) as i64;
    let data: Vec<i64> = rows.map(class).collect();
    Tensor::from_data(data.as_slice(), &device())
}

pub(crate) fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let device = logits.device();
    CrossEntropyLossConfig::new()
        .init(&device)
        .forward(logits, targets)
}

#[derive(Module, Debug)]
pub(crate) struct Mlp {
    pub(crate) layers: Vec<Linear>,
}

impl Mlp {
    pub(crate) fn new(widths: &[usize], device: &Device) -> Self {
        let layer = |pair: &[usize]| LinearConfig::new(pair[0], pair[1]).init(device);
        Self {
            layers: widths.windows(2).map(layer).collect(),
        }
    }

    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let (last, rest) = self.layers.split_last().unwrap();
        let x = rest.iter().fold(x, |x, layer| relu(layer.forward(x)));
        last.forward(x)
    }

    pub(crate) fn loss(&self, step: usize, rows: Range<usize>) -> Tensor<1> {
        let [inputs, _] = self.layers[0].weight.shape().dims();
        let [_, outputs] = self.layers.last().unwrap().weight.shape().dims();
        let x = numbers(rows.clone(), [0, inputs], step);
        cross_entropy(self.forward(x), classes(rows, outputs, step))
    }
}

#[derive(Module, Debug)]
pub(crate) struct Cnn {
    conv1: Conv2d,
    pub(crate) norm: BatchNorm,
    dropout: Dropout,
    conv2: Conv2d,
    out: Linear,
}

impl Cnn {
    pub(crate) fn new(device: &Device) -> Self {
        let same = PaddingConfig2d::Explicit(1, 1, 1, 1);
        let conv = |channels| Conv2dConfig::new(channels, [3, 3]).with_padding(same.clone());
        Self {
            conv1: conv([1, 6]).init(device),
            norm: BatchNormConfig::new(6).init(device),
            dropout: DropoutConfig::new(0.3).init(),
            conv2: conv([6, 4]).init(device),
            out: LinearConfig::new(4 * 36, 5).init(device),
        }
    }

    pub(crate) fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.norm.forward(self.conv1.forward(x)));
        let x = relu(self.conv2.forward(self.dropout.forward(x)));
        self.out.forward(x.flatten::<2>(1, 3))
    }

    pub(crate) fn loss(&self, step: usize, rows: Range<usize>) -> Tensor<1> {
        let x = numbers(rows.clone(), [0, 1, 6, 6], step);
        cross_entropy(self.forward(x), classes(rows, 5, step))
    }
}

/// Reads words of a small language.
#[derive(Module, Debug)]
pub(crate) struct Reader {
    words: Embedding,
    places: Embedding,
    encoder: TransformerEncoder,
    out: Linear,
}

impl Reader {
    const WORDS: usize = 20;
    const LENGTH: usize = 6;
    const WIDTH: usize = 16;

    pub(crate) fn new(device: &Device) -> Self {
        let encoder = TransformerEncoderConfig::new(Self::WIDTH, 32, 4, 2).with_dropout(0.0);
        Self {
            words: EmbeddingConfig::new(Self::WORDS, Self::WIDTH).init(device),
            places: EmbeddingConfig::new(Self::LENGTH, Self::WIDTH).init(device),
            encoder: encoder.init(device),
            out: LinearConfig::new(Self::WIDTH, Self::WORDS).init(device),
        }
    }

    pub(crate) fn loss(&self, step: usize, rows: Range<usize>) -> Tensor<1> {
        let device = self.out.weight.device();
        let word = |(row, i): (usize, usize)| ((row * 13 + i * 7 + step * 3) % Self::WORDS) as i64;
        let all = rows
            .clone()
            .flat_map(|row| (0..Self::LENGTH).map(move |i| (row, i)));
        let shape = [rows.len(), Self::LENGTH];
        let words = TensorData::new(all.map(word).collect::<Vec<i64>>(), shape);
        let words = Tensor::<2, Int>::from_data(words, &device);
        let places = Tensor::<1, Int>::arange(0..Self::LENGTH as i64, &device).unsqueeze::<2>();
        let x = self.words.forward(words.clone()) + self.places.forward(places);
        let x = self.encoder.forward(TransformerEncoderInput::new(x));
        let logits: Tensor<2> = self.out.forward(x).flatten::<2>(0, 1);
        cross_entropy(logits, words.flatten::<1>(0, 1))
    }
}
