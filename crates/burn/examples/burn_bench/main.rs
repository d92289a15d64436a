//! What distributed training costs with burn: `cargo xtask bench -- train [--json]`.
//!
//! *Overhead*: processor time of a step with gates, hooks and bucket copies in a world of one, beside
//! plain burn, both in this process and in turn. *Weak scaling*: time per step of one process
//! beside that of two ranks with as much work each, one computing thread per rank; and the same of
//! PyTorch's DDP on gloo, if there is a Python that has it.
#![forbid(unsafe_code)]

mod models;
mod ranks;

use std::error::Error;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Instant;

use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::Device;
use clap::Parser;
use phalanx::burn::{Ddp, DdpConfig};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use models::{Cnn, Encoder, Mlp, Trained};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const TORCH: &str = include_str!("torch_train.py");
/// Tells a process that it is a rank: which model.
const RANK_MARK: &str = "PHALANX_BENCH_TRAIN";
const LEARNING_RATE: f64 = 0.001;

/// Measure what distributed training costs with burn.
#[derive(Parser)]
struct Args {
    /// Steps of each kind, interleaved, for the overhead
    #[arg(long, default_value_t = 200)]
    steps: usize,
    /// Steps per run for weak scaling
    #[arg(long, default_value_t = 60)]
    scaling_steps: usize,
    /// Runs of each kind for weak scaling, taking turns
    #[arg(long, default_value_t = 5)]
    repeat: usize,
    /// Steps that do not count, in each process
    #[arg(long, default_value_t = 5)]
    warm_up: usize,
    /// Number of ranks for weak scaling
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// A Python with PyTorch, whose DDP on gloo is measured in turn
    #[arg(long, value_name = "PYTHON")]
    against_torch: Option<PathBuf>,
    /// Only the models whose name contains this
    #[arg(long, default_value = "")]
    only: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
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

type Measured<T> = Result<T, Box<dyn Error>>;

/// A model's name, and its measurements.
struct Kind {
    name: &'static str,
    overhead: fn(&Args) -> Measured<[Vec<f64>; 2]>,
    rank: fn(&Args) -> Measured<f64>,
}

const KINDS: [Kind; 3] = [
    Kind {
        name: "mlp",
        overhead: overhead::<Mlp>,
        rank: rank::<Mlp>,
    },
    Kind {
        name: "cnn",
        overhead: overhead::<Cnn>,
        rank: rank::<Cnn>,
    },
    Kind {
        name: "encoder",
        overhead: overhead::<Encoder>,
        rank: rank::<Encoder>,
    },
];

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    if let Ok(name) = std::env::var(RANK_MARK) {
        let kind = KINDS.iter().find(|kind| kind.name == name);
        println!("{}", (kind.ok_or("an unknown model")?.rank)(args)?);
        return Ok(());
    }
    let mut models = serde_json::Map::new();
    for kind in KINDS.iter().filter(|kind| kind.name.contains(&args.only)) {
        let mut figures = describe(&(kind.overhead)(args)?);
        let scaling = scaling(args, kind.name)?;
        for (name, value) in scaling.as_object().into_iter().flatten() {
            figures[name] = value.clone();
        }
        if !args.json {
            println!("{}", kind.name);
            for (name, value) in figures.as_object().into_iter().flatten() {
                println!("  {name:>28}  {:.4}", value.as_f64().unwrap_or(f64::NAN));
            }
        }
        models.insert(kind.name.into(), figures);
    }
    if args.json {
        println!(
            "{}",
            json!({"bench": "train", "ranks": args.ranks, "models": models})
        );
    }
    Ok(())
}

fn optimizer() -> ModuleOptimizer {
    SgdConfig::new().init()
}

fn plain_step<M: Trained>(model: M, optim: &mut ModuleOptimizer) -> M {
    let grads = GradientsParams::from_grads(model.loss().backward(), &model);
    optim.step(LEARNING_RATE, model, grads)
}

fn ddp_step<M: Trained>(ddp: &mut Ddp<M>, optim: &mut ModuleOptimizer) -> phalanx::ddp::Result<()> {
    let loss = ddp.forward(M::loss)?;
    let grads = ddp.backward(loss)?;
    ddp.update(|model| optim.step(LEARNING_RATE, model, grads));
    Ok(())
}

/// Processor time of this process in milliseconds: other jobs of the machine do not count. Not from
/// `/proc`, which learns of a running thread's time at the next tick or switch only: steps that
/// wake another thread would seem longer than those that do not.
fn processor_ms() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}

/// Processor times of plain steps and of steps in a world of one, in turn.
fn overhead<M: Trained>(args: &Args) -> Result<[Vec<f64>; 2], Box<dyn Error>> {
    let device = Device::flex().autodiff();
    let group = phalanx::init()?; // alone: no launcher has started this
    let mut plain = M::new(&device);
    let mut ddp = Ddp::new(plain.clone(), group.clone(), DdpConfig::default())?;
    let (mut plain_optim, mut ddp_optim) = (optimizer(), optimizer());
    let mut times = [Vec::new(), Vec::new()];
    for step in 0..args.warm_up + args.steps {
        // The second of two finds other things in the caches: they take turns in that too.
        for which in [step % 2, 1 - step % 2] {
            let start = processor_ms();
            match which {
                0 => plain = plain_step(plain, &mut plain_optim),
                _ => ddp_step(&mut ddp, &mut ddp_optim)?,
            }
            if step >= args.warm_up {
                times[which].push(processor_ms() - start);
            }
        }
    }
    group.shutdown()?;
    Ok(times)
}

/// Medians, and what is added on average, with its 95 % interval, from the differences of pairs.
fn describe([plain, ddp]: &[Vec<f64>; 2]) -> Value {
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let added: Vec<f64> = ddp
        .iter()
        .zip(plain)
        .map(|(ddp, plain)| ddp - plain)
        .collect();
    let (centre, base) = (mean(&added), mean(plain));
    let squares: Vec<f64> = added.iter().map(|value| (value - centre).powi(2)).collect();
    let half = 1.96 * (mean(&squares) / added.len() as f64).sqrt();
    let percent = |value: f64| 100.0 * value / base;
    json!({
        "plain_cpu_ms": median(plain),
        "ddp_cpu_ms": median(ddp),
        "overhead_percent": percent(centre),
        "overhead_percent_from": percent(centre - half),
        "overhead_percent_to": percent(centre + half),
    })
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Seconds per step of one rank: plain if it is alone.
fn rank<M: Trained>(args: &Args) -> Result<f64, Box<dyn Error>> {
    let device = Device::flex().autodiff();
    let group = phalanx::init()?;
    let mut optim = optimizer();
    let mut times = Vec::new();
    let mut plain = Some(M::new(&device));
    let mut ddp = match group.size() {
        1 => None,
        _ => {
            let model = plain.take().ok_or("a model")?;
            Some(Ddp::new(model, group.clone(), DdpConfig::default())?)
        }
    };
    for step in 0..args.warm_up + args.scaling_steps {
        let start = Instant::now();
        match &mut ddp {
            Some(ddp) => ddp_step(ddp, &mut optim)?,
            None => plain = plain.map(|model| plain_step(model, &mut optim)),
        }
        if step >= args.warm_up {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    group.shutdown()?;
    Ok(median(&times))
}

/// Medians of several runs, one rank and several, ours and theirs, all in turn.
fn scaling(args: &Args, name: &str) -> Result<Value, Box<dyn Error>> {
    let program = std::env::current_exe()?;
    let ours = || {
        let mut command = Command::new(&program);
        command
            .args(std::env::args_os().skip(1))
            .env(RANK_MARK, name);
        command
    };
    let [steps, warm_up] = [args.scaling_steps, args.warm_up].map(|count| count.to_string());
    let theirs = |python: &PathBuf| {
        let mut command = Command::new(python);
        command.args(["-c", TORCH, name, &steps, &warm_up]);
        command.env("TORCH_CPP_LOG_LEVEL", "ERROR");
        command
    };
    let mut times: [Vec<f64>; 4] = Default::default();
    for _ in 0..args.repeat.max(1) {
        for (which, ranks) in [(0, 1), (1, args.ranks)] {
            times[which].push(1e3 * ranks::measure(ranks, ours)?);
            if let Some(python) = &args.against_torch {
                times[which + 2].push(1e3 * ranks::measure(ranks, || theirs(python))?);
            }
        }
    }
    // Pairs of neighbouring runs, so that a busy minute counts for both of a ratio.
    let ratio = |one: &[f64], many: &[f64]| {
        median(
            &one.iter()
                .zip(many)
                .map(|(one, many)| one / many)
                .collect::<Vec<_>>(),
        )
    };
    let mut figures = json!({
        "one_rank_ms": median(&times[0]),
        "ranks_ms": median(&times[1]),
        "weak_scaling": ratio(&times[0], &times[1]),
    });
    if args.against_torch.is_some() {
        figures["torch_one_rank_ms"] = json!(median(&times[2]));
        figures["torch_ranks_ms"] = json!(median(&times[3]));
        figures["torch_weak_scaling"] = json!(ratio(&times[2], &times[3]));
    }
    Ok(figures)
}
