//! Large gradients in groups that work on scattered memory: reduced where they are.

mod common;

use std::sync::Arc;

use common::{Group, average, begin, give, grad, params, ranks, small_caps, values};
use phalanx_pg::{Buffer, Call, CallOptions, DType, ProcessGroup, RawWork, Result as PgResult};
use phalanx_reducer::{
    AllReduceHook, CommHook, Error, GradBucket, GradTarget, GradView, HookResult, ParamSpec, Pass,
    Reduced, Reducer, ReducerConfig, Slot, Sync,
};
use proptest::prelude::*;

/// Elements of a gradient that is alone.
const LARGE: usize = 40_000;

/// Large, small, large, small.
const LENS: [usize; 4] = [LARGE, 10, 2 * LARGE + 1, 33];

/// A group that says it works on scattered memory.
#[derive(Debug)]
struct Scattered {
    inner: Group,
}

impl ProcessGroup for Scattered {
    phalanx_pg::delegate_description!(inner, |mut known| {
        known.scattered = true;
        known
    });

    fn sequence(&self) -> u64 {
        self.inner.sequence()
    }

    fn p2p_sequence(&self) -> u64 {
        self.inner.p2p_sequence()
    }

    fn submit(&self, call: Call, options: &CallOptions) -> PgResult<RawWork> {
        self.inner.submit(call, options)
    }

    fn split(&self, ranks: &[usize], name: &str) -> PgResult<Option<Group>> {
        self.inner.split(ranks, name)
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn shutdown(&self) -> PgResult<()> {
        self.inner.shutdown()
    }
}

fn scattered(inner: Group) -> Group {
    Arc::new(Scattered { inner })
}

fn reducer(group: Group, config: ReducerConfig) -> Reducer {
    common::reducer(&LENS, scattered(group), config)
}

/// Hands a gradient over with its memory.
fn give_away(pass: &Pass, slot: Slot, values: Vec<f32>) {
    let given = pass.sink().grad_ready(slot, Buffer::from_vec(values));
    given.unwrap();
}

/// The same for all slots.
fn give_all(pass: &Pass, values: impl Fn(Slot) -> Vec<f32>) {
    (0..LENS.len()).for_each(|slot| give_away(pass, slot, values(slot)));
}

fn memory(reduced: &Reduced, slot: Slot) -> *const f32 {
    let grad = reduced.dense(slot).expect("a gradient");
    grad.as_slice::<f32>().unwrap().as_ptr()
}

#[test]
fn what_is_given_comes_back_averaged_in_its_own_memory() {
    ranks(3, |rank, group| {
        let reducer = reducer(group, ReducerConfig::default());
        // The second pass has other buckets than the first.
        for step in 0..3 {
            let pass = begin(&reducer);
            let given = (0..LENS.len()).map(|slot| {
                let values = grad(rank, slot, LENS[slot], step);
                let memory = values.as_ptr();
                give_away(&pass, slot, values);
                memory
            });
            let given: Vec<_> = given.collect();
            let reduced = pass.finish().unwrap();
            let owned = reduced.dense(0).unwrap();
            for (slot, &len) in LENS.iter().enumerate() {
                assert_eq!(values(&reduced, slot), average(3, slot, len, step));
                let stayed = memory(&reduced, slot) == given[slot];
                assert_eq!(stayed, len >= LARGE, "slot {slot}");
                assert_eq!(reduced.dense(slot).unwrap().is_alone(), stayed);
            }
            drop(reduced);
            // What was given is the reader's alone: the reducer keeps no handle on it.
            let (memory, _) = owned.memory();
            assert!(memory.clone().try_thaw().is_err(), "two handles here");
            let memory = memory.clone();
            drop(owned);
            assert!(memory.try_thaw().is_ok(), "step {step}");
        }
    });
}

#[test]
fn some_ranks_may_lend_and_others_give() {
    ranks(2, |rank, group| {
        let reducer = reducer(group, ReducerConfig::default());
        let mut before = None;
        for step in 0..4 {
            let pass = begin(&reducer);
            for (slot, &len) in LENS.iter().enumerate() {
                let values = grad(rank, slot, len, step);
                match rank {
                    0 => give(&pass, slot, &values).unwrap(),
                    _ => give_away(&pass, slot, values),
                }
            }
            let reduced = pass.finish().unwrap();
            for (slot, &len) in LENS.iter().enumerate() {
                assert_eq!(values(&reduced, slot), average(2, slot, len, step));
            }
            let now = (step > 0 && rank == 0).then(|| memory(&reduced, 0));
            assert!(
                step < 2 || before == now,
                "the copy's memory is used again, step {step}"
            );
            before = now;
        }
    });
}

#[test]
fn a_view_that_is_kept_keeps_its_values() {
    ranks(2, |rank, group| {
        let reducer = reducer(group, ReducerConfig::default());
        let kept: Vec<_> = (0..3)
            .map(|step| common::step(&reducer, rank, step, &[3, 2, 1, 0]))
            .collect();
        for (step, reduced) in kept.iter().enumerate() {
            for (slot, &len) in LENS.iter().enumerate() {
                assert_eq!(values(reduced, slot), average(2, slot, len, step));
            }
        }
    });
}

#[test]
fn what_was_accumulated_is_part_of_the_sum() {
    ranks(2, |rank, group| {
        let reducer = reducer(group, ReducerConfig::default());
        let pass = reducer.begin(GradTarget::Model, Sync::No).unwrap();
        give_all(&pass, |slot| vec![rank as f32; LENS[slot]]);
        pass.finish().unwrap();
        let pass = begin(&reducer);
        give_all(&pass, |slot| vec![10.0; LENS[slot]]);
        let reduced = pass.finish().unwrap();
        (0..4).for_each(|slot| assert_eq!(values(&reduced, slot), vec![10.5; LENS[slot]]));
    });
}

#[test]
fn the_unused_count_as_zeros() {
    ranks(2, |rank, group| {
        let config = ReducerConfig {
            find_unused_parameters: true,
            ..ReducerConfig::default()
        };
        let reducer = reducer(group, config);
        for _ in 0..2 {
            let pass = begin(&reducer);
            // Slot 0 on rank 0 only, slot 2 nowhere.
            let used = [rank == 0, true, false, true];
            for slot in (0..4).filter(|&slot| used[slot]) {
                give_away(&pass, slot, vec![4.0; LENS[slot]]);
            }
            let reduced = pass.finish().unwrap();
            assert_eq!(values(&reduced, 0), vec![2.0; LARGE]);
            assert_eq!(values(&reduced, 3), vec![4.0; 33]);
            assert!(reduced.dense(2).is_none());
        }
    });
}

#[test]
fn several_gradients_of_a_static_graph_add_up() {
    ranks(2, |rank, group| {
        let config = ReducerConfig {
            static_graph: true,
            ..ReducerConfig::default()
        };
        let reducer = reducer(group, config);
        for step in 0..3 {
            let pass = begin(&reducer);
            for slot in [0, 0, 1] {
                give_away(&pass, slot, vec![1.0 + rank as f32; LENS[slot]]);
            }
            let once = vec![1.0 + rank as f32; LENS[2]];
            let place = once.as_ptr();
            give_away(&pass, 2, once);
            let reduced = pass.finish().unwrap();
            assert_eq!(values(&reduced, 0), vec![3.0; LARGE]);
            assert_eq!(values(&reduced, 1), vec![1.5; 10]);
            assert_eq!(values(&reduced, 2), vec![1.5; LENS[2]]);
            // The first pass adds everything up, others only what comes more than once.
            assert_eq!(memory(&reduced, 2) == place, step > 0, "step {step}");
            assert!(reduced.dense(3).is_none());
        }
    });
}

#[test]
fn a_rank_without_inputs_sends_zeros() {
    ranks(3, |rank, group| {
        let reducer = reducer(group, ReducerConfig::default());
        for _ in 0..2 {
            if rank == 2 {
                reducer.rebuild().unwrap();
                reducer.shadow().unwrap();
                continue;
            }
            let pass = reducer.begin_divided(GradTarget::Model, Sync::Yes, Some(2));
            let pass = pass.unwrap();
            give_all(&pass, |slot| vec![1.0 + rank as f32; LENS[slot]]);
            let reduced = pass.finish().unwrap();
            (0..4).for_each(|slot| assert_eq!(values(&reduced, slot), vec![1.5; LENS[slot]]));
        }
    });
}

/// Insists on whole buckets.
struct Whole;

impl CommHook for Whole {
    fn name(&self) -> &str {
        "whole"
    }

    fn run(&self, bucket: GradBucket, group: &dyn ProcessGroup) -> HookResult<Buffer> {
        let len: usize = bucket.parameters().map(|(_, param)| param.len()).sum();
        assert_eq!(bucket.buffer().len(), len);
        AllReduceHook.run(bucket, group)
    }
}

#[test]
fn a_hook_gets_buckets_in_one_piece() {
    ranks(2, |rank, group| {
        let reducer = reducer(group, ReducerConfig::default());
        for step in 0..4 {
            if step == 2 {
                reducer.register_comm_hook(Arc::new(Whole)).unwrap();
            }
            let pass = begin(&reducer);
            give_all(&pass, |slot| grad(rank, slot, LENS[slot], step));
            let reduced = pass.finish().unwrap();
            for (slot, &len) in LENS.iter().enumerate() {
                assert_eq!(values(&reduced, slot), average(2, slot, len, step));
                let alone = reduced.dense(slot).unwrap().is_alone();
                assert_eq!(alone, step < 2 && len >= LARGE);
            }
        }
    });
}

#[test]
fn another_group_may_want_buckets() {
    ranks(2, |rank, group| {
        let reducer = reducer(Arc::clone(&group), ReducerConfig::default());
        common::step(&reducer, rank, 0, &[0, 1, 2, 3]);
        reducer.replace_group(group).unwrap();
        let reduced = common::step(&reducer, rank, 1, &[0, 1, 2, 3]);
        for (slot, &len) in LENS.iter().enumerate() {
            assert_eq!(values(&reduced, slot), average(2, slot, len, 1));
            assert!(!reduced.dense(slot).unwrap().is_alone());
        }
    });
}

#[test]
fn sixteen_bits_are_rounded_before_they_are_summed_so_they_are_copied() {
    let group = phalanx_reference::ReferenceGroup::threads(1).remove(0);
    let params = vec![ParamSpec::new("half", [4 * LARGE], DType::F16)];
    let reducer = Reducer::new(params, scattered(group), ReducerConfig::default());
    let reducer = reducer.unwrap();
    let pass = begin(&reducer);
    let half = vec![half::f16::from_f32(0.5); 4 * LARGE];
    pass.sink().grad_ready(0, Buffer::from_vec(half)).unwrap();
    assert!(!pass.finish().unwrap().dense(0).unwrap().is_alone());
}

#[test]
fn what_is_given_must_fit_its_parameter() {
    let group = phalanx_reference::ReferenceGroup::threads(1).remove(0);
    let reducer = reducer(group, ReducerConfig::default());
    let pass = begin(&reducer);
    let wrong = [
        Buffer::from_vec(vec![0.0f32; LARGE - 1]),
        Buffer::from_vec(vec![0.0f64; LARGE]),
    ];
    for buffer in wrong {
        let refused = pass.sink().grad_ready(0, buffer);
        assert!(matches!(refused, Err(Error::BadGradient { .. })));
    }
    assert!(pass.finish().is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever the sizes, the buckets, and who lends and who gives.
    #[test]
    fn bits_are_those_of_buckets(
        lens in prop::collection::vec(prop_oneof![1usize..200, LARGE - 8000..LARGE + 8000], 1..6),
        cap in prop_oneof![Just(1usize), Just(300_000), Just(25 << 20)],
        size in 1usize..4,
        given in any::<u64>(),
    ) {
        let run = move |in_pieces: bool| {
            let lens = lens.clone();
            ranks(size, move |rank, group| {
                let group = match in_pieces {
                    true => scattered(group),
                    false => group,
                };
                let reducer = Reducer::new(params(&lens), group, small_caps(cap)).unwrap();
                let pass = |step: usize| {
                    let pass = begin(&reducer);
                    for (slot, &len) in lens.iter().enumerate() {
                        let values = grad(rank, slot, len, step);
                        match given >> (rank * 8 + slot) & 1 {
                            0 => pass.sink().grad_ready(slot, GradView::dense(&values)).unwrap(),
                            _ => give_away(&pass, slot, values),
                        }
                    }
                    let reduced = pass.finish().unwrap();
                    let bits = |slot| -> Vec<u32> {
                        values(&reduced, slot).into_iter().map(f32::to_bits).collect()
                    };
                    (0..lens.len()).map(bits).collect::<Vec<_>>()
                };
                (0..2).map(pass).collect::<Vec<_>>()
            })
        };
        prop_assert_eq!(run(true), run(false));
    }
}
