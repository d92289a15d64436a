//! `cargo xtask bench`: the program's benchmarks, built for it.

use std::process::ExitCode;

use crate::Failure;
use crate::shell::Cmd;

/// Build the program `phalanx` in release mode and run `phalanx bench ARGS`.
///
/// For example `cargo xtask bench -- store --only pairs`; see docs/benchmarks.md.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to measure and how, as for `phalanx bench`; `--help` after `--` tells more
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Failure> {
    let run = [
        "run",
        "--release",
        "--package",
        "phalanx-cli",
        "--",
        "bench",
    ];
    let status = Cmd::cargo().args(run).args(&args.args).status()?;
    Ok(match status.success() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
