//! `phalanx bench overlap`: whether an asynchronous all-reduce runs while the caller does not wait.

use std::time::Duration;

use serde_json::json;

use super::allreduce::contestants::{Kind, Launcher};
use super::allreduce::window::{Answer, Dtype, Overlap, Task, Window};
use super::allreduce::{Memories, figures, parse_bytes, parse_ranks};
use super::stats::median;
use crate::Failure;

/// Measure what waiting costs when an all-reduce had twice its time: start it, sleep, then wait.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many processes.
    #[arg(long, value_delimiter = ',', default_values_t = [2], value_parser = parse_ranks)]
    ranks: Vec<usize>,
    /// Backends of ours by name.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "native",
        value_name = "NAME"
    )]
    backends: Vec<String>,
    /// Bytes to sum.
    #[arg(long, default_value_t = 25 << 20, value_parser = parse_bytes)]
    bytes: usize,
    /// Where the data lies: from the group's `allocate`, or anywhere.
    #[arg(long, value_enum, default_value_t = Memories::Registered)]
    memory: Memories,
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// One JSON object per line instead of a table.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let kinds = Kind::parse(&args.backends)?;
    if let Some(other) = kinds.iter().find(|kind| !matches!(kind, Kind::Own(_))) {
        return Err(format!("{} is not a backend of ours", other.name()).into());
    }
    let launcher = Launcher::new("python3".into())?;
    if !args.json {
        println!(
            "| ranks | backend | registered | bytes | all-reduce us | wait us | wait/all-reduce |"
        );
        println!("|--:|---|---|--:|--:|--:|--:|");
    }
    for &ranks in &args.ranks {
        for kind in &kinds {
            measure(args, &launcher, kind, ranks)?;
        }
    }
    Ok(())
}

fn measure(args: &Args, launcher: &Launcher, kind: &Kind, ranks: usize) -> Result<(), Failure> {
    let mut world = launcher.start(kind, ranks, None)?;
    let crowded = launcher.pinned(ranks).is_none();
    for &memory in args.memory.each() {
        let window = Window::new(args.bytes, Dtype::F32, memory, crowded);
        let (mut whole, mut waits, mut wrong) = (Vec::new(), Vec::new(), 0);
        for _ in 0..args.rounds {
            let answers = world.run(&Task::Run(window))?;
            let (duration_us, _) = figures(&answers);
            let overlap = Overlap {
                bytes: args.bytes,
                memory,
                iters: window.iters,
                sleep: Duration::from_secs_f64(2.0 * duration_us / 1e6),
            };
            let waited = world.run(&Task::Overlap(overlap))?;
            whole.push(duration_us);
            waits.push(figures(&waited).0);
            wrong += answers
                .iter()
                .chain(&waited)
                .map(|Answer { wrong, .. }| wrong)
                .sum::<u64>();
        }
        let (p50_us, wait_us) = (median(&whole), median(&waits));
        let (name, registered) = (
            kind.name(),
            memory == super::allreduce::window::Memory::Registered,
        );
        if args.json {
            println!(
                "{}",
                json!({
                    "bench": "overlap", "backend": name, "ranks": ranks, "bytes": args.bytes,
                    "dtype": "f32", "registered": registered, "pinned": !crowded,
                    "p50_us": p50_us, "wait_us": wait_us, "wait_share": wait_us / p50_us,
                    "iters": window.iters, "rounds": args.rounds, "verified": wrong == 0,
                })
            );
        } else {
            let (bytes, share) = (args.bytes, wait_us / p50_us);
            println!(
                "| {ranks} | {name} | {registered} | {bytes} | {p50_us:.0} | {wait_us:.1} | {share:.3} |"
            );
        }
        if wrong > 0 {
            return Err(format!("{name} of {ranks} ranks: {wrong} wrong elements").into());
        }
    }
    Ok(())
}
