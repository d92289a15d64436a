//! `cargo xtask soak`: the long versions of what the tests sample.

use std::process::ExitCode;

use crate::shell::Cmd;
use crate::{Failure, mpich, nccl};

/// Run a long version of what `cargo xtask test` samples.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// The whole product of the process group suite: each call with every type, operator and size,
    /// with processes as ranks and, for the reference backend, threads. Prints each case with its
    /// time, and a summary
    Conformance {
        /// Any backend that the crate phalanx has built in
        #[arg(long, default_value = "reference")]
        backend: String,

        /// World sizes, separated by commas
        #[arg(long, default_value = "1,2,3,4,8")]
        ranks: String,

        /// Start no further case after this time
        #[arg(long)]
        minutes: Option<u32>,
    },
    /// The tests of the mpi backend on MPICH instead of the system's MPI: Debian's packages of it,
    /// unpacked beside the system and not installed, in a target directory of their own
    Mpich,
    /// Faults of the NCCL backend on the emulated device, many times over; then whether the crate
    /// type-checks beside the features of cudarc that candle and cubecl ask for
    Nccl {
        /// How often each fault is tried
        #[arg(long, default_value_t = 50)]
        runs: u32,
    },
    /// Ranks that are killed or stopped in the middle of a random mix of calls. Prints how far it
    /// is, every run that goes wrong, and a summary with the times from the kill to the errors
    Chaos {
        /// Any backend that the crate phalanx has built in
        #[arg(long, default_value = "native")]
        backend: String,

        /// How many runs
        #[arg(long, default_value_t = 100)]
        runs: u32,

        /// Most ranks of a run, which has two at least
        #[arg(long, default_value_t = 4)]
        ranks: u32,

        /// Number of the first run: each follows from its number
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Failure> {
    let soak = match &args.what {
        What::Mpich => mpich::tests()?,
        What::Nccl { runs } => return nccl::soak(*runs),
        What::Conformance {
            backend,
            ranks,
            minutes,
        } => {
            let soak = example("soak", backend).args(["--backend", backend, "--ranks", ranks]);
            match minutes {
                Some(minutes) => soak.args(["--minutes", &minutes.to_string()]),
                None => soak,
            }
        }
        What::Chaos {
            backend,
            runs,
            ranks,
            seed,
        } => {
            let chaos = example("chaos", backend).args(["--backend", backend]);
            let [runs, ranks] = [runs, ranks].map(u32::to_string);
            chaos.args([
                "--runs",
                &runs,
                "--ranks",
                &ranks,
                "--seed",
                &seed.to_string(),
            ])
        }
    };
    Ok(match soak.status()?.success() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// An example of the suites' crate, optimised: they move and compare a lot.
fn example(name: &str, backend: &str) -> Cmd {
    let run = ["run", "--release", "--package", "phalanx-conformance"];
    let run = Cmd::cargo().args(run);
    let run = match backend {
        // Not in the facade unless they are asked for.
        "gloo" | "reference" => run.args(["--features", &format!("phalanx/{backend}")]),
        _ => run,
    };
    run.args(["--example", name, "--"])
}
