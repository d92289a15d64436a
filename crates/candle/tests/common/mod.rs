//! Models and data.
#![allow(dead_code, reason = "each test file uses a part")]

#[path = "../../../burn/tests/common/ranks.rs"]
pub(crate) mod ranks;

use std::ops::Range;

use candle_core::{D, Device, Module, Result, Tensor};
use candle_nn::ops::softmax;
use candle_nn::{Embedding, Linear, VarBuilder, embedding, linear, loss};
use phalanx_candle::{LayerNorm, layer_norm};

pub(crate) fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Numbers that anybody can make, different for each example.
pub(crate) fn numbers(rows: Range<usize>, width: usize, step: usize) -> Tensor {
    let number = |(row, i): (usize, usize)| {
        let phase = (row * 7919 + i * 104_729 + step * 1_299_709) % 10_007;
        (phase as f32 * 0.37).sin()
    };
    let all = rows
        .clone()
        .flat_map(|row| (0..width).map(move |i| (row, i)));
    let all: Vec<f32> = all.map(number).collect();
    Tensor::from_vec(all, (rows.len(), width), &Device::Cpu).unwrap()
}

pub(crate) fn classes(rows: Range<usize>, classes: usize, step: usize) -> Tensor {
    let class = |row: usize| ((row * 31 + step * 17) % classes) as u32;
    let all: Vec<u32> = rows.map(class).collect();
    Tensor::new(all, &Device::Cpu).unwrap()
}

/// What tests train. It is smooth: with a `relu`, a sum that is zero but for its last bits makes another
/// step, now and then.
pub(crate) trait Model: Sized + 'static {
    fn build(vb: VarBuilder<'_>) -> Result<Self>;
    fn loss(&self, step: usize, rows: Range<usize>) -> Result<Tensor>;
}

pub(crate) struct Mlp {
    pub(crate) layers: Vec<Linear>,
}

impl Mlp {
    const WIDTHS: [usize; 4] = [16, 24, 24, 5];
}

impl Model for Mlp {
    fn build(vb: VarBuilder<'_>) -> Result<Self> {
        let pairs = Self::WIDTHS.windows(2).enumerate();
        let layers = pairs.map(|(i, pair)| linear(pair[0], pair[1], vb.pp(format!("fc{i}"))));
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
        })
    }

    fn loss(&self, step: usize, rows: Range<usize>) -> Result<Tensor> {
        let (last, rest) = self.layers.split_last().unwrap();
        let x = numbers(rows.clone(), Self::WIDTHS[0], step);
        let x = rest
            .iter()
            .try_fold(x, |x, layer| layer.forward(&x)?.silu())?;
        loss::cross_entropy(&last.forward(&x)?, &classes(rows, 5, step))
    }
}

/// Reads words of a small language: embeddings, attention, layer norms.
pub(crate) struct Reader {
    words: Embedding,
    places: Embedding,
    norm1: LayerNorm,
    qkv: Linear,
    join: Linear,
    norm2: LayerNorm,
    wide: Linear,
    narrow: Linear,
    out: Linear,
}

impl Reader {
    const WORDS: usize = 20;
    const LENGTH: usize = 6;
    const WIDTH: usize = 16;
}

impl Model for Reader {
    fn build(vb: VarBuilder<'_>) -> Result<Self> {
        let width = Self::WIDTH;
        Ok(Self {
            words: embedding(Self::WORDS, width, vb.pp("words"))?,
            places: embedding(Self::LENGTH, width, vb.pp("places"))?,
            norm1: layer_norm(width, 1e-5, vb.pp("norm1"))?,
            qkv: linear(width, 3 * width, vb.pp("qkv"))?,
            join: linear(width, width, vb.pp("join"))?,
            norm2: layer_norm(width, 1e-5, vb.pp("norm2"))?,
            wide: linear(width, 2 * width, vb.pp("wide"))?,
            narrow: linear(2 * width, width, vb.pp("narrow"))?,
            out: linear(width, Self::WORDS, vb.pp("out"))?,
        })
    }

    fn loss(&self, step: usize, rows: Range<usize>) -> Result<Tensor> {
        let word = |(row, i): (usize, usize)| ((row * 13 + i * 7 + step * 3) % Self::WORDS) as u32;
        let all = rows
            .clone()
            .flat_map(|row| (0..Self::LENGTH).map(move |i| (row, i)));
        let words: Vec<u32> = all.map(word).collect();
        let words = Tensor::from_vec(words, (rows.len(), Self::LENGTH), &Device::Cpu)?;
        let places = Tensor::arange(0, Self::LENGTH as u32, &Device::Cpu)?;
        let x = self.words.forward(&words)?;
        let x = x.broadcast_add(&self.places.forward(&places)?)?;
        let qkv = self.qkv.forward(&self.norm1.forward(&x)?)?;
        let part = |i: usize| qkv.narrow(2, i * Self::WIDTH, Self::WIDTH)?.contiguous();
        let scores = (part(0)?.matmul(&part(1)?.t()?.contiguous()?)? / 4.0)?;
        let mixed = softmax(&scores, D::Minus1)?.matmul(&part(2)?)?;
        let x = (x + self.join.forward(&mixed)?)?;
        let wide = self.wide.forward(&self.norm2.forward(&x)?)?.silu()?;
        let x = (x + self.narrow.forward(&wide)?)?;
        let scores = self.out.forward(&x)?.flatten(0, 1)?;
        loss::cross_entropy(&scores, &words.flatten_all()?)
    }
}
