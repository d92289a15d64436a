//! What rank 0 tells while training goes on, and at its end.

use std::fmt;
use std::time::Duration;

use phalanx::ddp::builtin::Net;
use phalanx::prelude::*;
use serde::Serialize;

const BAR: usize = 20;

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
    pub(crate) fn of(ddp: &Ddp<Net>) -> Self {
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
pub(crate) struct Summary {
    pub(crate) ranks: usize,
    pub(crate) backend: String,
    pub(crate) epochs: u64,
    /// How many digits were held out, and how many of them are recognised.
    pub(crate) held_out: usize,
    pub(crate) correct: usize,
    pub(crate) accuracy: f64,
    /// Of the parameters, the same on all ranks.
    pub(crate) sha256: String,
    pub(crate) training_seconds: f64,
    pub(crate) step: Times,
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
