//! Developer commands, as `cargo xtask COMMAND`.
//!
//! One module per command; a new one is a module and a line in [`Command`]. A new suite of
//! `cargo xtask test` is a line in `test/suites.rs`.
#![forbid(unsafe_code)]

mod bench;
mod cache;
mod fuzz;
mod interop;
mod miri;
mod mpich;
mod nccl;
mod shell;
mod slurm;
mod soak;
mod test;
mod train;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Developer commands of Phalanx.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Train(train::Args),
    Test(test::Args),
    Fuzz(fuzz::Args),
    Interop(interop::Args),
    Soak(soak::Args),
    Bench(bench::Args),
    Miri(miri::Args),
}

/// A failure as text for the person at the terminal.
type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Train(args) => train::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Interop(args) => interop::run(&args),
        Command::Soak(args) => soak::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Miri(args) => miri::run(&args),
    };
    result.unwrap_or_else(|failure| {
        eprintln!("error: {failure}");
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        <Cli as clap::CommandFactory>::command().debug_assert();
        let lines: [&[&str]; 6] = [
            &["train", "--nproc", "4", "--framework", "burn"],
            &["test", "--quick", "--only", "consumer"],
            &["soak", "conformance", "--ranks", "1,2", "--minutes", "5"],
            &["soak", "chaos", "--runs", "2000", "--seed", "7"],
            &["bench", "--", "store", "--only", "pairs"],
            &["miri", "--require"],
        ];
        for line in lines {
            let _: Cli = Cli::parse_from([&["cargo xtask"], line].concat());
        }
    }
}
