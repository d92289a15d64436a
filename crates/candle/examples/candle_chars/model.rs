//! The model: plain candle, but for the layer norm, which candle's own does not differentiate.

use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::ops::softmax;
use candle_nn::{Embedding, Linear, VarBuilder, embedding, linear};
use phalanx::candle::{LayerNorm, layer_norm};

use crate::text::LENGTH;

const WIDTH: usize = 64;
const HEADS: usize = 4;
const BLOCKS: usize = 2;

/// Reads letters and scores what may follow each of them.
pub(crate) struct Writer {
    letters: Embedding,
    places: Embedding,
    blocks: Vec<Block>,
    next: Linear,
}

impl Writer {
    pub(crate) fn new(letters: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let blocks = (0..BLOCKS).map(|i| Block::new(vb.pp(format!("blocks.{i}"))));
        Ok(Self {
            letters: embedding(letters, WIDTH, vb.pp("letters"))?,
            places: embedding(LENGTH, WIDTH, vb.pp("places"))?,
            blocks: blocks.collect::<Result<_>>()?,
            next: linear(WIDTH, letters, vb.pp("next"))?,
        })
    }

    pub(crate) fn forward(&self, letters: &Tensor) -> Result<Tensor> {
        let length = letters.dim(1)?;
        let places = Tensor::arange(0, length as u32, &Device::Cpu)?;
        let x = self.letters.forward(letters)?;
        let x = x.broadcast_add(&self.places.forward(&places)?)?;
        let hidden = hidden(length)?;
        let x = self
            .blocks
            .iter()
            .try_fold(x, |x, block| block.forward(&x, &hidden))?;
        self.next.forward(&x)
    }
}

/// What is added to scores so that no letter sees those after it.
fn hidden(length: usize) -> Result<Tensor> {
    let one = |i: usize| (0..length).map(move |j| if j > i { f32::NEG_INFINITY } else { 0.0 });
    let all: Vec<f32> = (0..length).flat_map(one).collect();
    Tensor::from_vec(all, (length, length), &Device::Cpu)?.to_dtype(DType::F32)
}

struct Block {
    norm1: LayerNorm,
    qkv: Linear,
    join: Linear,
    norm2: LayerNorm,
    wide: Linear,
    narrow: Linear,
}

impl Block {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            norm1: layer_norm(WIDTH, 1e-5, vb.pp("norm1"))?,
            qkv: linear(WIDTH, 3 * WIDTH, vb.pp("qkv"))?,
            join: linear(WIDTH, WIDTH, vb.pp("join"))?,
            norm2: layer_norm(WIDTH, 1e-5, vb.pp("norm2"))?,
            wide: linear(WIDTH, 4 * WIDTH, vb.pp("wide"))?,
            narrow: linear(4 * WIDTH, WIDTH, vb.pp("narrow"))?,
        })
    }

    fn forward(&self, x: &Tensor, hidden: &Tensor) -> Result<Tensor> {
        let (batch, length, _) = x.dims3()?;
        let qkv = self.qkv.forward(&self.norm1.forward(x)?)?;
        let part = |i: usize| {
            let part = qkv.narrow(2, i * WIDTH, WIDTH)?.contiguous()?;
            let part = part.reshape((batch, length, HEADS, WIDTH / HEADS))?;
            part.transpose(1, 2)?.contiguous()
        };
        let scores = part(0)?.matmul(&part(1)?.transpose(2, 3)?.contiguous()?)?;
        let scores = (scores / f64::from((WIDTH / HEADS) as u32).sqrt())?;
        let shares = softmax(&scores.broadcast_add(hidden)?, D::Minus1)?;
        let mixed = shares.matmul(&part(2)?)?.transpose(1, 2)?;
        let x = (x + self
            .join
            .forward(&mixed.contiguous()?.reshape((batch, length, WIDTH))?)?)?;
        let wide = self.wide.forward(&self.norm2.forward(&x)?)?.gelu()?;
        x + self.narrow.forward(&wide)?
    }
}
