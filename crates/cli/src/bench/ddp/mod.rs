//! `phalanx bench ddp`: what averaging gradients adds to a backward.

pub(super) mod params;
mod rank;
mod torch;

use std::process::Command;

use phalanx_store::TcpStoreServer;
use serde::{Deserialize, Serialize};
use serde_json::json;

use self::params::Params;
use super::processes::{finish, start};
use super::stats::median;
use crate::Failure;

/// Tells a process that it is a rank of the measurement.
const RANK_MARK: &str = "PHALANX_BENCH_DDP_RANK";

/// Tells the C library, in our ranks and in PyTorch's, not to give memory back to the system. A
/// backward would have to ask for it again, page by page, for longer than averaging takes.
const KEEP_MEMORY: [(&str, &str); 2] = [
    ("MALLOC_TRIM_THRESHOLD_", "4000000000"),
    ("MALLOC_MMAP_THRESHOLD_", "4000000000"),
];

/// Measure what averaging gradients adds to a backward of no work.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of processes
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Name of the backend
    #[arg(long, default_value = "native")]
    backend: String,
    /// Whose parameters
    #[arg(long, value_enum, default_value = "resnet50")]
    params: Params,
    /// Averages are dropped before the next backward, instead of being kept until it has ended
    #[arg(long)]
    view: bool,
    /// Backwards of each kind per repetition, interleaved
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Repetitions, each with new processes, taking turns with PyTorch
    #[arg(long, default_value_t = 3)]
    repeat: usize,
    /// A Python with PyTorch, whose DDP on gloo is measured in turn
    #[arg(long, value_name = "PYTHON")]
    against_torch: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What one repetition found, in milliseconds.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Figures {
    local_ms: f64,
    ddp_ms: f64,
    floor_ms: f64,
    verified: bool,
    /// Growth of the memory in use, from a tenth of the rounds to the end.
    #[serde(default)]
    grown_kib: i64,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    if std::env::var_os(RANK_MARK).is_some() {
        println!("{}", serde_json::to_string(&rank::run(args)?)?);
        return Ok(());
    }
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..args.repeat.max(1) {
        ours.push(measure(args)?);
        if let Some(python) = &args.against_torch {
            theirs.push(torch::measure(python, args)?);
        }
    }
    report(args, &ours, &theirs);
    match ours.iter().all(|figures| figures.verified) {
        true => Ok(()),
        false => Err("averages were wrong".into()),
    }
}

/// Starts the ranks and takes rank 0's figures.
fn measure(args: &Args) -> Result<Figures, Failure> {
    let server = TcpStoreServer::start(&["127.0.0.1:0".parse()?], None)?;
    let mut ranks = Vec::with_capacity(args.ranks);
    for rank in 0..args.ranks {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(std::env::args_os().skip(1))
            .env(RANK_MARK, "1")
            .envs(KEEP_MEMORY)
            .env("TORCHELASTIC_USE_AGENT_STORE", "True");
        ranks.push(start(command, rank, args.ranks, server.local_addr())?);
    }
    let outputs = finish(ranks)?;
    let figures: Vec<Figures> = outputs
        .iter()
        .map(|output| serde_json::from_str(output.trim()))
        .collect::<Result<_, _>>()?;
    Ok(Figures {
        verified: figures.iter().all(|figures| figures.verified),
        grown_kib: figures.iter().map(|f| f.grown_kib).max().unwrap_or(0),
        ..figures[0]
    })
}

fn report(args: &Args, ours: &[Figures], theirs: &[Figures]) {
    let of = |list: &[Figures], figure: fn(&Figures) -> f64| -> f64 {
        median(&list.iter().map(figure).collect::<Vec<_>>())
    };
    let sync = |figures: &Figures| figures.ddp_ms - figures.local_ms;
    let sync_ms = of(ours, sync);
    let floor_ms = of(ours, |figures| figures.floor_ms);
    let mut object = json!({
        "bench": "ddp",
        "backend": args.backend,
        "ranks": args.ranks,
        "params": args.params.name(),
        "tensors": args.params.lens().len(),
        "view": args.view,
        "local_ms": of(ours, |figures| figures.local_ms),
        "ddp_ms": of(ours, |figures| figures.ddp_ms),
        "sync_ms": sync_ms,
        "floor_ms": floor_ms,
        "sync_over_floor": sync_ms / floor_ms,
        "grown_kib": ours.iter().map(|figures| figures.grown_kib).max(),
        "verified": ours.iter().all(|figures| figures.verified),
    });
    if !theirs.is_empty() {
        let torch = of(theirs, sync);
        object["torch_sync_ms"] = json!(torch);
        object["torch_over_sync"] = json!(torch / sync_ms);
    }
    if args.json {
        println!("{object}");
        return;
    }
    for (name, value) in object.as_object().into_iter().flatten() {
        println!("{name:>16}  {value}");
    }
}
