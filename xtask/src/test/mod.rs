//! `cargo xtask test`: every check there is, and what it came to.

mod needs;
mod plan;
mod report;
mod suites;
mod tally;

use std::process::ExitCode;
use std::time::Instant;

use crate::{Failure, nccl};
use plan::Plan;
use report::{Line, Report};
use suites::{SUITES, Suite};
use tally::Tally;

/// Run all checks: format, lints, unit and multi-process tests, doc tests, documentation.
///
/// A failing suite does not stop the others; its output is repeated at the end, before a table of
/// suites and a last line `N passed, M failed`. A suite whose tools are missing is skipped, and
/// the table says why; what the gloo and mpi suites need is installed first as root on Debian and
/// Ubuntu. The first lines say how long it takes, what will be installed and what skipped. Tests marked `#[ignore]` count as skipped,
/// except with the reason "the child process of another test".
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Rust only: leave out what needs C libraries or a training framework
    #[arg(long)]
    pub(crate) quick: bool,

    /// Count anything skipped as a failure (for CI); fetches NCCL (305 MB) into the cache directory
    #[arg(long)]
    require_all: bool,

    /// Run only these suites
    #[arg(long = "only", value_name = "SUITE", value_parser = suites::names())]
    only: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Failure> {
    let chosen: Vec<&Suite> = SUITES
        .iter()
        .filter(|suite| args.only.is_empty() || args.only.iter().any(|name| name == suite.name))
        .collect();
    print!("{}", Plan::new(&chosen, args));
    if args.require_all && chosen.iter().any(|suite| suite.name == "nccl") {
        // Without it the suite is skipped, which counts as a failure and says why.
        if let Err(failure) = nccl::WHEELS.fetch() {
            println!("NCCL could not be fetched: {failure}");
        }
    }
    let mut report = Report::new(args.require_all);
    for (i, suite) in chosen.iter().enumerate() {
        println!(
            "\n=== {} of {}: {} ({})",
            i + 1,
            chosen.len(),
            suite.name,
            suite.about
        );
        let line = run_suite(suite, args);
        println!("=== {line}");
        report.add(line);
    }
    print!("{report}");
    Ok(match report.succeeded() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn run_suite(suite: &Suite, args: &Args) -> Line {
    let start = Instant::now();
    let mut tally = Tally::default();
    if args.quick && !suite.quick {
        tally.skip(1, "left out by --quick");
    } else if let Some(missing) = suite.needs.iter().find_map(|need| need.missing()) {
        tally.skip(1, &missing);
    } else {
        for command in (suite.commands)(args) {
            let status = command.stream(|line| tally.read(line));
            tally.end_of_command(status);
        }
    }
    Line::new(suite.name, start.elapsed(), tally)
}
