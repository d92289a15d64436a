//! The program `phalanx`, as a library: a program is compiled when all it stands on is finished, a
//! library beside it, and on the way to a first training that is a quarter of a minute.
#![forbid(unsafe_code)]

mod bench;
mod descriptors;
mod doctor;
mod run;
mod store;
mod trace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Distributed data parallel training: stores, launching, measuring.
#[derive(Parser)]
#[command(name = "phalanx", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Args),
    Doctor(doctor::Args),
    Trace(trace::Args),
    Store(store::Args),
    /// Print a fresh job token, for PHALANX_TOKEN on the nodes of a job.
    Token,
    #[command(subcommand)]
    Bench(bench::Bench),
    #[command(name = "__rank", hide = true)]
    Rank(run::stub::RankArgs),
    #[command(name = "__warden", hide = true)]
    Warden,
}

/// A failure as text for the person at the terminal.
type Failure = Box<dyn std::error::Error>;

/// The whole program.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    phalanx::log::init("info");
    let result = match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Store(args) => store::run(&args).map(done),
        Command::Token => phalanx_store::JobToken::generate()
            .map(|token| println!("{token}"))
            .map(done)
            .map_err(Failure::from),
        Command::Bench(bench) => bench::run(&bench).map(done),
        Command::Rank(args) => run::stub::become_rank(&args),
        Command::Warden => run::stub::be_warden(),
    };
    match result {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("phalanx: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn done((): ()) -> ExitCode {
    ExitCode::SUCCESS
}
