//! The process group suite on the reference backend, one real process per rank, over TCP.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::Wrapper;
use phalanx_conformance::group::{Case, Level, Report, cases, run_cases, run_rank, survive};
use phalanx_pg::{ErrorKind, ProcessGroup, ProcessGroupExt, Recorder, RecorderOptions};
use phalanx_reference::{Options, ReferenceGroup};
use phalanx_testkit::{End, Rank, World};

/// Below the world's deadline, so that an error names the operation.
const TIMEOUT: Duration = Duration::from_secs(60);
const DEADLINE: Duration = Duration::from_secs(240);

fn connect(ctx: &Rank) -> Arc<dyn ProcessGroup> {
    let options = Options {
        timeout: TIMEOUT,
        ..Options::default()
    };
    ReferenceGroup::connect(ctx.store(), ctx.rank(), ctx.size(), &options).unwrap()
}

fn suite(ctx: &Rank) {
    let group = connect(ctx);
    let report = run_rank(&group, Level::Sample);
    group.shutdown().unwrap();
    check(ctx, &report, &cases());
}

/// The suite with every case's group in a wrapper.
fn wrapped(ctx: &Rank, wrapper: Wrapper) {
    let group = connect(ctx);
    let chosen = wrapper.cases();
    let recorder = Arc::new(Recorder::new(RecorderOptions::default()));
    let wrap = |group| wrapper.wrap(group, &recorder);
    let report = run_cases(&group, Level::Sample, &chosen, &wrap);
    group.shutdown().unwrap();
    check(ctx, &report, &chosen);
    let recorded = recorder.dump().contains("reference:");
    assert_eq!(recorded, wrapper.records(), "{wrapper:?}");
}

fn check(ctx: &Rank, report: &Report, asked: &[Case]) {
    println!("{report}");
    // Small worlds lack peers for some cases; nothing else may be left out.
    let unexpected = |(_, why): &&(&str, String)| !(why.starts_with("needs ") && ctx.size() < 4);
    assert_eq!(report.skipped.iter().find(unexpected), None, "{report}");
    assert_eq!(report.passed.len() + report.skipped.len(), asked.len());
}

#[test]
fn the_suite_passes_with_one_to_three_processes() {
    for size in 1..=3 {
        World::new(size).deadline(DEADLINE).run(|ctx| {
            suite(ctx);
        });
    }
}

#[test]
fn the_suite_passes_with_four_processes() {
    World::new(4).deadline(DEADLINE).run(|ctx| {
        suite(ctx);
    });
}

#[test]
fn the_suite_passes_with_eight_processes() {
    World::new(8).deadline(DEADLINE).run(|ctx| {
        suite(ctx);
    });
}

#[test]
fn the_suite_passes_under_each_wrapper() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        wrapped(ctx, Wrapper::Recorded);
    });
    World::new(3).deadline(DEADLINE).run(|ctx| {
        wrapped(ctx, Wrapper::Checked);
    });
    World::new(3).deadline(DEADLINE).run(|ctx| {
        wrapped(ctx, Wrapper::Faultless);
    });
}

#[test]
fn the_suite_passes_under_all_wrappers_at_once() {
    World::new(4).deadline(DEADLINE).run(|ctx| {
        wrapped(ctx, Wrapper::All);
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
                assert_eq!(
                    outcome.rank(rank).end,
                    End::Finished,
                    "{}",
                    outcome.report()
                );
            }
        },
    );
}
