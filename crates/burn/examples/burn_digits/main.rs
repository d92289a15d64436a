//! Handwritten digits, learned with burn by all ranks together:
//!
//! `phalanx run --nproc 2 -- burn_digits [--epochs N] [--backend NAME] [--summary FILE]`
//!
//! The same program runs alone and under `torchrun --no-python`. A batch is that of all ranks
//! together.
#![forbid(unsafe_code)]

#[path = "../../../phalanx/examples/digits/data.rs"]
mod data;
mod model;
#[path = "../../../phalanx/examples/digits/progress.rs"]
mod progress;

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamConfig, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, TensorData};
use clap::Parser;
use phalanx::burn::{Ddp, DdpConfig, seed_rank};
use phalanx::prelude::{DistributedSampler, ProcessGroupExt, ReduceOp};

use data::Digits;
use model::Cnn;
use progress::{Args, Epoch, Times, end};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Examples per step, of all ranks together.
const BATCH: usize = 32;
/// Passes over the data.
const EPOCHS: u64 = 6;
const LEARNING_RATE: f64 = 0.003;
/// Caps of buckets in MiB: by PyTorch's defaults this small model would be one bucket, which is full
/// when backward ends, and nothing could overlap.
const BUCKET_CAP_MB: f64 = 0.01;

fn main() -> ExitCode {
    end(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let (train, held_out) = Digits::load()?;
    let group = args.init()?;
    let epochs = args.epochs.unwrap_or(EPOCHS);
    let device = Device::flex().autodiff();
    seed_rank(&device, 1, &*group); // other units are dropped on each rank
    let config = DdpConfig {
        bucket_cap_mb: Some(BUCKET_CAP_MB),
        ..DdpConfig::default()
    };
    let mut ddp = Ddp::new(Cnn::new(&device), group.clone(), config)?;
    let mut optim: ModuleOptimizer = AdamConfig::new().init();
    let mut sampler = DistributedSampler::new(train.len(), group.size(), group.rank())?;

    let start = Instant::now();
    for epoch in 0..epochs {
        sampler.set_epoch(epoch);
        let begun = Instant::now();
        let mut sums = [0.0; 3];
        for batch in sampler.indices().chunks(BATCH.div_ceil(group.size())) {
            let (x, y) = tensors(train.batch(batch), &device);
            let (logits, loss) = ddp.forward(|model| {
                let logits = model.forward(x);
                let loss = CrossEntropyLossConfig::new().init(&device);
                (logits.clone(), loss.forward(logits, y.clone()))
            })?;
            let examples = batch.len() as f64;
            let correct = correct(logits, y);
            let mean: f64 = loss.clone().into_scalar();
            sums = [
                sums[0] + mean * examples,
                sums[1] + correct,
                sums[2] + examples,
            ];
            let grads = ddp.backward(loss)?; // averaged over all ranks
            ddp.update(|model| optim.step(LEARNING_RATE, model, grads));
        }
        group.allreduce_in_place(&mut sums, ReduceOp::Sum)?;
        if group.rank() == 0 {
            let epoch = Epoch::new(epoch + 1, epochs, sums, begun.elapsed());
            println!("{epoch}  {}", Times::of(&ddp));
        }
    }
    let trained = start.elapsed();

    let share = (group.rank()..held_out.len()).step_by(group.size());
    let (x, y) = tensors(
        held_out.batch(&share.collect::<Vec<_>>()),
        &device.without_autodiff(),
    );
    let mut right = [correct(ddp.infer(|model| model.forward(x))?, y)];
    group.allreduce_in_place(&mut right, ReduceOp::Sum)?;
    args.conclude(&ddp, epochs, [right[0] as usize, held_out.len()], trained)?;
    Ok(group.shutdown()?)
}

/// Images of one channel, and their labels.
fn tensors(
    (pixels, labels): (Vec<f32>, Vec<usize>),
    device: &Device,
) -> (Tensor<4>, Tensor<1, Int>) {
    let images = TensorData::new(pixels, [labels.len(), 1, 8, 8]);
    let labels: Vec<i64> = labels.into_iter().map(|label| label as i64).collect();
    let labels = Tensor::from_data(labels.as_slice(), device);
    (Tensor::from_data(images, device), labels)
}

/// How many rows have their largest value at the label.
fn correct(logits: Tensor<2>, labels: Tensor<1, Int>) -> f64 {
    let answers = logits.argmax(1).flatten::<1>(0, 1);
    answers.equal(labels).int().sum().into_scalar()
}
