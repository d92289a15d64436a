//! Slow networks, lost ranks, and what ranks find out about each other.

mod common;

use std::sync::{Arc, Barrier};
use std::time::Duration;

use common::{Group, average, begin, give, params, ranks, reducer, small_caps, step, values};
use phalanx_pg::{
    CallKind, DType, ErrorKind, Fault, FaultPlan, Faulty, ProcessGroupExt, Recorded, Recorder,
    RecorderOptions, TraceState,
};
use phalanx_reducer::{Error, GradTarget, ReducerConfig, Sync, verify};

#[test]
fn communication_is_over_before_the_last_gradient_where_there_is_time() {
    ranks(2, |rank, group| {
        let late = Duration::from_millis(20);
        let plan = (0..40).fold(FaultPlan::new(), |plan, n| {
            plan.at_kind(CallKind::AllReduce, n, Fault::DelayCompletion(late))
        });
        let recorder = Arc::new(Recorder::new(RecorderOptions::default()));
        let group: Group = Recorded::new(Faulty::new(group, plan), &recorder);
        let reducer = reducer(&[1, 1, 1, 1], group, small_caps(1));
        let _ = step(&reducer, rank, 0, &[3, 2, 1, 0]);
        let pass = begin(&reducer);
        let before = recorder.trace().entries.len();
        for slot in [3, 2, 1] {
            give(&pass, slot, &[1.0]).unwrap();
        }
        // The last layer takes as long as all buckets before it.
        let is_done = |entry: &phalanx_pg::TraceEntry| entry.state == TraceState::Completed;
        let done = || {
            recorder
                .trace()
                .entries
                .iter()
                .skip(before)
                .filter(|e| is_done(e))
                .count()
        };
        while done() < 3 {
            std::thread::sleep(Duration::from_millis(1));
        }
        give(&pass, 0, &[1.0]).unwrap();
        let _ = pass.finish().unwrap();
        let stats = reducer.stats();
        let last_ready = stats.timeline[3].ready_ns;
        let done: Vec<u64> = stats.timeline.iter().filter_map(|b| b.done_ns).collect();
        assert!(
            done[..3].iter().all(|&done| done < last_ready),
            "hidden: {stats:?}"
        );
        assert!(done[3] > last_ready);
        assert!(stats.last.overlap_ns > 0, "{stats:?}");
        assert!(stats.last.communication_ns > stats.last.overlap_ns);
    });
}

#[test]
fn taking_a_gradient_does_not_wait_for_the_network() {
    ranks(2, |_, group| {
        let plan = FaultPlan::new().at_kind(
            CallKind::AllReduce,
            0,
            Fault::DelayCompletion(Duration::from_secs(2)),
        );
        let group: Group = Faulty::new(group, plan);
        let reducer = reducer(
            &[1, 1],
            group,
            ReducerConfig {
                caps: phalanx_reducer::BucketCaps::list([1]),
                ..ReducerConfig::default()
            },
        );
        let pass = begin(&reducer);
        give(&pass, 1, &[1.0]).unwrap();
        give(&pass, 0, &[1.0]).unwrap();
        let _ = pass.finish().unwrap();
        let timeline = reducer.stats().timeline;
        assert!(timeline[1].ready_ns < timeline[0].done_ns.unwrap());
    });
}

#[test]
fn survivors_of_a_rank_lost_during_backward_learn_who_it_was_and_go_on_without() {
    let all_here = Arc::new(Barrier::new(3));
    ranks(3, move |rank, group| {
        let reducer = reducer(&[1, 1], group.clone(), small_caps(1));
        let survivors = group.new_group(&[0, 2], "survivors").unwrap();
        let _ = step(&reducer, rank, 0, &[1, 0]);
        let _ = step(&reducer, rank, 1, &[1, 0]);
        let pass = begin(&reducer);
        all_here.wait();
        give(&pass, 1, &[1.0]).ok();
        if rank == 1 {
            group.abort("rank 1 is out of memory");
            return;
        }
        give(&pass, 0, &[1.0]).ok();
        let err = pass.finish().unwrap_err();
        let lost = err.group().expect("a failure of the group");
        assert!(
            matches!(lost.kind(), ErrorKind::Aborted | ErrorKind::Broken),
            "{err}"
        );
        assert!(err.to_string().contains("out of memory"), "{err}");
        let again = reducer.begin(GradTarget::Model, Sync::Yes).unwrap_err();
        assert!(again.to_string().contains("out of memory"), "{again}");
        let survivors = survivors.unwrap();
        reducer.replace_group(survivors.clone()).unwrap();
        let pass = begin(&reducer);
        give(&pass, 0, &[rank as f32]).unwrap();
        give(&pass, 1, &[1.0]).unwrap();
        assert_eq!(values(&pass.finish().unwrap(), 0), [1.0]);
        survivors.shutdown().unwrap();
    });
}

#[test]
fn ranks_with_other_parameters_all_find_out() {
    type Change = fn(&mut Vec<phalanx_reducer::ParamSpec>);
    let cases: [(Change, &[&str]); 4] = [
        (|list| list.truncate(2), &["rank 0 has 3, rank 1 has 2"]),
        (
            |list| list[1].shape = vec![9],
            &["shape of parameter 1 (p1)", "[2]", "[9]"],
        ),
        (
            |list| list[2].dtype = DType::F64,
            &["type of parameter 2 (p2)", "f32", "f64"],
        ),
        (
            |list| list[0].name = "other".into(),
            &["name of parameter 0", "other"],
        ),
    ];
    for (change, parts) in cases {
        ranks(3, move |rank, group| {
            let mut list = params(&[1, 2, 3]);
            if rank == 1 {
                change(&mut list);
            }
            let err = verify(&*group, &list, &[]).unwrap_err();
            assert!(matches!(err, Error::Differ { rank: at, .. } if at == rank));
            for part in parts {
                assert!(err.to_string().contains(part), "{err}");
            }
            // Nobody hangs, and the group goes on.
            verify(&*group, &params(&[1]), &[]).unwrap();
        });
    }
}

#[test]
fn ranks_with_other_options_all_find_out() {
    ranks(2, |rank, group| {
        let options = [("bucket_cap", format!("{}", 25 + rank))];
        let err = verify(&*group, &params(&[1]), &options)
            .unwrap_err()
            .to_string();
        assert!(
            err.contains("differ in bucket_cap: rank 0 has 25, rank 1 has 26"),
            "{err}"
        );
    });
}

#[test]
fn a_rank_that_is_late_changes_nothing() {
    ranks(3, |rank, group| {
        let plan = FaultPlan::new().jitter(rank as u64, Duration::from_millis(5));
        let group: Group = Faulty::new(group, plan);
        let reducer = reducer(&[4, 4, 4], group, small_caps(1));
        for n in 0..5 {
            let reduced = step(&reducer, rank, n, &[2, 1, 0]);
            (0..3).for_each(|slot| assert_eq!(values(&reduced, slot), average(3, slot, 4, n)));
        }
    });
}

#[test]
fn nothing_is_sent_after_a_bucket_that_could_not_be() {
    ranks(1, |_, group| {
        let plan =
            FaultPlan::new().at_kind(CallKind::AllReduce, 1, Fault::Fail(ErrorKind::QueueFull));
        let faulty: Group = Faulty::new(group.clone(), plan);
        let config = ReducerConfig {
            caps: phalanx_reducer::BucketCaps::list([1]),
            ..ReducerConfig::default()
        };
        let reducer = reducer(&[1, 1, 1], faulty, config);
        let pass = begin(&reducer);
        give(&pass, 2, &[1.0]).unwrap();
        let err = give(&pass, 1, &[1.0]).unwrap_err();
        assert_eq!(
            err.group().map(|err| err.kind()),
            Some(ErrorKind::QueueFull),
            "{err}"
        );
        give(&pass, 0, &[1.0]).unwrap();
        assert_eq!(group.sequence(), 1, "only the first bucket");
        assert_eq!(pass.finish().unwrap_err().to_string(), err.to_string());
    });
}
