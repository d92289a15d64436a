//! `phalanx bench`: measurements against competitors, in the same run and interleaved.

mod cpu;
mod load;
mod stats;
mod store;

use crate::Failure;

/// Measure a part of Phalanx, next to its competitors where they are there.
#[derive(clap::Subcommand)]
pub(crate) enum Bench {
    Store(store::Args),
    #[command(hide = true)]
    Load(load::Args),
    #[command(hide = true)]
    Bare(store::bare::Args),
}

pub(crate) fn run(bench: &Bench) -> Result<(), Failure> {
    match bench {
        Bench::Store(args) => store::run(args),
        Bench::Load(args) => load::run(args),
        Bench::Bare(args) => store::bare::run(args),
    }
}
