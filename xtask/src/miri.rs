//! `cargo xtask miri`: the unsafe code under an interpreter that finds undefined behaviour.

use std::process::ExitCode;

use crate::Failure;
use crate::shell::Cmd;

/// Miri comes with nightly toolchains only.
const TOOLCHAIN: &str = "nightly";

/// Fewer: each takes a thousand times as long.
const PROPTEST_CASES: &str = "8";

/// Run the tests of the file where memory changes hands, full of `unsafe` code, under Miri.
///
/// Needs a nightly toolchain with Miri; without it says so and succeeds, as it is not part of
/// `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Fail if Miri is not there
    #[arg(long)]
    require: bool,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Failure> {
    if !Cmd::cargo_of(TOOLCHAIN)
        .args(["miri", "--version"])
        .succeeds()
    {
        let why = "not run: no Miri; rustup +nightly component add miri";
        if args.require {
            return Err(why.into());
        }
        println!("{why}");
        return Ok(ExitCode::SUCCESS);
    }
    let test = [
        "miri",
        "test",
        "--package",
        "phalanx-pg",
        "--test",
        "buffer",
    ];
    let status = Cmd::cargo_of(TOOLCHAIN)
        .args(test)
        // Property tests look for the file of their past failures.
        .env("MIRIFLAGS", "-Zmiri-disable-isolation")
        .env("PROPTEST_CASES", PROPTEST_CASES)
        .status()?;
    Ok(match status.success() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
