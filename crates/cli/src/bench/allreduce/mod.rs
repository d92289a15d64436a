//! `phalanx bench allreduce`: our backends next to PyTorch's gloo, bare libraries and the roof.

pub(crate) mod contestants;
mod distance;
mod mpi;
pub(crate) mod rank;
mod report;
pub(crate) mod roof;
mod svg;
pub(crate) mod window;
mod world;

use std::path::PathBuf;

use super::cache;
use super::namespaces::Namespaces;
use super::stats::percentile;
use crate::Failure;
use contestants::{Kind, Launcher};
use report::{Comparison, Series, count_ranks};
use window::{Answer, Dtype, Memory, Task, Window};
use world::World;

/// Measure all-reduce: times of sums over several sizes, each backend a world of processes.
///
/// All worlds of one size live at the same time and run in turn, in the opposite order every other
/// round; a time is the median over the rounds of a round's median, on the slowest rank. "roof" is
/// what the additions, loads and stores alone take.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many processes; like other lists, separated by commas.
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4, 8], value_parser = parse_ranks)]
    ranks: Vec<usize>,
    /// Backends of ours by name; to compare with: `torch-gloo` (PyTorch's), `libgloo`, `openmpi`
    /// and `intelmpi` (the libraries without us).
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "native",
        value_name = "NAME"
    )]
    backends: Vec<String>,
    /// Bytes to sum: multiples of 4, up to 1073741824.
    #[arg(long, value_delimiter = ',', value_parser = parse_bytes,
          default_values_t = [4, 1024, 65_536, 1_048_576, 16_777_216, 67_108_864])]
    sizes: Vec<usize>,
    /// Where the data of our backends lies: from the group's `allocate`, or anywhere.
    #[arg(long, value_enum, default_value_t = Memories::Registered)]
    memory: Memories,
    /// What is summed. Several take turns, as backends do.
    #[arg(long = "dtype", value_enum, value_delimiter = ',', default_values_t = [Dtype::F32])]
    dtypes: Vec<Dtype>,
    /// Windows for each backend and size.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// One JSON object per line instead of a table.
    #[arg(long)]
    json: bool,
    /// Draw the curves into this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// A Python that has torch 2.13, instead of the one that `cargo xtask interop` installs.
    #[arg(long, value_name = "PYTHON")]
    torch: Option<PathBuf>,
    /// Pretend that ranks are on different hosts.
    #[arg(long, value_enum)]
    hosts: Option<Hosts>,
    /// How many ranks each of these hosts has.
    #[arg(long, default_value_t = 1, value_name = "N", requires = "hosts", value_parser = parse_ranks)]
    ranks_per_host: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Memories {
    Registered,
    Plain,
    Both,
}

impl Memories {
    pub(crate) fn each(self) -> &'static [Memory] {
        match self {
            Self::Registered => &[Memory::Registered],
            Self::Plain => &[Memory::Plain],
            Self::Both => &[Memory::Registered, Memory::Plain],
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Hosts {
    /// Each host a network namespace, joined by veth. Needs root.
    Namespaces,
}

pub(crate) fn parse_ranks(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(ranks @ 1..=64) => Ok(ranks),
        _ => Err("from 1 to 64".into()),
    }
}

/// Whole elements of every type, and few enough for every program's counters.
pub(crate) fn parse_bytes(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(bytes @ 4..=0x4000_0000) if bytes % 4 == 0 => Ok(bytes),
        _ => Err("a multiple of 4, from 4 to 1073741824".into()),
    }
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    if cfg!(debug_assertions) {
        eprintln!("this program was built for debugging: its times, the roof's too, say little");
    }
    let kinds = Kind::parse(&args.backends)?;
    if let Some(file) = &args.svg {
        svg::check(file)?;
    }
    let launcher = Launcher::new(python(args.torch.clone()))?;
    let mut comparisons = Vec::new();
    for ranks in once_each(&args.ranks) {
        let comparison = compare(args, &launcher, &kinds, ranks)?;
        let lines = match args.json {
            true => comparison
                .json_lines()
                .iter()
                .map(ToString::to_string)
                .collect(),
            false => comparison.table(),
        };
        lines.iter().for_each(|line| println!("{line}"));
        comparisons.push(comparison);
    }
    let measured = |comparison: &Comparison| comparison.has_figures();
    if let Some(file) = args
        .svg
        .as_ref()
        .filter(|_| comparisons.iter().any(measured))
    {
        svg::draw(file, &comparisons)?;
    }
    let problems: Vec<_> = comparisons.iter().flat_map(Comparison::problems).collect();
    match problems.is_empty() {
        true => Ok(()),
        false => Err(format!("not verified: {}", problems.join("; ")).into()),
    }
}

/// The interpreter given, or the one in the user's cache directory.
fn python(given: Option<PathBuf>) -> PathBuf {
    let cached = || Some(cache::dir("torch-2.13.0")?.join("bin/python"));
    given.or_else(cached).unwrap_or_else(|| "python3".into())
}

/// All rounds of worlds of one size.
fn compare(
    args: &Args,
    launcher: &Launcher,
    kinds: &[Kind],
    ranks: usize,
) -> Result<Comparison, Failure> {
    let hosts = match (args.hosts, args.ranks_per_host) {
        (Some(Hosts::Namespaces), local) if ranks.is_multiple_of(local) => {
            Some(Namespaces::new(ranks / local)?)
        }
        (Some(_), local) => {
            let what = format!("{ranks} ranks cannot be shared out to hosts of {local}");
            return Err(what.into());
        }
        (None, _) => None,
    };
    let (sizes, dtypes) = (once_each(&args.sizes), once_each(&args.dtypes));
    let (mut worlds, mut series) = (Vec::new(), Vec::new());
    for kind in kinds.iter().chain([&Kind::Roof]) {
        eprintln!("{}: starting {}", count_ranks(ranks), kind.name());
        let dtypes = match kind {
            // Of as many bytes, whatever they are.
            Kind::Roof => &[Dtype::F32],
            _ => dtypes.as_slice(),
        };
        let excuse = |dtype: &Dtype| kind.excuse(*dtype, hosts.is_some());
        let started = match dtypes.iter().map(excuse).collect::<Option<Vec<_>>>() {
            Some(excuses) => Err(excuses.join("; ").into()),
            None => launcher.start(kind, ranks, hosts.as_ref()),
        };
        let memories = match kind {
            Kind::Own(_) => args.memory.each(),
            _ => &[Memory::Plain],
        };
        if let Ok(world) = &started {
            eprintln!("{}: {}", kind.name(), world.version);
        }
        let missing = started.as_ref().err().map(ToString::to_string);
        for &memory in memories {
            for &dtype in dtypes {
                let excuse = excuse(&dtype).map(str::to_owned);
                let missing = excuse.or_else(|| missing.clone());
                let kind = kind.clone();
                series.push(Series::new(kind, memory, dtype, worlds.len(), missing));
            }
        }
        worlds.push(started.ok());
    }
    let pinned = launcher.pinned(ranks).is_some();
    let mut distances_ns = Vec::new();
    for round in 0..args.rounds {
        let (world, rounds) = (count_ranks(ranks), args.rounds);
        eprintln!("{world}: round {} of {rounds}", round + 1);
        for &bytes in &sizes {
            distances_ns.extend(launcher.neighbours().and_then(distance::round_trip_ns));
            let mut order: Vec<&mut Series> = series.iter_mut().collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for series in order {
                let window = Window::new(bytes, series.dtype, series.memory, !pinned);
                measure(series, &mut worlds, window);
            }
        }
    }
    Ok(Comparison {
        ranks,
        pinned,
        hosts: hosts.as_ref().map(Namespaces::count),
        sizes,
        series,
        distances_ns,
    })
}

/// What was asked for, without what was asked for before.
fn once_each<T: Copy + PartialEq>(all: &[T]) -> Vec<T> {
    let first = |&(at, value): &(usize, &T)| !all[..at].contains(value);
    let once = all.iter().enumerate().filter(first);
    once.map(|(_, &value)| value).collect()
}

/// One window. A world that fails has no further ones.
fn measure(series: &mut Series, worlds: &mut [Option<World>], window: Window) {
    if series.missing.is_some() {
        return;
    }
    let world = &mut worlds[series.world];
    let Some(running) = world else { return };
    match running.run(&Task::Run(window)) {
        Ok(answers) => {
            let (p50_us, min_us) = figures(&answers);
            let wrong = answers.iter().map(|answer| answer.wrong).sum();
            series.record(&window, p50_us, min_us, wrong);
        }
        Err(failure) => {
            series.failed = Some(format!("{} bytes: {failure}", window.bytes));
            *world = None;
        }
    }
}

/// Median and minimum, in microseconds, on the rank where each is longest: an operation is over
/// when it is over everywhere.
pub(crate) fn figures(answers: &[Answer]) -> (f64, f64) {
    let us = |nanos: u64| nanos as f64 / 1e3;
    let each = answers.iter().map(|answer| {
        let mut sorted = answer.nanos.clone();
        sorted.sort_unstable();
        (us(percentile(&sorted, 0.5)), us(sorted[0]))
    });
    each.fold((0.0, 0.0), |(p50, min), (a, b)| {
        (f64::max(p50, a), f64::max(min, b))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_the_slowest_ranks() {
        let answer = |nanos: &[u64]| Answer {
            wrong: 0,
            nanos: nanos.to_vec(),
        };
        let answers = [answer(&[3000, 1000, 2000]), answer(&[9000, 500, 4000])];
        assert_eq!(figures(&answers), (4.0, 1.0));
    }

    #[test]
    fn what_is_asked_for_twice_is_measured_once() {
        assert_eq!(once_each(&[4, 1024, 4, 8, 1024]), [4, 1024, 8]);
        assert!(once_each::<usize>(&[]).is_empty());
    }

    #[test]
    fn sizes_are_whole_elements() {
        assert_eq!(parse_bytes("1024"), Ok(1024));
        for bad in ["0", "6", "-4", "x", "1073741828"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }
}
