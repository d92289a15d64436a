//! `phalanx trace`: reads the flight recordings of all ranks together.

mod analysis;
mod perfetto;
mod report;
mod svg;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use phalanx_pg::Trace;

use crate::Failure;

/// Read the flight recordings of a job's ranks: who is behind, in what, since when, who disagrees.
///
/// Ranks write them when a group breaks, if PHALANX_DUMP_DIR is set. Times are those of each host's
/// clock.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Recordings, one per rank, or directories with rank_N.json in them.
    #[arg(required = true, value_name = "FILES")]
    files: Vec<PathBuf>,

    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,

    /// Also write a timeline that ui.perfetto.dev and chrome://tracing open.
    #[arg(long, value_name = "OUT.json")]
    perfetto: Option<PathBuf>,

    /// Also draw the timeline.
    #[arg(long, value_name = "OUT.svg")]
    svg: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Failure> {
    let traces = read_all(&args.files)?;
    let analysis = analysis::analyse(&traces);
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&analysis)?),
        false => print!("{}", report::text(&analysis)),
    }
    let write = |path: &Path, text: String| {
        fs::write(path, text).map_err(|err| format!("{}: {err}", path.display()))
    };
    if let Some(path) = &args.perfetto {
        write(path, serde_json::to_string(&perfetto::events(&traces))?)?;
    }
    if let Some(path) = &args.svg {
        write(path, svg::draw(&traces))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The recordings in the order of ranks.
fn read_all(paths: &[PathBuf]) -> Result<Vec<Trace>, Failure> {
    let mut files = Vec::new();
    for path in paths {
        match path.is_dir() {
            true => files.extend(recordings_in(path)?),
            false => files.push(path.clone()),
        }
    }
    let mut traces: Vec<(Trace, &Path)> = Vec::new();
    for file in &files {
        let shown = file.display();
        let text = fs::read(file).map_err(|err| format!("{shown}: {err}"))?;
        let trace: Trace = serde_json::from_slice(&text)
            .map_err(|err| format!("{shown} is not a flight recording of phalanx: {err}"))?;
        traces.push((trace, file));
    }
    traces.sort_by_key(|(trace, _)| trace.rank);
    for pair in traces.windows(2) {
        if let [(a, first), (b, second)] = pair
            && a.rank == b.rank
        {
            return Err(format!(
                "{} and {} are both of rank {}; give the recordings of one job and attempt",
                first.display(),
                second.display(),
                a.rank
            )
            .into());
        }
    }
    Ok(traces.into_iter().map(|(trace, _)| trace).collect())
}

fn recordings_in(dir: &Path) -> Result<Vec<PathBuf>, Failure> {
    let shown = dir.display();
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(|err| format!("{shown}: {err}"))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("rank_") && name.ends_with(".json") {
            found.push(path);
        }
    }
    match found.is_empty() {
        false => Ok(found),
        true => Err(format!("no rank_N.json in {shown}; was PHALANX_DUMP_DIR set?").into()),
    }
}

/// When the last thing that is recorded happened.
fn last_moment(traces: &[Trace]) -> u64 {
    let entries = traces.iter().flat_map(|trace| &trace.entries);
    let moments = entries.flat_map(|entry| {
        let arrivals = entry.arrivals.iter().map(|arrival| arrival.time_ns);
        let ends = entry.time_discovered_completed_ns;
        arrivals.chain(ends).chain([entry.time_created_ns])
    });
    moments.max().unwrap_or(0)
}

fn operation(entry: &phalanx_pg::TraceEntry) -> &str {
    without_backend(&entry.profiling_name)
}

/// `all_reduce` of `native:all_reduce`, and of `cpu:native,cuda:nccl:all_reduce`.
fn without_backend(name: &str) -> &str {
    name.rsplit_once(':')
        .map_or(name, |(_, operation)| operation)
}

#[cfg(test)]
#[test]
fn an_operation_is_what_is_behind_the_backends() {
    for name in [
        "all_reduce",
        "native:all_reduce",
        "cpu:native,cuda:nccl:all_reduce",
    ] {
        assert_eq!(without_backend(name), "all_reduce");
    }
}

/// What other recordings are compared with, in the tests of this module.
#[cfg(test)]
mod samples;
