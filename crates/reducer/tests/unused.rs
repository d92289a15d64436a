//! Parameters without gradients: found anew, or known from the first pass.

mod common;

use common::{Group, begin, give, ranks, reducer, small_caps, values};
use phalanx_reducer::{
    BucketCaps, Error, GradTarget, Reduced, Reducer, ReducerConfig, Slot, Sync, Why,
};

fn finding() -> ReducerConfig {
    ReducerConfig {
        find_unused_parameters: true,
        ..small_caps(1)
    }
}

fn static_graph() -> ReducerConfig {
    ReducerConfig {
        static_graph: true,
        ..small_caps(1)
    }
}

/// A pass in which these slots get these gradients.
fn pass(reducer: &Reducer, grads: &[(Slot, f32)]) -> Result<Reduced, Error> {
    let pass = begin(reducer);
    for &(slot, value) in grads {
        give(&pass, slot, &[value])?;
    }
    pass.finish()
}

#[test]
fn unused_here_and_used_elsewhere_gets_the_others_share_of_the_full_world() {
    ranks(2, |rank, group| {
        let reducer = reducer(&[1, 1, 1], group, finding());
        for _ in 0..3 {
            let grads: &[(Slot, f32)] = match rank {
                0 => &[(0, 1.0), (1, 1.0)],
                _ => &[(0, 3.0)],
            };
            let reduced = pass(&reducer, grads).unwrap();
            assert_eq!(values(&reduced, 0), [2.0]);
            assert_eq!(values(&reduced, 1), [0.5]);
            assert!(reduced.grad(2).is_none(), "unused everywhere");
        }
        let stats = reducer.stats();
        assert_eq!(stats.unused_parameter_size, 4 * (1 + rank));
        assert!(!stats.has_rebuilt_buckets, "as PyTorch does");
        assert!(stats.can_set_static_graph);
    });
}

#[test]
fn which_are_unused_may_change_from_pass_to_pass() {
    ranks(2, |rank, group| {
        let reducer = reducer(&[1, 1], group, finding());
        for n in 0..6usize {
            let used = (n + rank) % 2;
            let reduced = pass(&reducer, &[(used, 4.0)]).unwrap();
            assert_eq!(values(&reduced, 0), [2.0]);
            assert_eq!(values(&reduced, 1), [2.0]);
        }
        assert!(!reducer.stats().can_set_static_graph);
    });
}

#[test]
fn no_gradient_at_all_on_one_rank_is_fine_too() {
    ranks(2, |rank, group| {
        let reducer = reducer(&[1, 1], group, finding());
        let grads: &[(Slot, f32)] = if rank == 0 {
            &[(0, 1.0), (1, 3.0)]
        } else {
            &[]
        };
        let reduced = pass(&reducer, grads).unwrap();
        assert_eq!(values(&reduced, 1), [1.5]);
    });
}

#[test]
fn an_accumulated_gradient_counts_as_used() {
    ranks(2, |rank, group| {
        let reducer = reducer(&[1, 1], group, finding());
        let quiet = reducer.begin(GradTarget::Model, Sync::No).unwrap();
        if rank == 0 {
            give(&quiet, 1, &[8.0]).unwrap();
        }
        let _ = quiet.finish().unwrap();
        let reduced = pass(&reducer, &[(0, 1.0)]).unwrap();
        assert_eq!(values(&reduced, 1), [4.0]);
        let reduced = pass(&reducer, &[(0, 1.0)]).unwrap();
        assert!(reduced.grad(1).is_none(), "used up");
    });
}

#[test]
fn an_option_rebuilds_with_unused_parameters_too() {
    ranks(2, |rank, group| {
        let config = ReducerConfig {
            rebuild_with_unused: true,
            ..finding()
        };
        let reducer = reducer(&[1, 1, 1], group, config);
        let first: &[(Slot, f32)] = if rank == 0 {
            &[(1, 1.0), (0, 1.0)]
        } else {
            &[(2, 1.0)]
        };
        pass(&reducer, first).unwrap();
        let reduced = pass(&reducer, first).unwrap();
        assert_eq!(
            reducer.buckets(),
            [[1], [0], [2]],
            "rank 0's order, unused last"
        );
        assert_eq!(values(&reduced, 2), [0.5]);
    });
}

#[test]
fn buckets_that_nobody_uses_are_not_sent_if_asked_for() {
    ranks(2, |rank, group| {
        let config = ReducerConfig {
            skip_all_reduce_unused_params: true,
            ..finding()
        };
        let reducer = reducer(&[1, 1, 1], group, config);
        // The first bucket is that of slot 2, used by one rank; that of slot 1 by none.
        let grads: &[(Slot, f32)] = if rank == 0 {
            &[(0, 2.0)]
        } else {
            &[(2, 2.0), (0, 2.0)]
        };
        for _ in 0..3 {
            let reduced = pass(&reducer, grads).unwrap();
            assert_eq!(values(&reduced, 0), [2.0]);
            assert_eq!(values(&reduced, 2), [1.0]);
            assert!(reduced.grad(1).is_none());
            assert_eq!(reducer.stats().num_buckets_reduced, 2);
            assert_eq!(reducer.stats().timeline[1].launched_ns, None);
        }
    });
}

#[test]
fn a_static_graph_learns_in_the_first_pass_and_rebuilds_before_the_third() {
    ranks(2, |rank, group| {
        let before = group.sequence();
        let reducer = reducer(&[1, 1, 1], group.clone(), static_graph());
        assert_eq!(
            reducer.buckets(),
            [[0, 1, 2]],
            "one bucket, whatever the cap"
        );
        let grads: &[(Slot, f32)] = match rank {
            0 => &[(1, 1.0), (0, 1.0)],
            _ => &[(1, 3.0)],
        };
        let first = begin(&reducer);
        for &(slot, value) in grads {
            give(&first, slot, &[value]).unwrap();
        }
        assert_eq!(group.sequence(), before, "nothing is sent before the end");
        let check = |reduced: Reduced| {
            assert_eq!(values(&reduced, 1), [2.0]);
            assert_eq!(values(&reduced, 0), [0.5]);
            assert!(reduced.grad(2).is_none());
        };
        check(first.finish().unwrap());
        check(pass(&reducer, grads).unwrap());
        assert_eq!(reducer.buckets(), [[0, 1, 2]]);
        check(pass(&reducer, grads).unwrap());
        assert_eq!(reducer.buckets(), [[1], [0], [2]]);
        check(pass(&reducer, grads).unwrap());
    });
}

#[test]
fn a_static_graph_may_have_several_gradients_per_parameter() {
    ranks(2, |rank, group| {
        let reducer = reducer(&[1, 1], group, static_graph());
        for _ in 0..4 {
            let twice = rank as f32;
            let reduced = pass(&reducer, &[(1, twice), (0, 1.0), (1, 2.0)]).unwrap();
            assert_eq!(values(&reduced, 1), [2.5]);
            assert_eq!(values(&reduced, 0), [1.0]);
        }
        assert_eq!(
            reducer.stats().prev_iteration_grad_ready_order_indices,
            [0, 1],
            "ready with its last gradient"
        );
    });
}

#[test]
fn a_static_graph_that_changes_is_an_error() {
    ranks(2, |rank, group: Group| {
        // Unused becomes used: at once.
        let reducer = reducer(&[1, 1], group.clone(), static_graph());
        pass(&reducer, &[(0, 1.0)]).unwrap();
        let next = begin(&reducer);
        let err = give(&next, 1, &[1.0]).unwrap_err();
        let Error::GraphChanged {
            rank: at,
            param,
            expected,
        } = &err
        else {
            panic!("{err}");
        };
        assert_eq!((*at, param.slot, *expected), (rank, 1, 0));
        assert!(err.to_string().contains("static_graph"), "{err}");
        drop(next);
        // Used becomes unused: at the end.
        pass(&reducer, &[(0, 1.0)]).unwrap();
        let err = pass(&reducer, &[]).unwrap_err();
        let Error::Unfinished(unfinished) = &err else {
            panic!("{err}");
        };
        assert_eq!(unfinished.why, Why::GraphChanged);
        assert_eq!(&*unfinished.missing[0].name, "p0");
        assert_eq!(unfinished.missing.len(), 1, "p1 was never used");
    });
}

#[test]
fn static_graphs_accumulate_too() {
    ranks(2, |rank, group| {
        let reducer = reducer(&[1, 1], group, static_graph());
        for n in 0..3 {
            let quiet = reducer.begin(GradTarget::Model, Sync::No).unwrap();
            give(&quiet, 0, &[1.0]).unwrap();
            let _ = quiet.finish().unwrap();
            let reduced = pass(&reducer, &[(0, rank as f32), (1, n as f32)]).unwrap();
            assert_eq!(values(&reduced, 0), [1.5]);
            assert_eq!(values(&reduced, 1), [n as f32]);
        }
    });
}

#[test]
fn the_first_layout_has_the_caps_only_if_there_is_no_rebuild() {
    ranks(1, |_, group: Group| {
        let mib = 1 << 18; // elements
        let lens = [mib, mib, mib];
        let with = |find_unused_parameters, static_graph| {
            let config = ReducerConfig {
                caps: BucketCaps::default(),
                find_unused_parameters,
                static_graph,
                ..ReducerConfig::default()
            };
            reducer(&lens, group.clone(), config).buckets().len()
        };
        assert_eq!(with(false, false), 1);
        assert_eq!(with(true, false), 2);
        assert_eq!(with(true, true), 1);
        assert_eq!(with(false, true), 1);
    });
}

#[test]
fn the_used_map_is_one_call_after_the_buckets() {
    ranks(2, |_, group| {
        let recorder = std::sync::Arc::new(phalanx_pg::Recorder::new(
            phalanx_pg::RecorderOptions::default(),
        ));
        let group: Group = phalanx_pg::Recorded::new(group, &recorder);
        let reducer = reducer(&[1, 1], group, finding());
        pass(&reducer, &[(0, 1.0), (1, 1.0)]).unwrap();
        let sent = recorder.trace().entries;
        let lens: Vec<usize> = sent.iter().map(|entry| entry.input_sizes[0][0]).collect();
        assert_eq!(lens, [1, 1, 2]);
    });
}

#[test]
fn gradients_of_one_parameter_may_come_from_several_threads_at_once() {
    const LEN: usize = 20_000;
    let group = phalanx_reference::ReferenceGroup::threads(1).remove(0);
    let reducer = reducer(&[LEN], group, static_graph());
    for step in 0..300 {
        let pass = begin(&reducer);
        std::thread::scope(|scope| {
            for part in [1.0, 2.0, 4.0] {
                let pass = &pass;
                scope.spawn(move || give(pass, 0, &[part; LEN]).unwrap());
            }
        });
        let sum = values(&pass.finish().unwrap(), 0);
        assert!(sum.iter().all(|&value| value == 7.0), "step {step}");
    }
}

/// With checks a rank that starts a bucket waits there for the others, who may have come to the end
/// of a shorter backward.
#[test]
fn what_nobody_uses_is_sent_after_all_if_calls_are_checked() {
    ranks(2, |rank, group| {
        let config = ReducerConfig {
            skip_all_reduce_unused_params: true,
            ..ReducerConfig {
                find_unused_parameters: true,
                ..small_caps(1)
            }
        };
        let group = phalanx_pg::Checked::new(group).unwrap();
        let reducer = reducer(&[1, 1, 1], group, config);
        for _ in 0..3 {
            let pass = begin(&reducer);
            if rank == 0 {
                // The first bucket.
                give(&pass, 2, &[4.0]).unwrap();
            }
            give(&pass, 0, &[1.0]).unwrap();
            let reduced = pass.finish().unwrap();
            assert_eq!(
                (values(&reduced, 0), values(&reduced, 2)),
                (vec![1.0], vec![2.0])
            );
            assert!(reduced.dense(1).is_none());
        }
    });
}
