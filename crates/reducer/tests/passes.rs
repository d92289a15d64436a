//! Passes: averages, order, rebuild, views, accumulation.

mod common;

use common::{average, begin, give, grad, params, ranks, reducer, small_caps, step, values};
use half::{bf16, f16};
use phalanx_pg::{DType, ProcessGroup};
use phalanx_reducer::{
    BucketCaps, Error, GradTarget, GradView, ParamSpec, Reducer, ReducerConfig, Sync, Why,
};

const LENS: [usize; 5] = [3, 10, 1, 7, 5];

#[test]
fn gradients_are_averaged_to_the_bit_on_all_ranks() {
    for size in [1, 2, 3, 4] {
        ranks(size, move |rank, group| {
            let reducer = reducer(&LENS, group, small_caps(40));
            for n in 0..4 {
                let reduced = step(&reducer, rank, n, &[4, 3, 2, 1, 0]);
                for (slot, &len) in LENS.iter().enumerate() {
                    assert_eq!(
                        values(&reduced, slot),
                        average(size, slot, len, n),
                        "slot {slot}"
                    );
                }
            }
        });
    }
}

#[test]
fn gradients_larger_than_a_cache_are_averaged_and_copied_out_to_the_bit() {
    const LENS: [usize; 3] = [5, 9 << 20, 1001];
    ranks(2, |rank, group| {
        let reducer = reducer(&LENS, group, ReducerConfig::default());
        for n in 0..2 {
            let reduced = step(&reducer, rank, n, &[2, 1, 0]);
            for (slot, &len) in LENS.iter().enumerate() {
                let mut copy = vec![0.0f32; len];
                reduced.dense(slot).unwrap().copy_to(&mut copy).unwrap();
                assert!(copy == average(2, slot, len, n), "slot {slot}");
            }
        }
    });
}

#[test]
fn ranks_may_compute_gradients_in_different_orders() {
    ranks(3, |rank, group| {
        let reducer = reducer(&LENS, group, small_caps(1));
        let orders = [[4, 3, 2, 1, 0], [0, 1, 2, 3, 4], [2, 4, 0, 3, 1]];
        for n in 0..5 {
            let reduced = step(&reducer, rank, n, &orders[(rank + n) % 3]);
            for (slot, &len) in LENS.iter().enumerate() {
                assert_eq!(values(&reduced, slot), average(3, slot, len, n));
            }
        }
        // Rank 0's order of the first pass is everybody's layout.
        assert_eq!(reducer.buckets(), [[4], [3], [2], [1], [0]]);
    });
}

#[test]
fn the_layout_makes_no_difference_to_a_bit() {
    let run = |caps: BucketCaps| {
        ranks(3, move |rank, group| {
            let config = ReducerConfig {
                caps: caps.clone(),
                ..ReducerConfig::default()
            };
            let reducer = reducer(&LENS, group, config);
            let steps: Vec<_> = (0..3)
                .map(|n| step(&reducer, rank, n, &[3, 1, 4, 0, 2]))
                .collect();
            let last = &steps[2];
            (0..LENS.len())
                .map(|slot| values(last, slot))
                .collect::<Vec<_>>()
        })
    };
    let whole = run(BucketCaps::default());
    for caps in [
        BucketCaps::uniform(1),
        BucketCaps::uniform(40),
        BucketCaps::list([4, 60]),
    ] {
        assert_eq!(run(caps), whole);
    }
}

#[test]
fn buckets_are_rebuilt_once_in_ready_order_at_the_next_begin() {
    ranks(2, |rank, group| {
        let config = ReducerConfig {
            caps: BucketCaps::list([12, 40]),
            ..ReducerConfig::default()
        };
        let reducer = reducer(&LENS, group, config);
        let first = reducer.buckets();
        let _ = step(&reducer, rank, 0, &[4, 2, 3, 0, 1]);
        assert_eq!(reducer.buckets(), first, "not before the next begin");
        assert_eq!(
            reducer.stats().prev_iteration_grad_ready_order_indices,
            [4, 2, 3, 0, 1]
        );
        let pass = begin(&reducer);
        assert_eq!(reducer.buckets(), [vec![4], vec![2, 3, 0], vec![1]]);
        drop(pass);
        let _ = step(&reducer, rank, 1, &[0, 1, 2, 3, 4]);
        let _ = step(&reducer, rank, 2, &[0, 1, 2, 3, 4]);
        assert_eq!(reducer.buckets(), [vec![4], vec![2, 3, 0], vec![1]]);
        let stats = reducer.stats();
        assert!(stats.has_rebuilt_buckets);
        assert_eq!(stats.rebuilt_bucket_sizes, [20, 44, 40]);
        assert_eq!(stats.iteration, 3);
    });
}

#[test]
fn views_outlive_later_passes_and_a_rebuild() {
    ranks(2, |rank, group| {
        let reducer = reducer(&LENS, group, small_caps(40));
        let mut kept = Vec::new();
        for n in 0..4 {
            kept.push(step(&reducer, rank, n, &[4, 3, 2, 1, 0]));
        }
        for (n, reduced) in kept.iter().enumerate() {
            for (slot, &len) in LENS.iter().enumerate() {
                assert_eq!(values(reduced, slot), average(2, slot, len, n));
            }
        }
    });
}

#[test]
fn memory_is_reused_when_no_view_is_left() {
    ranks(2, |rank, group| {
        let reducer = reducer(&LENS, group, ReducerConfig::default());
        // Hooks may outlive their pass.
        let mut sinks = Vec::new();
        let mut address = |n: usize| {
            let pass = begin(&reducer);
            (0..5).for_each(|slot| give(&pass, slot, &grad(rank, slot, LENS[slot], n)).unwrap());
            sinks.push(pass.sink());
            let reduced = pass.finish().unwrap();
            reduced.dense(0).unwrap().memory().0.as_ptr()
        };
        let _ = (address(0), address(1)); // the rebuild takes new memory
        let first = address(2);
        assert_eq!(first, address(3));
        let held = step(&reducer, rank, 4, &[0, 1, 2, 3, 4]);
        assert_ne!(first, address(5), "a view is still there");
        drop(held);
    });
}

#[test]
fn accumulated_gradients_are_part_of_the_next_average() {
    ranks(2, |rank, group| {
        let before = group.sequence();
        let reducer = reducer(&[2, 3], group.clone(), ReducerConfig::default());
        let mut sums = [vec![0.0f32; 2], vec![0.0f32; 3]];
        for n in 0..3 {
            let pass = reducer.begin(GradTarget::Model, Sync::No).unwrap();
            for (slot, sum) in sums.iter_mut().enumerate() {
                let values = grad(rank, slot, slot + 2, n);
                give(&pass, slot, &values).unwrap();
                sum.iter_mut()
                    .zip(values)
                    .for_each(|(sum, value)| *sum += value);
            }
            let reduced = pass.finish().unwrap();
            assert!(!reduced.is_synchronized() && reduced.grad(0).is_none());
        }
        assert_eq!(group.sequence(), before, "nothing was sent");
        let phalanx_reducer::Grad::Dense(sum) = reducer.accumulated(GradTarget::Model, 1).unwrap()
        else {
            panic!("dense");
        };
        assert_eq!(sum.as_slice::<f32>().unwrap(), sums[1]);
        let reduced = step(&reducer, rank, 3, &[1, 0]);
        let expected = |rank: usize| -> Vec<f32> {
            let mut sum = grad(rank, 0, 2, 0);
            for n in 1..4 {
                sum.iter_mut()
                    .zip(grad(rank, 0, 2, n))
                    .for_each(|(sum, value)| *sum += value);
            }
            sum
        };
        let both: Vec<f32> = expected(0)
            .iter()
            .zip(expected(1))
            .map(|(a, b)| a * 0.5 + b * 0.5)
            .collect();
        assert_eq!(values(&reduced, 0), both);
        // The sum is used up.
        assert!(reducer.accumulated(GradTarget::Model, 0).is_none());
        assert_eq!(
            values(&step(&reducer, rank, 4, &[1, 0]), 1),
            average(2, 1, 3, 4)
        );
    });
}

#[test]
fn a_rebuild_in_the_middle_of_accumulation_loses_nothing() {
    ranks(2, |rank, group| {
        let reducer = reducer(&[2, 3], group, small_caps(1));
        let _ = step(&reducer, rank, 0, &[1, 0]);
        // The rebuild happens at this begin, which only accumulates.
        let pass = reducer.begin(GradTarget::Model, Sync::No).unwrap();
        assert_eq!(reducer.buckets(), [[1], [0]]);
        give(&pass, 0, &[4.0, 4.0]).unwrap();
        give(&pass, 1, &[4.0, 4.0, 4.0]).unwrap();
        let _ = pass.finish().unwrap();
        let pass = begin(&reducer);
        give(&pass, 0, &[rank as f32 * 2.0; 2]).unwrap();
        give(&pass, 1, &[0.0; 3]).unwrap();
        let reduced = pass.finish().unwrap();
        assert_eq!(values(&reduced, 0), [5.0; 2]);
        assert_eq!(values(&reduced, 1), [4.0; 3]);
    });
}

#[test]
fn targets_accumulate_apart() {
    ranks(1, |_, group| {
        let reducer = reducer(&[1], group, ReducerConfig::default());
        for (target, value) in [(GradTarget::Model, 1.0), (GradTarget::Context(7), 10.0)] {
            let pass = reducer.begin(target, Sync::No).unwrap();
            give(&pass, 0, &[value]).unwrap();
            let _ = pass.finish().unwrap();
        }
        let pass = reducer.begin(GradTarget::Context(7), Sync::Yes).unwrap();
        give(&pass, 0, &[1.0]).unwrap();
        let reduced = pass.finish().unwrap();
        assert_eq!(values(&reduced, 0), [11.0]);
        assert_eq!(reduced.target(), GradTarget::Context(7));
        reducer.forget(GradTarget::Model);
        assert!(reducer.accumulated(GradTarget::Model, 0).is_none());
    });
}

#[test]
fn element_types_travel_in_buckets_of_their_own() {
    ranks(2, |rank, group| {
        let params = vec![
            ParamSpec::new("single", [2], DType::F32),
            ParamSpec::new("half", [2], DType::F16),
            ParamSpec::new("double", [1], DType::F64),
            ParamSpec::new("brain", [3], DType::BF16),
            ParamSpec::new("empty", [0], DType::F32),
        ];
        let reducer = Reducer::new(params, group, ReducerConfig::default()).unwrap();
        for _ in 0..3 {
            let pass = begin(&reducer);
            let sink = pass.sink();
            let value = rank as f32 * 2.0 + 1.0;
            sink.grad_ready(4, GradView::dense::<f32>(&[])).unwrap();
            sink.grad_ready(0, GradView::dense(&[value; 2])).unwrap();
            sink.grad_ready(1, GradView::dense(&[f16::from_f32(value); 2]))
                .unwrap();
            sink.grad_ready(2, GradView::dense(&[f64::from(value)]))
                .unwrap();
            sink.grad_ready(3, GradView::dense(&[bf16::from_f32(value); 3]))
                .unwrap();
            let reduced = pass.finish().unwrap();
            assert_eq!(values(&reduced, 0), [2.0; 2]);
            let dense = |slot| reduced.dense(slot).unwrap();
            assert_eq!(dense(1).as_slice::<f16>().unwrap(), [f16::from_f32(2.0); 2]);
            assert_eq!(dense(2).as_slice::<f64>().unwrap(), [2.0]);
            assert_eq!(
                dense(3).as_slice::<bf16>().unwrap(),
                [bf16::from_f32(2.0); 3]
            );
            assert!(dense(4).is_empty());
        }
        assert_eq!(reducer.stats().dtypes, ["bf16", "f16", "f32", "f64"]);
    });
}

#[test]
fn gradients_may_come_from_several_threads() {
    ranks(2, |rank, group| {
        let lens = [11; 64];
        let reducer = reducer(&lens, group, small_caps(100));
        for n in 0..5 {
            let pass = begin(&reducer);
            std::thread::scope(|scope| {
                for part in 0..4 {
                    let sink = pass.sink();
                    scope.spawn(move || {
                        for slot in (0..64).filter(|slot| slot % 4 == part) {
                            let values = grad(rank, slot, 11, n);
                            sink.grad_ready(slot, GradView::dense(&values)).unwrap();
                        }
                    });
                }
            });
            let reduced = pass.finish().unwrap();
            for slot in 0..64 {
                assert_eq!(values(&reduced, slot), average(2, slot, 11, n));
            }
        }
    });
}

#[test]
fn a_gradient_that_comes_twice_is_named() {
    ranks(2, |rank, group| {
        let reducer = reducer(&[1, 1], group, ReducerConfig::default());
        let pass = begin(&reducer);
        give(&pass, 0, &[1.0]).unwrap();
        let err = give(&pass, 0, &[1.0]).unwrap_err();
        let Error::MarkedTwice {
            rank: at, param, ..
        } = &err
        else {
            panic!("{err}");
        };
        assert_eq!((*at, param.slot, &*param.name), (rank, 0, "p0"));
        for part in ["marked ready twice", "outside", "static_graph", "0 (p0)"] {
            assert!(err.to_string().contains(part), "{err}");
        }
        // A hook that cannot fail loses no error.
        let again = pass.finish().unwrap_err();
        assert_eq!(again.to_string(), err.to_string());
        assert_eq!(reducer.stats().error, Some(err.to_string()));
    });
}

#[test]
fn missing_gradients_are_listed_and_the_reducer_stays_stuck() {
    ranks(2, |rank, group| {
        let reducer = reducer(&[1, 1, 1], group.clone(), small_caps(1));
        let pass = begin(&reducer);
        give(&pass, 1, &[1.0]).unwrap();
        let err = pass.finish().unwrap_err();
        let Error::Unfinished(unfinished) = &err else {
            panic!("{err}");
        };
        assert_eq!(
            (unfinished.rank, unfinished.why),
            (rank, Why::UnusedNotAllowed)
        );
        for part in [
            "2 parameters have no gradient",
            "0 (p0), 2 (p2)",
            "find_unused_parameters",
        ] {
            assert!(err.to_string().contains(part), "{err}");
        }
        let err = reducer.begin(GradTarget::Model, Sync::Yes).unwrap_err();
        assert!(matches!(err, Error::Stuck(_)), "{err}");
        // With another group all is well again.
        let fresh = phalanx_pg::ProcessGroupExt::new_group(&*group, &[0, 1], "fresh");
        let fresh = fresh.unwrap().unwrap();
        reducer.replace_group(fresh.clone()).unwrap();
        assert_eq!(
            values(&step(&reducer, rank, 0, &[0, 1, 2]), 2),
            average(2, 2, 1, 0)
        );
        fresh.shutdown().unwrap();
    });
}

#[test]
fn a_pass_dropped_before_any_gradient_came_never_was() {
    ranks(2, |rank, group| {
        let reducer = reducer(&[2, 1], group, ReducerConfig::default());
        drop(begin(&reducer));
        assert_eq!(
            values(&step(&reducer, rank, 1, &[0, 1]), 0),
            average(2, 0, 2, 1)
        );
    });
}

#[test]
fn a_pass_dropped_with_gradients_is_an_error_at_the_next_begin() {
    // All gradients are in one bucket, which was not sent: had it not been an error, the other
    // rank's pass would be averaged with this one's next.
    ranks(2, |_, group| {
        let reducer = reducer(&[2, 1], group, ReducerConfig::default());
        let pass = begin(&reducer);
        give(&pass, 0, &[9.0, 9.0]).unwrap();
        drop(pass);
        let err = reducer.begin(GradTarget::Model, Sync::Yes).unwrap_err();
        assert!(err.to_string().contains("1 (p1)"), "{err}");
    });
}

#[test]
fn a_part_of_several_gradients_counts_as_one_that_came() {
    ranks(2, |_, group| {
        let config = ReducerConfig {
            static_graph: true,
            ..ReducerConfig::default()
        };
        let reducer = reducer(&[1], group, config);
        let pass = begin(&reducer);
        give(&pass, 0, &[1.0]).unwrap();
        give(&pass, 0, &[1.0]).unwrap();
        pass.finish().unwrap();
        let pass = begin(&reducer);
        give(&pass, 0, &[1.0]).unwrap();
        drop(pass);
        reducer.begin(GradTarget::Model, Sync::Yes).unwrap_err();
    });
}

#[test]
fn what_an_accumulating_pass_took_stays_when_it_is_dropped_or_fails() {
    ranks(2, |_, group| {
        let reducer = reducer(&[1, 1], group, ReducerConfig::default());
        let pass = reducer.begin(GradTarget::Model, Sync::No).unwrap();
        give(&pass, 0, &[10.0]).unwrap();
        drop(pass);
        let pass = reducer.begin(GradTarget::Model, Sync::No).unwrap();
        give(&pass, 0, &[100.0]).unwrap();
        give(&pass, 1, &[0.0, 0.0]).unwrap_err();
        pass.finish().unwrap_err();
        let pass = begin(&reducer);
        give(&pass, 0, &[1.0]).unwrap();
        give(&pass, 1, &[1.0]).unwrap();
        assert_eq!(values(&pass.finish().unwrap(), 0), [111.0]);
    });
}

#[test]
fn finishing_while_a_gradient_is_handed_over_is_an_error() {
    // With unused parameters allowed nothing would seem to be missing.
    let config = ReducerConfig {
        find_unused_parameters: true,
        ..ReducerConfig::default()
    };
    const LEN: usize = 4 << 20;
    let refused = (0..20).any(|_| {
        let config = config.clone();
        let refused = ranks(1, move |_, group| {
            let reducer = reducer(&[LEN], group, config.clone());
            let pass = begin(&reducer);
            let sink = pass.sink();
            let grad = vec![1.0f32; LEN];
            let (entering, entered) = std::sync::mpsc::channel();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    entering.send(()).unwrap();
                    // Refused, if the pass ends before it.
                    let _ = sink.grad_ready(0, GradView::dense(&grad));
                });
                entered.recv().unwrap();
                std::thread::sleep(std::time::Duration::from_millis(1));
                match pass.finish() {
                    Ok(_) => false,
                    Err(err) => err.to_string().contains("being handed over"),
                }
            })
        });
        refused == [true]
    });
    assert!(refused, "the pass was never finished in the middle");
}

#[test]
fn a_pass_dropped_after_a_launch_is_an_error_at_the_next_begin() {
    ranks(2, |_, group| {
        let config = ReducerConfig {
            caps: BucketCaps::list([1]),
            ..ReducerConfig::default()
        };
        let reducer = reducer(&[1, 1], group, config);
        let pass = begin(&reducer);
        give(&pass, 1, &[1.0]).unwrap();
        drop(pass);
        let err = reducer.begin(GradTarget::Model, Sync::Yes).unwrap_err();
        for part in [
            "did not finish",
            "0 (p0)",
            "dropped",
            "replace the process group",
        ] {
            assert!(err.to_string().contains(part), "{err}");
        }
    });
}

#[test]
fn one_pass_at_a_time() {
    ranks(1, |_, group| {
        let reducer = reducer(&[1], group, ReducerConfig::default());
        let pass = begin(&reducer);
        let err = reducer.begin(GradTarget::Model, Sync::Yes).unwrap_err();
        assert!(err.to_string().contains("in progress"), "{err}");
        drop(pass);
        let sink = begin(&reducer).sink();
        let err = sink.grad_ready(0, GradView::dense(&[1.0f32])).unwrap_err();
        assert!(
            err.to_string().contains("after its pass had ended"),
            "{err}"
        );
    });
}

#[test]
fn gradients_that_do_not_fit_are_refused() {
    ranks(1, |_, group| {
        let mut list = params(&[2, 2]);
        list[1] = list[1].clone().with_sparse_gradient();
        let reducer = Reducer::new(list, group, ReducerConfig::default()).unwrap();
        let refused = |slot, grad: GradView<'_>, part: &str| {
            let pass = begin(&reducer);
            let err = pass.sink().grad_ready(slot, grad).unwrap_err().to_string();
            assert!(err.contains(part), "{err}");
        };
        refused(
            0,
            GradView::dense(&[1.0f32]),
            "has 4 bytes, 8 were expected",
        );
        refused(
            0,
            GradView::dense(&[1.0f64; 2]),
            "is of type f64, the parameter is f32",
        );
        refused(
            0,
            GradView::sparse(&[0], &[1.0f32]),
            "is sparse, but was not declared",
        );
        refused(
            1,
            GradView::dense(&[1.0f32; 2]),
            "is dense, but was declared",
        );
        refused(1, GradView::sparse(&[2], &[1.0f32]), "has row 2 of 2");
        refused(1, GradView::sparse(&[-1], &[1.0f32]), "has row -1 of 2");
        refused(7, GradView::dense(&[1.0f32]), "slot 7 is not among 2");
    });
}

#[test]
fn parameters_without_gradients_are_refused() {
    ranks(1, |_, group| {
        let refused = |params: Vec<ParamSpec>| {
            let err = Reducer::new(params, group.clone(), ReducerConfig::default());
            err.unwrap_err().to_string()
        };
        assert!(refused(Vec::new()).contains("no parameter"));
        let whole = ParamSpec::new("count", [1], DType::I64);
        assert!(refused(vec![whole]).contains("count is of type i64"));
    });
}

#[test]
fn another_divisor_divides_instead_of_the_size() {
    ranks(2, |rank, group| {
        let reducer = reducer(&[1], group, ReducerConfig::default());
        let pass = reducer
            .begin_divided(GradTarget::Model, Sync::Yes, Some(1))
            .unwrap();
        give(&pass, 0, &[rank as f32 + 1.0]).unwrap();
        assert_eq!(values(&pass.finish().unwrap(), 0), [3.0]);
    });
}

#[test]
fn a_shadow_takes_part_with_zeros() {
    ranks(3, |rank, group| {
        let reducer = reducer(&[1, 2], group, small_caps(1));
        for n in 0..4 {
            // Rank 0 has inputs for one step, rank 1 for two, rank 2 for all.
            if rank == 2 || n < rank + 1 {
                let reduced = step(&reducer, rank, n, &[1, 0]);
                let from = if n == 0 { 0 } else { n.min(2) };
                let third = (1.0f64 / 3.0) as f32;
                let sum = (from..3).fold(0.0, |sum, rank| sum + grad(rank, 0, 1, n)[0] * third);
                assert!((values(&reduced, 0)[0] - sum).abs() < 1e-6);
            } else {
                reducer.shadow().unwrap();
            }
        }
    });
}

#[test]
fn a_group_of_one_works_without_peers() {
    let group: std::sync::Arc<dyn ProcessGroup> =
        std::sync::Arc::new(phalanx_pg::FakeGroup::new(0, 1));
    let reducer = reducer(&[4], group, ReducerConfig::default());
    assert_eq!(values(&step(&reducer, 0, 0, &[0]), 0), grad(0, 0, 4, 0));
}
