//! The load generator: one thread in a process of its own, the same for every server.
//!
//! `phalanx bench store` starts it once per window with a [`Task`] as JSON and reads one
//! [`Sample`] from its stdout.

mod barrier;
mod crowd;
mod disturbed;
mod net;
pub(crate) mod pairs;
mod probe;

use std::collections::BTreeMap;
use std::net::SocketAddrV4;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::cpu;
use crate::Failure;

pub(crate) use disturbed::Disturbance;
pub(crate) use pairs::Pattern;

/// Runs one window of load; started by `phalanx bench store`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The task as JSON.
    task: String,
}

/// One window.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) server: SocketAddrV4,
    pub(crate) server_pid: u32,
    /// The processor to stay on.
    pub(crate) processor: Option<usize>,
    pub(crate) seconds: f64,
    pub(crate) work: Work,
}

/// What the clients do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Work {
    /// Each client stores a value and reads it back, over and over.
    Pairs {
        conns: usize,
        pattern: Pattern,
        /// The value is always the same: for a responder that stores nothing.
        fixed: bool,
    },
    /// All clients meet, over and over.
    Barrier { conns: usize, form: BarrierForm },
    /// New clients connect and meet once.
    ConnectBarrier { conns: usize },
    /// One client asks at a steady pace while others do something annoying.
    Disturbed(Disturbance),
}

/// How clients meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum BarrierForm {
    /// `ADD`, the last one `SET`s, all `WAIT`.
    Add,
    /// The `BARRIER` request.
    Opcode,
}

/// What a window gave. Names of figures end in their unit.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sample {
    pub(crate) figures: BTreeMap<String, f64>,
    /// Answers that were not what they had to be, or that never came.
    pub(crate) problem: Option<String>,
}

impl Sample {
    fn note(&mut self, name: &str, value: f64) {
        self.figures.insert(name.into(), value);
    }
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let task: Task = serde_json::from_str(&args.task)?;
    if let Some(processor) = task.processor {
        cpu::pin(processor)?;
    }
    let sample = match measure(&task) {
        Ok(sample) => sample,
        Err(failure) => Sample {
            problem: Some(failure.to_string()),
            ..Sample::default()
        },
    };
    println!("{}", serde_json::to_string(&sample)?);
    Ok(())
}

fn measure(task: &Task) -> Result<Sample, Failure> {
    match task.work {
        Work::Pairs {
            conns,
            pattern,
            fixed,
        } => pairs::run(task, conns, pattern, fixed),
        Work::Barrier { conns, form } => barrier::run(task, conns, form),
        Work::ConnectBarrier { conns } => crowd::connect_and_meet(task, conns),
        Work::Disturbed(disturbance) => disturbed::run(task, disturbance),
    }
}

impl Task {
    fn window(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }

    /// A key that no other window of this run uses.
    fn fresh_key(&self, number: usize) -> Vec<u8> {
        format!("/bench/{}/{number:06}", std::process::id()).into_bytes()
    }
}

fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1e3
}
