//! A small transformer learns to write like this repository's documentation, letter by letter, with
//! burn and by all ranks together:
//!
//! `phalanx run --nproc 2 -- burn_chars [--steps N]`
//!
//! The same program runs alone and under `torchrun --no-python`.
#![forbid(unsafe_code)]

mod model;
#[path = "../../../phalanx/examples/chars/text.rs"]
mod text;

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, TensorData};
use clap::Parser;
use phalanx::burn::{Ddp, DdpConfig, seed_rank};
use phalanx::prelude::{ProcessGroupExt, ReduceOp};

use model::Writer;
use text::{Args, Text, end};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Pieces of text per step and rank.
const BATCH: usize = 16;
const LEARNING_RATE: f64 = 0.003;

fn main() -> ExitCode {
    end(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let text = Text::new();
    let group = phalanx::init()?;
    let device = Device::flex().autodiff();
    seed_rank(&device, 1, &*group);
    let config = DdpConfig {
        bucket_cap_mb: Some(0.1),
        ..DdpConfig::default()
    };
    let mut ddp = Ddp::new(Writer::new(text.letters(), &device), group.clone(), config)?;
    let mut optim: ModuleOptimizer = AdamWConfig::new().init();
    let start = Instant::now();
    for step in 1..=args.steps {
        // Every rank reads other places.
        let pieces = text.pieces(BATCH, step * group.size() + group.rank());
        let (x, y) = tensors(&pieces, &device);
        let loss = ddp.forward(|model| {
            let loss = CrossEntropyLossConfig::new().init(&device);
            loss.forward(model.forward(x).flatten::<2>(0, 1), y)
        })?;
        let mut mean = [loss.clone().into_scalar::<f64>() / group.size() as f64];
        let grads = ddp.backward(loss)?; // averaged over all ranks
        ddp.update(|model| optim.step(LEARNING_RATE, model, grads));
        if args.shows(step) {
            group.allreduce_in_place(&mut mean, ReduceOp::Sum)?;
            if group.rank() == 0 {
                let seconds = start.elapsed().as_secs_f64();
                println!(
                    "step {step} of {}  loss {:.3}  {seconds:.1} s",
                    args.steps, mean[0]
                );
            }
        }
    }
    if group.rank() == 0 {
        let model = ddp.model().valid();
        let device = device.without_autodiff();
        println!(
            "{}",
            text.write(args.letters, |tail| {
                let tail = TensorData::new(tail.to_vec(), [1, tail.len()]);
                let scores = model.forward(Tensor::from_data(tail, &device));
                let [_, length, letters] = scores.dims();
                let last = scores.slice([0..1, length - 1..length, 0..letters]);
                last.into_data().iter().collect()
            })
        );
    }
    Ok(group.shutdown()?)
}

/// Letters, and for each of them the one that follows.
fn tensors(pieces: &[Vec<i64>], device: &Device) -> (Tensor<2, Int>, Tensor<1, Int>) {
    let length = pieces[0].len() - 1;
    let letters: Vec<i64> = pieces
        .iter()
        .flat_map(|piece| piece[..length].to_vec())
        .collect();
    let next: Vec<i64> = pieces
        .iter()
        .flat_map(|piece| piece[1..].to_vec())
        .collect();
    let letters = TensorData::new(letters, [pieces.len(), length]);
    (
        Tensor::from_data(letters, device),
        Tensor::from_data(next.as_slice(), device),
    )
}
