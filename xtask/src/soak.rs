//! `cargo xtask soak`: the long versions of what the tests sample.

use std::process::ExitCode;

use crate::Failure;
use crate::shell::Cmd;

/// Run a long version of what `cargo xtask test` samples.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Every combination of the process group suite on the reference backend: every size, memory
    /// and mode for each call, type and operator, with threads and with processes as ranks. Hours
    /// for all world sizes; prints each case with its time
    Conformance {
        /// World sizes, separated by commas
        #[arg(long, default_value = "1,2,3,4,8")]
        ranks: String,

        /// Start no further case after this time
        #[arg(long)]
        minutes: Option<u32>,
    },
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Failure> {
    let What::Conformance { ranks, minutes } = &args.what;
    let run = [
        "run",
        "--package",
        "phalanx-conformance",
        "--example",
        "soak",
    ];
    let mut soak = Cmd::cargo().args(run).args(["--", "--ranks", ranks]);
    if let Some(minutes) = minutes {
        soak = soak.args(["--minutes", &minutes.to_string()]);
    }
    Ok(match soak.status()?.success() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
