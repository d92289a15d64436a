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
    let run = Cmd::cargo().args(["run", "--release", "--package", "phalanx-cli"]);
    let run = run.args(["--features", &features(&args.args)]);
    let status = run.args(["--", "bench"]).args(&args.args).status()?;
    Ok(match status.success() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// The backends on C libraries that are asked for: nobody else needs their libraries.
fn features(args: &[String]) -> String {
    let words = args.iter().flat_map(|arg| arg.split([',', '=']));
    let wanted = words.filter(|word| ["gloo", "mpi"].contains(word));
    wanted.collect::<Vec<_>>().join(",")
}

/// A program of its own: the launcher does not wait for burn to be compiled.
fn train(args: &[String]) -> Result<ExitCode, Failure> {
    let build = ["build", "--release", "--package", "phalanx-burn"];
    let build = Cmd::cargo().args(build).args(["--example", "burn_bench"]);
    if !build.status()?.success() {
        return Err("the benchmark does not build; what cargo said is above".into());
    }
    let program = target_dir().join("release/examples/burn_bench");
    let status = Cmd::new(program).args(args).status()?;
    Ok(match status.success() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_on_a_c_library_is_built_in_when_it_is_asked_for() {
        let features =
            |line: &str| features(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(features("allreduce --backends native,gloo,mpi"), "gloo,mpi");
        assert_eq!(features("allreduce --backends=mpi,openmpi"), "mpi");
        assert_eq!(features("allreduce --backends native,torch-gloo"), "");
    }
}
