//! `phalanx bench`: measurements against competitors, in the same run and interleaved.

mod allreduce;
mod cache;
mod cpu;
mod ddp;
mod hidden;
mod load;
mod namespaces;
mod overlap;
mod processes;
mod stats;
mod store;

use crate::Failure;

/// Measure a part of Phalanx, next to its competitors where they are there.
#[derive(clap::Subcommand)]
pub(crate) enum Bench {
    Ddp(ddp::Args),
    Store(store::Args),
    Allreduce(allreduce::Args),
    Overlap(overlap::Args),
    Hidden(hidden::Args),
    #[command(hide = true)]
    Load(load::Args),
    #[command(hide = true)]
    Bare(store::bare::Args),
    #[command(hide = true)]
    Rank(allreduce::rank::Args),
    #[command(hide = true)]
    Roof(allreduce::roof::Args),
}

pub(crate) fn run(bench: &Bench) -> Result<(), Failure> {
    match bench {
        Bench::Ddp(args) => ddp::run(args),
        Bench::Store(args) => store::run(args),
        Bench::Allreduce(args) => allreduce::run(args),
        Bench::Overlap(args) => overlap::run(args),
        Bench::Hidden(args) => hidden::run(args),
        Bench::Load(args) => load::run(args),
        Bench::Bare(args) => store::bare::run(args),
        Bench::Rank(args) => allreduce::rank::run(args),
        Bench::Roof(args) => allreduce::roof::run(args),
    }
}
