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
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use phalanx::ddp::builtin::{Matrix, Net, Sgd, cross_entropy};
use phalanx::prelude::*;
use sha2::{Digest, Sha256};

use data::Digits;
use progress::{Epoch, Summary, Times};

/// Examples per step, of all ranks together.
const BATCH: usize = 32;
const HIDDEN: usize = 128;
const LEARNING_RATE: f32 = 0.05;
const MOMENTUM: f32 = 0.9;
/// Caps of buckets in MiB. By PyTorch's defaults the whole model would be one bucket, which is full
/// when backward ends, and nothing could overlap.
const BUCKET_CAP_MB: f64 = 0.004;

/// Learn handwritten digits with all ranks of a job.
#[derive(Parser)]
struct Args {
    /// Passes over the data
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,

    /// The backend, if not the one that PHALANX_BACKEND or the default says
    #[arg(long)]
    backend: Option<String>,

    /// Write the figures of the end to this file, as JSON
    #[arg(long, value_name = "FILE")]
    summary: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            eprintln!("error: {err}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let (train, held_out) = Digits::load()?;
    let group = match &args.backend {
        Some(backend) => phalanx::init_with(backend)?,
        None => phalanx::init()?,
    };
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
    for epoch in 0..args.epochs {
        sampler.set_epoch(epoch);
        let begun = Instant::now();
        let sums = train_epoch(&mut ddp, &mut sgd, &train, &sampler.indices())?;
        if rank == 0 {
            let epoch = Epoch::new(epoch + 1, args.epochs, sums, begun.elapsed());
            println!("{epoch}  {}", Times::of(&ddp));
        }
    }
    let trained = start.elapsed();

    let correct = evaluate(&mut ddp, &held_out)?;
    let sha256 = common_digest(&ddp)?;
    if rank == 0 {
        let summary = Summary {
            ranks,
            backend: group.backend().to_owned(),
            epochs: args.epochs,
            held_out: held_out.len(),
            correct,
            accuracy: correct as f64 / held_out.len() as f64,
            sha256,
            training_seconds: trained.as_secs_f64(),
            step: Times::of(&ddp),
        };
        println!("{summary}");
        if let Some(file) = &args.summary {
            std::fs::write(file, serde_json::to_string(&summary)?)
                .map_err(|err| format!("write {}: {err}", file.display()))?;
        }
    }
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
        let (x, y) = digits.batch(batch);
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
    let (x, y) = digits.batch(&share.collect::<Vec<_>>());
    let logits = ddp.infer(|net| {
        net.set_training(false);
        net.forward(&x.into())
    })?;
    let mut sum = [correct(&logits, &y)];
    group.allreduce_in_place(&mut sum, ReduceOp::Sum)?;
    Ok(sum[0] as usize)
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

/// The digest of all parameters, which has to be the same on all ranks.
fn common_digest(ddp: &Ddp<Net>) -> Result<String, Box<dyn Error>> {
    let net = ddp.model();
    let mut sha256 = Sha256::new();
    for parameter in 0..net.specs().count() {
        let values = net.values(parameter).iter();
        values.for_each(|value| sha256.update(value.to_le_bytes()));
    }
    let own = sha256.finalize();
    let all = ddp.group().allgather_slice(own.as_slice())?;
    let hex =
        |digest: &[u8]| -> String { digest.iter().map(|byte| format!("{byte:02x}")).collect() };
    let all: Vec<String> = all.chunks_exact(own.len()).map(hex).collect();
    match all.iter().all(|digest| *digest == all[0]) {
        true => Ok(all[0].clone()),
        false => Err(format!("ranks ended with different parameters: sha256 {all:?}").into()),
    }
}
