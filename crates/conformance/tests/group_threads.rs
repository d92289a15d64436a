//! The process group suite on the reference backend, threads as ranks, bare and under each wrapper.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::Wrapper;
use phalanx_conformance::group::{Level, Report, run_cases, run_rank, survive};
use phalanx_pg::{ProcessGroup, Recorder, RecorderOptions};
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
fn wrapped(size: usize, wrapper: Wrapper) {
    let chosen = wrapper.cases();
    let recorder = Arc::new(Recorder::new(RecorderOptions::default()));
    let reports = on_all(ReferenceGroup::threads(size), |group| {
        let wrap = |group| wrapper.wrap(group, &recorder);
        let report = run_cases(&group, Level::Sample, &chosen, &wrap);
        group.shutdown().expect("an orderly end");
        report
    });
    check(size, &reports);
    let recorded = recorder.dump().contains("reference:");
    assert_eq!(recorded, wrapper.records(), "{wrapper:?}");
}

#[test]
fn under_the_recorder() {
    wrapped(3, Wrapper::Recorded);
}

#[test]
fn under_checks() {
    wrapped(3, Wrapper::Checked);
}

#[test]
fn in_a_faulty_group_without_faults() {
    wrapped(3, Wrapper::Faultless);
}

#[test]
fn with_late_completions() {
    wrapped(2, Wrapper::Late);
}

#[test]
fn under_all_wrappers_at_once() {
    wrapped(3, Wrapper::All);
}
