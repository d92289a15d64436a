//! A small transformer learns to write like this repository's documentation, letter by letter, with
//! candle and by all ranks together:
//!
//! `phalanx run --nproc 2 -- candle_chars [--steps N]`
//!
//! Its parameters stay in place: neither they nor the averages are copied. The same program runs
//! alone and under `torchrun --no-python`.
#![forbid(unsafe_code)]

mod model;
#[path = "../../../phalanx/examples/chars/text.rs"]
mod text;

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_nn::{ParamsAdamW, loss};
use clap::Parser;
use phalanx::candle::{AdamW, Ddp, DdpConfig};
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
    let config = DdpConfig {
        bucket_cap_mb: Some(0.1),
        ..DdpConfig::default()
    };
    let letters = text.letters();
    let model = move |vb: candle_nn::VarBuilder<'_>| Writer::new(letters, vb);
    let mut ddp = Ddp::in_place(DType::F32, model, group.clone(), config)?;
    let params = ParamsAdamW {
        lr: LEARNING_RATE,
        ..ParamsAdamW::default()
    };
    let mut optim = AdamW::new(params);
    let start = Instant::now();
    for step in 1..=args.steps {
        // Every rank reads other places.
        let pieces = text.pieces(BATCH, step * group.size() + group.rank());
        let (x, y) = tensors(&pieces)?;
        let loss = ddp.forward(|model| {
            let scores = model.forward(&x)?.flatten(0, 1)?;
            loss::cross_entropy(&scores, &y)
        })?;
        let grads = ddp.backward(&loss)?; // averaged over all ranks
        ddp.update(|parameters| optim.step(parameters, &grads))?;
        if args.shows(step) {
            let mut mean = [loss.to_scalar::<f32>()? / group.size() as f32];
            group.allreduce_in_place(&mut mean, ReduceOp::Sum)?;
            if group.rank() == 0 {
                let seconds = start.elapsed().as_secs_f64();
                let of = args.steps;
                println!("step {step} of {of}  loss {:.3}  {seconds:.1} s", mean[0]);
            }
        }
    }
    if group.rank() == 0 {
        let scores = |tail: &[i64]| {
            let tail = Tensor::new(tail, &Device::Cpu)?.unsqueeze(0)?;
            let scores = ddp.model().forward(&tail)?;
            scores.get(0)?.get(scores.dim(1)? - 1)?.to_vec1()
        };
        let wrong = |err| panic!("the model that was trained does not run: {err}");
        let written = text.write(args.letters, |tail| scores(tail).unwrap_or_else(wrong));
        println!("{written}");
    }
    Ok(group.shutdown()?)
}

/// Letters, and for each of them the one that follows.
fn tensors(pieces: &[Vec<i64>]) -> candle_core::Result<(Tensor, Tensor)> {
    let all = Tensor::new(pieces.to_vec(), &Device::Cpu)?;
    let length = all.dim(1)? - 1;
    let letters = all.narrow(1, 0, length)?.contiguous()?;
    Ok((letters, all.narrow(1, 1, length)?.flatten_all()?))
}
