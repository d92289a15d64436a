//! The program `phalanx`.
#![forbid(unsafe_code)]

mod bench;
mod descriptors;
mod store;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// Distributed data parallel training: stores, launching, measuring.
#[derive(Parser)]
#[command(name = "phalanx", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Store(store::Args),
    #[command(subcommand)]
    Bench(bench::Bench),
}

/// A failure as text for the person at the terminal.
type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = EnvFilter::try_from_env("PHALANX_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    let result = match cli.command {
        Command::Store(args) => store::run(&args),
        Command::Bench(bench) => bench::run(&bench),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("phalanx: {failure}");
            ExitCode::FAILURE
        }
    }
}
