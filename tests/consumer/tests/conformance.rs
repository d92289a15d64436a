//! The backend passes Phalanx's own suite, one real process per rank.

use std::sync::Arc;
use std::time::Duration;

use phalanx::ErrorKind;
use phalanx::prelude::*;
use phalanx_conformance::group::{Level, run_rank, survive};
use phalanx_testkit::{End, Outcome, World};

const DEADLINE: Duration = Duration::from_secs(240);

/// As a program would: register, then choose by name.
fn init() -> Arc<dyn ProcessGroup> {
    phalanx_files::register().unwrap();
    phalanx::init_with("files").unwrap()
}

fn world(size: usize) -> World {
    // Below the deadline, so that a hang is an error that names the operation.
    World::new(size).deadline(DEADLINE).env("PHALANX_TIMEOUT", "60")
}

fn suite() {
    let group = init();
    let report = run_rank(&group, Level::Sample);
    group.shutdown().unwrap();
    println!("{report}");
    for (case, why) in &report.skipped {
        let expected = ["the backend has no send", "needs "];
        assert!(expected.iter().any(|e| why.starts_with(e)), "{case}: {why}");
    }
    assert!(report.passed.len() >= 20, "{report}");
}

/// With `--nocapture`: what passed, and what was not asked of the backend and why.
fn show(outcome: &Outcome) {
    assert!(outcome.succeeded(), "{}", outcome.report());
    println!("{} ranks\n{}", outcome.ranks().len(), outcome.rank(0).log);
}

#[test]
fn the_suite_passes_with_one_to_three_processes() {
    for size in 1..=3 {
        world(size).check(|_| suite(), show);
    }
}

#[test]
fn the_suite_passes_with_four_processes() {
    world(4).check(|_| suite(), show);
}

#[test]
fn survivors_learn_which_process_was_killed() {
    world(4).check(
        |ctx| {
            let group = init();
            let met = group.barrier();
            if ctx.rank() == 2 {
                // No goodbye, no unwinding.
                std::process::abort();
            }
            if let Err(err) = met {
                assert_eq!((err.kind(), err.peer()), (ErrorKind::PeerLost, Some(2)), "{err}");
            }
            survive(&group, 2, Duration::from_secs(30));
        },
        |outcome| {
            for rank in [0, 1, 3] {
                let end = &outcome.rank(rank).end;
                assert_eq!(*end, End::Finished, "{}", outcome.report());
            }
        },
    );
}

#[test]
fn what_it_lacks_is_refused_before_anything_is_sent() {
    world(2).run(|ctx| {
        let group = init();
        let data = Buffer::from_vec(vec![1i32]).freeze();
        let err = group.send(data, 1 - ctx.rank(), 0).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Unsupported, "{err}");
        group.barrier().unwrap();
        group.shutdown().unwrap();
    });
}

#[test]
fn nothing_is_left_behind_also_by_ranks_that_were_killed() {
    let dir = tempfile::tempdir().unwrap();
    world(3).env("TMPDIR", dir.path()).check(
        |ctx| {
            let group = init();
            if ctx.rank() == 1 {
                std::process::abort();
            }
            assert!(group.barrier().is_err());
        },
        |_| {
            let left = dir.path().read_dir().unwrap();
            let left = left.map(|entry| entry.unwrap().file_name());
            let ours: Vec<_> =
                left.filter(|name| name.to_string_lossy().starts_with("phalanx-files-")).collect();
            assert!(ours.is_empty(), "{ours:?}");
        },
    );
}
