//! Meets the other ranks under whatever launcher started this, says what it learned, and sums all
//! ranks through the store.
//!
//! ```text
//! cargo build --example meet
//! target/debug/examples/meet
//! mpirun -n 4 target/debug/examples/meet
//! srun -n 4 target/debug/examples/meet
//! torchrun --no-python --nproc-per-node 4 target/debug/examples/meet
//! ```
//!
//! With `--fail-before ATTEMPT` the last rank fails after the meeting in every attempt before that
//! one, and the others stay until they are ended, to see a launcher restart the job.

use std::process::ExitCode;

use phalanx_store::rendezvous::{self, Rendezvous};
use phalanx_store::{Result, StoreError};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            eprintln!("meet: {err}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let fail_before = fail_before()?;
    let meeting = rendezvous::from_env()?;
    let sum = sum_of_ranks(&meeting)?;
    let (rank, world_size) = (meeting.rank(), meeting.world_size());
    println!(
        "rank {rank} of {world_size}: sum of ranks {sum}; {:?}",
        meeting.env
    );
    if rank == world_size - 1 {
        let fails = meeting.env.restart_count < fail_before;
        meeting
            .store
            .set("plan", if fails { b"fail" } else { b"end" })?;
        if fails {
            return Err(StoreError::Rendezvous(format!(
                "rank {rank} fails as asked"
            )));
        }
    } else if meeting.store.get("plan")? == b"fail" {
        meeting.store.wait(&["never"])?;
    }
    meeting.leave()?;
    let expected = world_size * (world_size - 1) / 2;
    match usize::try_from(sum) == Ok(expected) {
        true => Ok(()),
        false => Err(StoreError::Rendezvous(format!(
            "the sum of ranks is {sum}, not {expected}: other processes use the same keys"
        ))),
    }
}

fn fail_before() -> Result<usize> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => Ok(0),
        ["--fail-before", attempt] if attempt.parse::<usize>().is_ok() => {
            Ok(attempt.parse().unwrap_or_default())
        }
        _ => Err(StoreError::Invalid(
            "usage: meet [--fail-before ATTEMPT]".into(),
        )),
    }
}

fn sum_of_ranks(meeting: &Rendezvous) -> Result<i64> {
    let rank = i64::try_from(meeting.rank()).unwrap_or(i64::MAX);
    meeting.store.add("sum", rank)?;
    meeting.store.barrier("added", meeting.world_size())?;
    meeting.store.add("sum", 0)
}
