//! What the examples with digits take and tell: the command line, a line per epoch, the end.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use phalanx::ddp::{Ddp, Replica, Tensor};
use phalanx::prelude::{ProcessGroup, ProcessGroupExt};
use serde::Serialize;
use sha2::{Digest, Sha256};

const BAR: usize = 20;

/// Learn handwritten digits with all ranks of a job.
#[derive(clap::Parser)]
pub(crate) struct Args {
    /// Passes over the data, if not as many as it takes
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) epochs: Option<u64>,

    /// The backend, if not the one that PHALANX_BACKEND or the default says
    #[arg(long)]
    backend: Option<String>,

    /// Write the figures of the end to this file, as JSON
    #[arg(long, value_name = "FILE")]
    summary: Option<PathBuf>,
}

impl Args {
    /// The group that the launcher and the command line ask for.
    pub(crate) fn init(&self) -> phalanx::Result<Arc<dyn ProcessGroup>> {
        match &self.backend {
            Some(backend) => phalanx::init_with(backend),
            None => phalanx::init(),
        }
    }

    /// Rank 0 tells how it ended.
    pub(crate) fn conclude<R: Replica>(
        &self,
        ddp: &Ddp<R>,
        epochs: u64,
        [correct, held_out]: [usize; 2],
        trained: Duration,
    ) -> Result<(), Box<dyn Error>> {
        let training_seconds = trained.as_secs_f64();
        let sha256 = common_digest(ddp)?;
        if ddp.group().rank() != 0 {
            return Ok(());
        }
        let summary = Summary {
            ranks: ddp.group().size(),
            backend: ddp.group().backend().to_owned(),
            epochs,
            held_out,
            correct,
            accuracy: correct as f64 / held_out as f64,
            sha256,
            training_seconds,
            step: Times::of(ddp),
        };
        println!("{summary}");
        match &self.summary {
            Some(file) => std::fs::write(file, serde_json::to_string(&summary)?)
                .map_err(|err| format!("write {}: {err}", file.display()).into()),
            None => Ok(()),
        }
    }
}

/// How the program ends.
pub(crate) fn end(result: Result<(), Box<dyn Error>>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            eprintln!("error: {err}");
            ExitCode::FAILURE
        }
    }
}

/// The digest of all parameters, which has to be the same on all ranks.
fn common_digest<R: Replica>(ddp: &Ddp<R>) -> Result<String, Box<dyn Error>> {
    let mut sha256 = Sha256::new();
    for (i, parameter) in ddp.model().parameters().iter().enumerate() {
        let mut values = vec![0; parameter.byte_len()];
        ddp.model().read(Tensor::Parameter(i), &mut values)?;
        sha256.update(values);
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

/// One pass over the data: shown as a line, because under a launcher output is lines.
#[derive(Debug)]
pub(crate) struct Epoch {
    number: u64,
    of: u64,
    loss: f64,
    accuracy: f64,
    samples_per_second: f64,
}

impl Epoch {
    /// From the sums of all ranks: loss, correct answers, examples.
    pub(crate) fn new(number: u64, of: u64, sums: [f64; 3], time: Duration) -> Self {
        let [loss, correct, examples] = sums;
        Self {
            number,
            of,
            loss: loss / examples,
            accuracy: correct / examples,
            samples_per_second: examples / time.as_secs_f64(),
        }
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let done = (BAR as u64 * self.number / self.of) as usize;
        let bar = "#".repeat(done) + &".".repeat(BAR - done);
        let (number, of, loss) = (self.number, self.of, self.loss);
        let accuracy = 100.0 * self.accuracy;
        let speed = self.samples_per_second;
        write!(f, "{bar} epoch {number:2}/{of}  loss {loss:.4}  ")?;
        write!(f, "accuracy {accuracy:5.1} %  {speed:6.0} samples/s")
    }
}

/// Where the time of a step goes on rank 0, on average, from the reducer's logging data.
#[derive(Debug, Serialize)]
pub(crate) struct Times {
    compute_us: f64,
    communication_us: f64,
    /// The share of communication that took place while backward computed; alone there is none.
    hidden: Option<f64>,
}

impl Times {
    pub(crate) fn of<R: Replica>(ddp: &Ddp<R>) -> Self {
        let average = ddp.reducer().stats().average;
        let us = |ns: u64| ns as f64 / 1000.0;
        let alone = ddp.group().size() == 1 || average.communication_ns == 0;
        let share = average.overlap_ns as f64 / average.communication_ns as f64;
        Self {
            compute_us: us(average.forward_ns + average.backward_compute_ns),
            communication_us: us(average.communication_ns),
            hidden: (!alone).then_some(share),
        }
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.hidden {
            Some(hidden) => write!(f, "{:.0} % of communication hidden", 100.0 * hidden),
            None => f.write_str("no communication"),
        }
    }
}

/// The end of training.
#[derive(Debug, Serialize)]
struct Summary {
    ranks: usize,
    backend: String,
    epochs: u64,
    /// How many digits were held out, and how many of them are recognised.
    held_out: usize,
    correct: usize,
    accuracy: f64,
    /// Of the parameters, the same on all ranks.
    sha256: String,
    training_seconds: f64,
    step: Times,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = 100.0 * self.accuracy;
        let (correct, held_out) = (self.correct, self.held_out);
        writeln!(
            f,
            "held-out accuracy {percent:.1} % ({correct} of {held_out})"
        )?;
        let (ranks, sha256) = (self.ranks, &self.sha256);
        write!(f, "ranks {ranks}, identical parameters sha256 {sha256}")
    }
}
