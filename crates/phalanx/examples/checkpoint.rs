//! Training that goes on where it was after any process was killed:
//!
//! `phalanx run --nproc 3 --max-restarts 2 -- checkpoint DIR STEPS [MILLISECONDS PER STEP]`
//!
//! The model is a line through points; each rank visits its share of them in an order of its own,
//! which is a part of the checkpoint.

use std::time::Duration;

use phalanx::checkpoint::{Checkpoints, TensorRef};
use phalanx::prelude::*;

const POINTS: u64 = 30;
const EVERY: u64 = 5;

/// Where a rank is in its data.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
struct Sampler {
    next: u64,
    seed: u64,
}

impl Sampler {
    fn draw(&mut self, ranks: u64, rank: u64) -> f64 {
        self.seed = self
            .seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        self.next += 1;
        ((self.seed >> 33) % POINTS * ranks + rank) as f64 / POINTS as f64
    }
}

fn main() -> phalanx::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let number = |i: usize| args.get(i).and_then(|text| text.parse::<u64>().ok());
    let (Some(dir), Some(steps)) = (args.get(1), number(2)) else {
        return Err(phalanx::Error::invalid(
            "usage: checkpoint DIR STEPS [MS PER STEP]",
        ));
    };
    let pause = Duration::from_millis(number(3).unwrap_or(0));

    let group = phalanx::init()?;
    let (rank, ranks) = (group.rank() as u64, group.size() as u64);
    let checkpoints = Checkpoints::new(dir);
    let mut line = [0.0f64, 0.0];
    let mut sampler = Sampler {
        next: 0,
        seed: rank,
    };
    let mut first = 0;
    if let Some(last) = checkpoints.load::<Sampler>(&*group)? {
        line.copy_from_slice(&last.tensor("line")?.to_vec::<f64>()?);
        sampler = last.state(group.rank())?.clone();
        first = last.step + 1;
        println!("resumed after step {}", last.step);
    }
    for step in first..steps {
        let x = sampler.draw(ranks, rank);
        let error = line[0] * x + line[1] - (3.0 * x - 1.0);
        let mut gradient = [error * x, error];
        group.allreduce_in_place(&mut gradient, ReduceOp::Avg)?;
        line = [line[0] - 0.05 * gradient[0], line[1] - 0.05 * gradient[1]];
        if step % EVERY == EVERY - 1 {
            let tensors = [("line", TensorRef::new(&[2], &line)?)];
            checkpoints.save(&*group, step, &tensors, &sampler)?;
        }
        println!("step {step} pid {}", std::process::id());
        std::thread::sleep(pause);
    }
    let bits = line.map(|x| format!("{:016x}", x.to_bits())).concat();
    println!("parameters {bits} after {} samples", sampler.next);
    group.shutdown()
}
