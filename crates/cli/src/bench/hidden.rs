//! `phalanx bench hidden`: how much of the communication a backward hides on a slow line.

use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use phalanx::pg::{Buffer, DType, ProcessGroup, ProcessGroupExt};
use phalanx_reducer::{GradTarget, GradView, ParamSpec, Reducer, ReducerConfig, Sync, verify};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::cpu::{self, Placement};
use super::ddp::params::Params;
use super::namespaces::{self, Namespaces};
use super::processes::{finish, start};
use super::stats::median;
use crate::Failure;

/// Tells a process that it is a rank of the measurement.
const RANK_MARK: &str = "PHALANX_BENCH_HIDDEN_RANK";
/// In network namespaces of our own every port is free.
const PORT: u16 = 29_500;
/// One on each end of the line.
const RANKS: usize = 2;
/// Passes before anything is measured: the rebuild is at the second.
const WARM_UP: usize = 3;

/// Measure how much of the communication a backward hides between two hosts on a slow line.
///
/// Two network namespaces joined by a line of the given rate (root only). Each round times the
/// averaging of all gradients with nothing to compute, the computation with nothing to average, and
/// both together. Hidden is the share of the communication that nobody waited for once the last gradient
/// was there. Slower is how much longer the backward itself took: communication needs processor time
/// too, and here it has no processor of its own.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Name of the backend
    #[arg(long, default_value = "native")]
    backend: String,
    /// Whose parameters
    #[arg(long, value_enum, default_value = "resnet50")]
    params: Params,
    /// Rate of the line, each way
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    mbit: u32,
    /// How long a backward computes, as a multiple of the communication alone
    #[arg(long, default_value_t = 1.5)]
    backward: f64,
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Medians of one rank, in milliseconds.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Figures {
    comm_ms: f64,
    backward_ms: f64,
    both_ms: f64,
    waited_ms: f64,
    verified: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    if std::env::var_os(RANK_MARK).is_some() {
        println!("{}", serde_json::to_string(&rank(args)?)?);
        return Ok(());
    }
    let hosts = Namespaces::new(RANKS)?;
    hosts.limit(args.mbit)?;
    let master = (namespaces::address(0), PORT).into();
    let mut ranks = Vec::new();
    for rank in 0..RANKS {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(std::env::args_os().skip(1))
            .env(RANK_MARK, "1")
            .env("PHALANX_IFACE", namespaces::INTERFACE);
        ranks.push(start(hosts.confine(rank, &command), rank, RANKS, master)?);
    }
    let outputs = finish(ranks)?;
    let all: Vec<Figures> = outputs
        .iter()
        .map(|output| serde_json::from_str(output.trim()))
        .collect::<Result<_, _>>()?;
    let verified = all.iter().all(|figures| figures.verified);
    report(args, &all[0], verified);
    match verified {
        true => Ok(()),
        false => Err("averages were wrong".into()),
    }
}

fn report(args: &Args, figures: &Figures, verified: bool) {
    let object = json!({
        "bench": "hidden",
        "backend": args.backend,
        "ranks": RANKS,
        "params": args.params.name(),
        "mbit": args.mbit,
        "rounds": args.rounds,
        "comm_ms": figures.comm_ms,
        "backward_ms": figures.backward_ms,
        "both_ms": figures.both_ms,
        "waited_ms": figures.waited_ms,
        "hidden": 1.0 - figures.waited_ms / figures.comm_ms,
        "slower": (figures.both_ms - figures.waited_ms) / figures.backward_ms,
        "verified": verified,
    });
    if args.json {
        println!("{object}");
        return;
    }
    for (name, value) in object.as_object().into_iter().flatten() {
        println!("{name:>12}  {value}");
    }
}

/// Measures, and returns the figures of this rank.
fn rank(args: &Args) -> Result<Figures, Failure> {
    // A host of its own has processors of its own.
    if let Some((first, last)) = Placement::Apart.processors().ok().flatten() {
        let own = std::env::var("RANK")? == "0";
        cpu::pin(if own { first } else { last })?;
    }
    let group = phalanx::init_with(&args.backend)?;
    let mut bench = Bench::new(args, Arc::clone(&group))?;
    for _ in 0..WARM_UP {
        bench.average(0.0)?;
    }
    let bare: Vec<f64> = (0..3)
        .map(|_| bench.average(0.0).map(|(took, _)| took))
        .collect::<Result<_, _>>()?;
    // Rank 0's figure for all: they compute the same.
    let total = Buffer::from_vec(vec![median(&bare) * args.backward * per_ms()]);
    let total = group.broadcast(total, 0)?.wait()?.as_slice::<f64>()?[0];
    let mut times = [const { Vec::new() }; 4];
    for _ in 0..args.rounds {
        let (comm, _) = bench.average(0.0)?;
        let backward = bench.compute(total)?;
        let (both, waited) = bench.average(total)?;
        let round = [comm, backward, both, waited];
        times
            .iter_mut()
            .zip(round)
            .for_each(|(times, took)| times.push(took));
    }
    let [comm_ms, backward_ms, both_ms, waited_ms] = times.map(|times| median(&times));
    group.shutdown()?;
    Ok(Figures {
        comm_ms,
        backward_ms,
        both_ms,
        waited_ms,
        verified: bench.wrong == 0,
    })
}

struct Bench {
    group: Arc<dyn ProcessGroup>,
    reducer: Reducer,
    grads: Vec<Vec<f32>>,
    pass: usize,
    /// Averages that were not what they should be.
    wrong: usize,
}

impl Bench {
    fn new(args: &Args, group: Arc<dyn ProcessGroup>) -> Result<Self, Failure> {
        let lens = args.params.lens();
        let spec = |(i, &len): (usize, &usize)| ParamSpec::new(format!("p{i}"), [len], DType::F32);
        let params: Vec<ParamSpec> = lens.iter().enumerate().map(spec).collect();
        verify(&*group, &params, &[])?;
        let reducer = Reducer::new(params, Arc::clone(&group), ReducerConfig::default())?;
        Ok(Self {
            group,
            reducer,
            grads: lens.iter().map(|&len| vec![0.0; len]).collect(),
            pass: 0,
            wrong: 0,
        })
    }

    /// One backward of this many steps, as many for every parameter, and its averages: how long that
    /// took, and how much of it was waiting after the last gradient.
    ///
    /// In a convolutional network the many parameters of its end take no longer to differentiate
    /// than the few of its beginning.
    fn average(&mut self, steps: f64) -> Result<(f64, f64), Failure> {
        self.pass += 1;
        let value = (self.group.rank() + self.pass) as f32;
        self.grads.iter_mut().for_each(|grad| grad.fill(value));
        let pass = self.reducer.begin(GradTarget::Model, Sync::Yes)?;
        self.group.barrier()?;
        let start = Instant::now();
        let sink = pass.sink();
        for (slot, grad) in self.grads.iter().enumerate().rev() {
            compute(steps / self.grads.len() as f64);
            sink.grad_ready(slot, GradView::dense(grad))?;
        }
        let ready = Instant::now();
        let reduced = pass.finish()?;
        let (took, waited) = (ms(start), ms(ready));
        let expected = self.pass as f32 + (self.group.size() - 1) as f32 / 2.0;
        for slot in 0..self.grads.len() {
            let view = reduced.dense(slot).ok_or("a gradient is missing")?;
            let view = view.as_slice::<f32>()?;
            self.wrong += view.iter().filter(|&&got| got != expected).count();
        }
        Ok((took, waited))
    }

    fn compute(&self, steps: f64) -> Result<f64, Failure> {
        self.group.barrier()?;
        let start = Instant::now();
        for _ in &self.grads {
            compute(steps / self.grads.len() as f64);
        }
        Ok(ms(start))
    }
}

/// Work for a processor, not for a clock: it takes longer if somebody else takes the processor.
fn compute(steps: f64) {
    let mut number = 1u64;
    for step in 0..steps as u64 {
        number = std::hint::black_box(number.wrapping_mul(6_364_136_223_846_793_005) ^ step);
    }
}

/// Steps that take a millisecond.
fn per_ms() -> f64 {
    const STEPS: f64 = 2e7;
    let start = Instant::now();
    compute(STEPS);
    STEPS / ms(start)
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}
