//! Handwritten digits, learned with candle by all ranks together:
//!
//! `phalanx run --nproc 2 -- candle_digits [--epochs N] [--backend NAME] [--summary FILE]`
//!
//! The same program runs alone and under `torchrun --no-python`. A batch is that of all ranks
//! together.
#![forbid(unsafe_code)]

#[path = "../../../phalanx/examples/digits/data.rs"]
mod data;
#[path = "../../../phalanx/examples/digits/progress.rs"]
mod progress;

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{
    AdamW, Conv2d, Conv2dConfig, Linear, Optimizer, ParamsAdamW, VarBuilder, VarMap, conv2d,
    linear, loss,
};
use clap::Parser;
use phalanx::candle::{Ddp, DdpConfig};
use phalanx::prelude::{DistributedSampler, ProcessGroupExt, ReduceOp};

use data::Digits;
use progress::{Args, Epoch, Times, end};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Examples per step, of all ranks together.
const BATCH: usize = 32;
/// Passes over the data.
const EPOCHS: u64 = 10;
const LEARNING_RATE: f64 = 0.002;
/// Of the first convolution; the second has twice as many.
const CHANNELS: usize = 16;
/// Caps of buckets in MiB: by PyTorch's defaults this small model would be one bucket, which is full
/// when backward ends, and nothing could overlap.
const BUCKET_CAP_MB: f64 = 0.004;

/// The model: plain candle, which knows nothing of other processes. Two convolutions and a linear
/// layer.
struct Cnn {
    conv1: Conv2d,
    conv2: Conv2d,
    out: Linear,
}

impl Cnn {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        let same = Conv2dConfig {
            padding: 1,
            ..Conv2dConfig::default()
        };
        let pooled = data::PIXELS / 4;
        Ok(Self {
            conv1: conv2d(1, CHANNELS, 3, same, vb.pp("conv1"))?,
            conv2: conv2d(CHANNELS, 2 * CHANNELS, 3, same, vb.pp("conv2"))?,
            out: linear(2 * CHANNELS * pooled, data::CLASSES, vb.pp("out"))?,
        })
    }
}

impl Module for Cnn {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let x = self.conv1.forward(x)?.relu()?;
        let x = self.conv2.forward(&x)?.relu()?.max_pool2d(2)?;
        self.out.forward(&x.flatten_from(1)?)
    }
}

fn main() -> ExitCode {
    end(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let (train, held_out) = Digits::load()?;
    let group = args.init()?;
    let epochs = args.epochs.unwrap_or(EPOCHS);
    let vars = VarMap::new();
    let config = DdpConfig {
        bucket_cap_mb: Some(BUCKET_CAP_MB),
        ..DdpConfig::default()
    };
    let mut ddp = Ddp::new(&vars, DType::F32, Cnn::new, group.clone(), config)?;
    let params = ParamsAdamW {
        lr: LEARNING_RATE,
        ..ParamsAdamW::default()
    };
    let mut optim = AdamW::new(vars.all_vars(), params)?;
    let mut sampler = DistributedSampler::new(train.len(), group.size(), group.rank())?;

    let start = Instant::now();
    for epoch in 0..epochs {
        sampler.set_epoch(epoch);
        let begun = Instant::now();
        let mut sums = [0.0; 3];
        for batch in sampler.indices().chunks(BATCH.div_ceil(group.size())) {
            let (x, y) = tensors(train.batch(batch))?;
            let (logits, loss) = ddp.forward(|model| {
                let logits = model.forward(&x)?;
                let loss = loss::cross_entropy(&logits, &y)?;
                Ok((logits, loss))
            })?;
            let grads = ddp.backward(&loss)?; // averaged over all ranks
            ddp.update(|_| optim.step(&grads))?;
            let (examples, mean) = (batch.len() as f64, f64::from(loss.to_scalar::<f32>()?));
            let step = [mean * examples, correct(&logits, &y)?, examples];
            sums = std::array::from_fn(|i| sums[i] + step[i]);
        }
        group.allreduce_in_place(&mut sums, ReduceOp::Sum)?;
        if group.rank() == 0 {
            let epoch = Epoch::new(epoch + 1, epochs, sums, begun.elapsed());
            println!("{epoch}  {}", Times::of(&ddp));
        }
    }
    let trained = start.elapsed();

    let share = (group.rank()..held_out.len()).step_by(group.size());
    let (x, y) = tensors(held_out.batch(&share.collect::<Vec<_>>()))?;
    let mut right = [correct(&ddp.infer(|model| model.forward(&x))?, &y)?];
    group.allreduce_in_place(&mut right, ReduceOp::Sum)?;
    args.conclude(&ddp, epochs, [right[0] as usize, held_out.len()], trained)?;
    Ok(group.shutdown()?)
}

fn tensors((pixels, labels): (Vec<f32>, Vec<usize>)) -> candle_core::Result<(Tensor, Tensor)> {
    let x = Tensor::from_vec(pixels, (labels.len(), 1, 8, 8), &Device::Cpu)?;
    let labels: Vec<u32> = labels.into_iter().map(|label| label as u32).collect();
    Ok((x, Tensor::new(labels, &Device::Cpu)?))
}

/// How many rows have their largest value at the label.
fn correct(logits: &Tensor, labels: &Tensor) -> candle_core::Result<f64> {
    let right = logits.argmax(1)?.eq(labels)?.to_dtype(DType::F64)?;
    right.sum_all()?.to_scalar()
}
