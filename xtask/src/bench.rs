//! `cargo xtask bench`: the program's benchmarks, built for it.

use std::process::ExitCode;

use crate::Failure;
use crate::shell::{Cmd, target_dir};

/// Build the program `phalanx` in release mode and run `phalanx bench ARGS`.
///
/// For example `cargo xtask bench -- store --only pairs`; see docs/benchmarks.md. `train` is a program
/// of its own, with burn, which the launcher should not wait for.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to measure and how, as for `phalanx bench`; `--help` after `--` tells more
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Failure> {
    if let Some((command, rest)) = args.args.split_first()
        && command == "train"
    {
        return train(rest);
    }
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

/// In the profile of the tests, in which burn is compiled already and as fast as it gets.
fn train(args: &[String]) -> Result<ExitCode, Failure> {
    let build = ["build", "--workspace", "--example", "burn_bench"];
    if !Cmd::cargo().args(build).status()?.success() {
        return Err("the benchmark does not build; what cargo said is above".into());
    }
    let program = target_dir().join("debug/examples/burn_bench");
    let status = Cmd::new(program).args(args).status()?;
    Ok(match status.success() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
