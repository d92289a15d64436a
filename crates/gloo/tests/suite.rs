//! The process group suite, one real process per rank.

mod common;

use std::sync::Arc;

use common::{DEADLINE, TIMEOUT, connect};
use phalanx_conformance::group::{Level, run_rank, survive};
use phalanx_pg::{Buffer, ErrorKind, ProcessGroup, ProcessGroupExt, ReduceOp};
use phalanx_testkit::{End, Rank, World};

fn suite(ctx: &Rank, group: &Arc<dyn ProcessGroup>) {
    let report = run_rank(group, Level::Sample);
    group.shutdown().unwrap();
    println!("{report}");
    report.assert_complete(ctx.size());
}

#[test]
fn two_processes_sum_through_the_trait() {
    World::new(2).run(|ctx| {
        let group = connect(ctx);
        let buf = Buffer::from_vec(vec![ctx.rank() as f32 + 1.0; 5]);
        let sum = group.allreduce(buf, ReduceOp::Sum).unwrap().wait().unwrap();
        assert_eq!(sum.as_slice::<f32>().unwrap(), [3.0; 5]);
        group.shutdown().unwrap();
    });
}

#[test]
fn the_suite_passes_with_one_to_three_processes() {
    for size in 1..=3 {
        World::new(size).deadline(DEADLINE).run(|ctx| {
            suite(ctx, &connect(ctx));
        });
    }
}

#[test]
fn the_suite_passes_with_four_processes() {
    World::new(4).deadline(DEADLINE).run(|ctx| {
        suite(ctx, &connect(ctx));
    });
}

#[test]
fn survivors_learn_which_process_was_killed() {
    World::new(4).check(
        |ctx| {
            let group = connect(ctx);
            // Some are still in here when rank 2 dies.
            let met = group.barrier();
            if ctx.rank() == 2 {
                // No goodbye, no unwinding.
                std::process::abort();
            }
            if let Err(err) = met {
                assert_eq!(err.kind(), ErrorKind::PeerLost, "{err:?}");
                assert_eq!(err.peer(), Some(2), "{err}");
            }
            survive(&group, 2, TIMEOUT / 2);
        },
        |outcome| {
            for rank in [0, 1, 3] {
                let end = &outcome.rank(rank).end;
                assert_eq!(*end, End::Finished, "{}", outcome.report());
            }
        },
    );
}
