//! The process group suite, one real process per rank.

mod common;

use std::sync::Arc;

use common::{DEADLINE, TIMEOUT, connect, connect_across, striped};
use phalanx_conformance::group::{Level, run_rank, survive};
use phalanx_pg::{ErrorKind, ProcessGroup, ProcessGroupExt};
use phalanx_testkit::{End, Rank, World};

fn suite(ctx: &Rank, group: &Arc<dyn ProcessGroup>) {
    let report = run_rank(group, Level::Sample);
    group.shutdown().unwrap();
    println!("{report}");
    report.assert_complete(ctx.size());
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
fn the_suite_passes_with_eight_processes() {
    World::new(8).deadline(DEADLINE).run(|ctx| {
        suite(ctx, &connect(ctx));
    });
}

#[test]
fn the_suite_passes_on_two_hosts_of_two() {
    World::new(4).deadline(DEADLINE).run(|ctx| {
        suite(ctx, &connect_across(ctx, &["a", "b", "a", "b"]));
    });
}

#[test]
fn the_suite_passes_on_three_hosts_of_one() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        suite(ctx, &connect_across(ctx, &["a", "b", "c"]));
    });
}

#[test]
fn the_suite_passes_on_hosts_of_different_sizes() {
    World::new(4).deadline(DEADLINE).run(|ctx| {
        suite(ctx, &connect_across(ctx, &["a", "a", "a", "b"]));
    });
}

#[test]
fn the_suite_passes_on_two_hosts_of_two_with_several_streams() {
    striped(4).run(|ctx| {
        suite(ctx, &connect_across(ctx, &["a", "b", "a", "b"]));
    });
}

#[test]
fn the_suite_passes_on_three_hosts_of_one_with_several_streams() {
    striped(3).run(|ctx| {
        suite(ctx, &connect_across(ctx, &["a", "b", "c"]));
    });
}

#[test]
fn the_suite_passes_on_hosts_of_different_sizes_with_several_streams() {
    striped(4).run(|ctx| {
        suite(ctx, &connect_across(ctx, &["a", "a", "a", "b"]));
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
