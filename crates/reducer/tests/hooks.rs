//! Comm hooks and sparse gradients: what runs on the reducer's own thread.

mod common;

use std::sync::Arc;

use common::{begin, give, params, ranks, reducer, small_caps, step, values};
use parking_lot::Mutex;
use phalanx_pg::{Buffer, DType, ErrorKind, ProcessGroup, ProcessGroupExt, ReduceOp};
use phalanx_reducer::{
    AllReduceHook, CommHook, CompressHook, Error, Grad, GradBucket, GradTarget, GradView,
    HookResult, ParamSpec, Reducer, ReducerConfig, Slot, Sync,
};

/// Sums without dividing and writes down what it saw.
#[derive(Default)]
struct Watching {
    seen: Mutex<Vec<(usize, bool, Vec<Slot>)>>,
}

impl CommHook for Watching {
    fn name(&self) -> &str {
        "watching"
    }

    fn run(&self, bucket: GradBucket, group: &dyn ProcessGroup) -> HookResult<Buffer> {
        let slots = bucket
            .parameters()
            .map(|(slot, _)| slot)
            .collect::<Vec<_>>();
        for ((slot, param), (same, bytes)) in bucket.parameters().zip(bucket.gradients()?) {
            assert_eq!((slot, param.byte_len()), (same, bytes.len()));
        }
        self.seen
            .lock()
            .push((bucket.index(), bucket.is_last(), slots));
        Ok(group
            .allreduce(bucket.into_buffer(), ReduceOp::Sum)?
            .wait()?)
    }
}

#[test]
fn a_hook_sees_undivided_buckets_in_index_order() {
    ranks(3, |rank, group| {
        let reducer = reducer(&[1, 1, 1], group, small_caps(1));
        let hook = Arc::new(Watching::default());
        reducer.register_comm_hook(hook.clone()).unwrap();
        let pass = begin(&reducer);
        (0..3).for_each(|slot| give(&pass, slot, &[1.0]).unwrap());
        let reduced = pass.finish().unwrap();
        assert_eq!(values(&reduced, 0), [3.0], "not divided");
        hook.seen.lock().clear();
        let orders = [[2, 0, 1], [0, 1, 2], [1, 2, 0]];
        step(&reducer, rank, 1, &orders[rank]);
        let seen = hook.seen.lock();
        assert_eq!(
            *seen,
            [(0, false, vec![0]), (1, false, vec![1]), (2, true, vec![2])]
        );
        assert_eq!(reducer.stats().comm_hook.as_deref(), Some("watching"));
    });
}

#[test]
fn there_is_one_hook_at_most() {
    ranks(2, |_, group| {
        let reducer = reducer(&[1], group, ReducerConfig::default());
        reducer.register_comm_hook(Arc::new(AllReduceHook)).unwrap();
        let err = reducer
            .register_comm_hook(Arc::new(AllReduceHook))
            .unwrap_err();
        assert!(err.to_string().contains("\"allreduce\""), "{err}");
    });
}

#[test]
fn the_allreduce_hook_gives_what_no_hook_gives() {
    let run = |hook: bool| {
        ranks(2, move |rank, group| {
            let reducer = reducer(&[5, 3], group, small_caps(1));
            if hook {
                reducer.register_comm_hook(Arc::new(AllReduceHook)).unwrap();
            }
            let steps: Vec<_> = (0..3).map(|n| step(&reducer, rank, n, &[1, 0])).collect();
            let last = &steps[2];
            (values(last, 0), values(last, 1))
        })
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn compressed_gradients_are_what_16_bits_hold() {
    for (hook, tolerance) in [(CompressHook::F16, 1e-3), (CompressHook::Bf16, 8e-3)] {
        ranks(2, move |rank, group| {
            let reducer = reducer(&[50], group, ReducerConfig::default());
            reducer.register_comm_hook(Arc::new(hook)).unwrap();
            for n in 0..3 {
                let reduced = step(&reducer, rank, n, &[0]);
                let exact = common::average(2, 0, 50, n);
                let off = values(&reduced, 0)
                    .into_iter()
                    .zip(exact)
                    .map(|(a, b)| (a - b).abs());
                let worst = off.fold(0.0, f32::max);
                assert!(worst > 0.0 && worst < tolerance, "{worst}");
            }
        });
    }
}

#[test]
fn accumulated_gradients_reach_a_hook() {
    ranks(2, |rank, group| {
        let reducer = reducer(&[1], group, ReducerConfig::default());
        reducer.register_comm_hook(Arc::new(AllReduceHook)).unwrap();
        let quiet = reducer.begin(GradTarget::Model, Sync::No).unwrap();
        give(&quiet, 0, &[6.0]).unwrap();
        let _ = quiet.finish().unwrap();
        let pass = begin(&reducer);
        give(&pass, 0, &[rank as f32 * 2.0]).unwrap();
        assert_eq!(values(&pass.finish().unwrap(), 0), [7.0]);
    });
}

struct Failing(&'static str);

impl CommHook for Failing {
    fn name(&self) -> &str {
        "failing"
    }

    fn run(&self, bucket: GradBucket, group: &dyn ProcessGroup) -> HookResult<Buffer> {
        match (self.0, group.rank()) {
            ("error", 1) => Err("no such codebook".into()),
            ("panic", 1) => panic!("index out of luck"),
            ("shape", _) => Ok(Buffer::zeroed(DType::F32, 1)),
            _ => Ok(group
                .allreduce(bucket.into_buffer(), ReduceOp::Sum)?
                .wait()?),
        }
    }
}

#[test]
fn a_hook_that_fails_on_one_rank_keeps_no_other_waiting() {
    for (how, text) in [
        ("error", "no such codebook"),
        ("panic", "index out of luck"),
    ] {
        ranks(3, move |rank, group| {
            let reducer = reducer(&[2], group, ReducerConfig::default());
            reducer.register_comm_hook(Arc::new(Failing(how))).unwrap();
            let pass = begin(&reducer);
            give(&pass, 0, &[1.0, 1.0]).unwrap();
            let err = pass.finish().unwrap_err();
            assert!(err.to_string().contains(text), "{err}");
            match (rank, &err) {
                (1, Error::Hook { rank, bucket, .. }) => assert_eq!((*rank, *bucket), (1, 0)),
                (_, Error::Group(err)) => assert_eq!(err.kind(), ErrorKind::Aborted),
                _ => panic!("{err:?}"),
            }
        });
    }
}

#[test]
fn a_hook_must_return_a_bucket() {
    ranks(2, |_, group| {
        let reducer = reducer(&[2], group, ReducerConfig::default());
        reducer
            .register_comm_hook(Arc::new(Failing("shape")))
            .unwrap();
        let pass = begin(&reducer);
        give(&pass, 0, &[1.0, 1.0]).unwrap();
        let err = pass.finish().unwrap_err().to_string();
        assert!(
            err.contains("returned 1 x f32, the bucket is 2 x f32"),
            "{err}"
        );
    });
}

fn embedding() -> Vec<ParamSpec> {
    let mut list = params(&[2, 2]);
    list.push(ParamSpec::new("table", [10, 2], DType::F32).with_sparse_gradient());
    list
}

fn sparse_pass(reducer: &Reducer, rank: usize) -> Option<Arc<phalanx_pg::Sparse>> {
    let pass = begin(reducer);
    let rows: &[i64] = if rank == 0 { &[7, 1, 7] } else { &[1, 3, 3] };
    let values = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
    give(&pass, 1, &[1.0, 1.0]).unwrap();
    pass.sink()
        .grad_ready(2, GradView::sparse(rows, &values))
        .unwrap();
    give(&pass, 0, &[1.0, 1.0]).unwrap();
    let reduced = pass.finish().unwrap();
    assert_eq!(common::values(&reduced, 0), [1.0; 2]);
    match reduced.grad(2) {
        Some(Grad::Sparse(sparse)) => Some(sparse),
        None => None,
        other => panic!("{other:?}"),
    }
}

#[test]
fn sparse_gradients_are_averaged_row_by_row() {
    for hook in [false, true] {
        ranks(2, move |rank, group| {
            let reducer = Reducer::new(embedding(), group, ReducerConfig::default()).unwrap();
            if hook {
                reducer.register_comm_hook(Arc::new(AllReduceHook)).unwrap();
            }
            for _ in 0..3 {
                let sparse = sparse_pass(&reducer, rank).unwrap();
                assert_eq!(sparse.indices, [1, 3, 7]);
                let values = sparse.values.as_slice::<f32>().unwrap();
                assert_eq!(values, [2.0, 3.0, 4.0, 5.0, 3.0, 4.0]);
            }
            assert_eq!(
                reducer.buckets(),
                [vec![2], vec![1, 0]],
                "it overtook the open bucket"
            );
        });
    }
}

#[test]
fn sparse_gradients_accumulate_and_may_be_missing() {
    ranks(2, |rank, group| {
        let config = ReducerConfig {
            find_unused_parameters: true,
            ..ReducerConfig::default()
        };
        let reducer = Reducer::new(embedding(), group, config).unwrap();
        let quiet = reducer.begin(GradTarget::Model, Sync::No).unwrap();
        if rank == 0 {
            let row = GradView::sparse(&[4], &[2.0f32, 2.0]);
            quiet.sink().grad_ready(2, row).unwrap();
        }
        let _ = quiet.finish().unwrap();
        let pass = begin(&reducer);
        if rank == 0 {
            let row = GradView::sparse(&[4], &[6.0f32, 0.0]);
            pass.sink().grad_ready(2, row).unwrap();
        }
        let reduced = pass.finish().unwrap();
        let Some(Grad::Sparse(sparse)) = reduced.grad(2) else {
            panic!("one rank has used it");
        };
        assert_eq!(sparse.indices, [4]);
        assert_eq!(sparse.values.as_slice::<f32>().unwrap(), [4.0, 1.0]);
        assert!(begin(&reducer).finish().unwrap().grad(2).is_none());
    });
}
