//! The process group suite on the reference backend, threads as ranks, bare and under each wrapper.

use std::sync::Arc;
use std::time::Duration;

use phalanx_conformance::group::{Level, Report, cases, run_cases, run_rank, survive};
use phalanx_pg::{Checked, FaultPlan, Faulty, ProcessGroup, Recorded, Recorder, RecorderOptions};
use phalanx_reference::ReferenceGroup;

type Groups = Vec<Arc<dyn ProcessGroup>>;

/// Runs `body` as every rank at the same time.
fn on_all<T: Send>(groups: Groups, body: impl Fn(Arc<dyn ProcessGroup>) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|group| scope.spawn(move || body(group)))
            .collect();
        let results: Vec<_> = ranks.into_iter().map(|rank| rank.join()).collect();
        results
            .into_iter()
            .map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

fn suite(size: usize) {
    let reports = on_all(ReferenceGroup::threads(size), |group| {
        let report = run_rank(&group, Level::Sample);
        group.shutdown().expect("an orderly end");
        report
    });
    check(size, &reports);
}

fn check(size: usize, reports: &[Report]) {
    println!("{size} ranks\n{}", reports[0]);
    for report in reports {
        let skipped: Vec<_> = report
            .skipped
            .iter()
            .filter(|(_, why)| !(why.starts_with("needs ") && size < 4))
            .collect();
        assert!(
            skipped.is_empty(),
            "not asked of the reference: {skipped:?}"
        );
        assert!(report.passed.len() >= 20);
    }
}

#[test]
fn one_rank() {
    suite(1);
}

#[test]
fn two_ranks() {
    suite(2);
}

#[test]
fn three_ranks() {
    suite(3);
}

#[test]
fn four_ranks() {
    suite(4);
}

#[test]
fn eight_ranks() {
    suite(8);
}

#[test]
fn survivors_learn_which_rank_died() {
    on_all(ReferenceGroup::threads(4), |group| {
        if group.rank() == 2 {
            return;
        }
        survive(&group, 2, Duration::from_secs(30));
    });
}

/// The suite with every case's group in a wrapper.
fn wrapped(
    size: usize,
    wrap: impl Fn(Arc<dyn ProcessGroup>) -> Arc<dyn ProcessGroup> + Sync,
    left_out: &[&str],
) {
    let chosen: Vec<_> = cases()
        .into_iter()
        .filter(|case| !left_out.contains(&case.name()))
        .collect();
    assert_eq!(chosen.len() + left_out.len(), cases().len());
    let reports = on_all(ReferenceGroup::threads(size), |group| {
        let report = run_cases(&group, Level::Sample, &chosen, &wrap);
        group.shutdown().expect("an orderly end");
        report
    });
    check(size, &reports);
}

#[test]
fn under_the_recorder() {
    let recorder = Arc::new(Recorder::new(RecorderOptions::default()));
    wrapped(3, |group| Recorded::new(group, &recorder), &[]);
    assert!(recorder.dump().contains("reference:"));
}

#[test]
fn under_checks() {
    // A group is checked once; these two do it themselves.
    let checked = [
        "different calls are told apart under Checked",
        "equal calls pass under Checked",
    ];
    wrapped(
        3,
        |group| Checked::new(group).expect("all ranks come"),
        &checked,
    );
}

#[test]
fn with_late_completions() {
    let late = |group: Arc<dyn ProcessGroup>| -> Arc<dyn ProcessGroup> {
        let plan = FaultPlan::new().jitter(group.rank() as u64, Duration::from_micros(200));
        Faulty::new(group, plan)
    };
    // The wrapper holds completions back beyond the barrier's own.
    wrapped(2, late, &["a barrier ends after all earlier work"]);
}
