//! Handwritten digits, learned by all ranks together:
//!
//! `phalanx run --nproc 2 -- digits [--epochs N] [--backend NAME] [--summary FILE]`
//!
//! The same program runs alone and under `torchrun --no-python`. A batch is that of all ranks
//! together, so the number of ranks changes who computes what, and the result by rounding only.
#![forbid(unsafe_code)]

mod data;
mod progress;

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use phalanx::ddp::builtin::{Matrix, Net, Sgd, cross_entropy};
use phalanx::prelude::*;

use data::Digits;
use progress::{Args, Epoch, Times, end};

/// Passes over the data.
const EPOCHS: u64 = 30;

/// Examples per step, of all ranks together.
const BATCH: usize = 32;
const HIDDEN: usize = 128;
const LEARNING_RATE: f32 = 0.05;
const MOMENTUM: f32 = 0.9;
/// Caps of buckets in MiB. By PyTorch's defaults the whole model would be one bucket, which is full
/// when backward ends, and nothing could overlap.
const BUCKET_CAP_MB: f64 = 0.004;

fn main() -> ExitCode {
    phalanx::log::init("warn");
    end(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let (train, held_out) = Digits::load()?;
    let group = args.init()?;
    let epochs = args.epochs.unwrap_or(EPOCHS);
    let (rank, ranks) = (group.rank(), group.size());
    // Another seed on each rank: all get rank 0's values.
    let net = Net::new(rank as u64 + 1)
        .linear("fc1", data::PIXELS, HIDDEN)
        .relu()
        .linear("fc2", HIDDEN, HIDDEN)
        .relu()
        .linear("fc3", HIDDEN, data::CLASSES);
    let config = DdpConfig {
        bucket_cap_mb: Some(BUCKET_CAP_MB),
        ..DdpConfig::default()
    };
    let mut ddp = Ddp::new(net, group.clone(), config)?;
    let mut sgd = Sgd::new(LEARNING_RATE).momentum(MOMENTUM);
    let mut sampler = DistributedSampler::new(train.len(), ranks, rank)?;

    let start = Instant::now();
    for epoch in 0..epochs {
        sampler.set_epoch(epoch);
        let begun = Instant::now();
        let sums = train_epoch(&mut ddp, &mut sgd, &train, &sampler.indices())?;
        if rank == 0 {
            let epoch = Epoch::new(epoch + 1, epochs, sums, begun.elapsed());
            println!("{epoch}  {}", Times::of(&ddp));
        }
    }
    let trained = start.elapsed();
    let correct = evaluate(&mut ddp, &held_out)?;
    args.conclude(&ddp, epochs, [correct, held_out.len()], trained)?;
    Ok(group.shutdown()?)
}

/// One pass over this rank's share; the sums of all ranks: loss, correct answers, examples.
fn train_epoch(
    ddp: &mut Ddp<Net>,
    sgd: &mut Sgd,
    digits: &Digits,
    share: &[usize],
) -> Result<[f64; 3], Box<dyn Error>> {
    let group = ddp.group().clone();
    let mut sums = [0.0; 3];
    for batch in share.chunks(BATCH.div_ceil(group.size())) {
        let (x, y) = matrix(digits.batch(batch));
        let (logits, loss, grad) = ddp.forward(|net| {
            let logits = net.forward(&x.into());
            let (loss, grad) = cross_entropy(&logits, &y);
            (logits, loss, grad)
        })?;
        let grads = ddp.backward(|net| net.backward(&grad))?; // averaged over all ranks
        ddp.update(|net| sgd.step(net, &grads));
        let examples = batch.len() as f64;
        let step = [f64::from(loss) * examples, correct(&logits, &y), examples];
        sums = std::array::from_fn(|i| sums[i] + step[i]);
    }
    group.allreduce_in_place(&mut sums, ReduceOp::Sum)?;
    Ok(sums)
}

/// How many of the digits are recognised; each rank looks at its share.
fn evaluate(ddp: &mut Ddp<Net>, digits: &Digits) -> Result<usize, Box<dyn Error>> {
    let group = ddp.group().clone();
    let share = (group.rank()..digits.len()).step_by(group.size());
    let (x, y) = matrix(digits.batch(&share.collect::<Vec<_>>()));
    let logits = ddp.infer(|net| {
        net.set_training(false);
        net.forward(&x.into())
    })?;
    let mut sum = [correct(&logits, &y)];
    group.allreduce_in_place(&mut sum, ReduceOp::Sum)?;
    Ok(sum[0] as usize)
}

fn matrix((pixels, labels): (Vec<f32>, Vec<usize>)) -> (Matrix, Vec<usize>) {
    (Matrix::new(labels.len(), data::PIXELS, pixels), labels)
}

/// How many rows have their largest value at the target.
fn correct(logits: &Matrix, targets: &[usize]) -> f64 {
    let answer = |row: usize| {
        let values = logits.row(row).iter().enumerate();
        values.max_by(|a, b| a.1.total_cmp(b.1)).map(|(i, _)| i)
    };
    let right = |&(row, target): &(usize, &usize)| answer(row) == Some(*target);
    targets.iter().enumerate().filter(right).count() as f64
}
