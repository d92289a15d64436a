//! Memory that `wait` has handed over before the operation failed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_pg::{Buffer, DType, ErrorKind};
use phalanx_reducer::{GradTarget, GradView, ParamSpec, Pass, Reducer, ReducerConfig, Sync};

use super::repeated;
use crate::scenarios::ddp::connect_both;
use crate::scenarios::faults::{self as scenarios, LIMIT, PATIENCE};
use crate::scenarios::{Group, try_download, upload};

#[test]
fn emu_what_was_handed_over_before_a_failure_does_not_reach_the_host() {
    repeated(|world| {
        world.run(|rank| {
            scenarios::stays_away(rank);
        });
    });
}

const LEN: usize = 8;

fn reducer(group: &Group) -> Reducer {
    let param = ParamSpec {
        device: group.device(),
        ..ParamSpec::new("p", [LEN], DType::F32)
    };
    let config = ReducerConfig::default();
    Reducer::new(vec![param], Arc::clone(group), config).unwrap()
}

fn hand_in(pass: &Pass, grad: &Buffer) {
    let sink = pass.sink();
    sink.grad_ready(0, GradView::Device(grad)).unwrap();
}

#[test]
fn emu_a_step_that_failed_is_an_error_where_the_host_waits_and_at_the_next_step() {
    repeated(|world| {
        world.env("EMU_NCCL_FAULT", "1:1:hang").run(|rank| {
            let group = connect_both(rank, LIMIT * 3);
            let reducer = reducer(&group);
            let grad = upload(&*group, &[rank.rank() as f32; LEN]);
            let step = || {
                let pass = reducer.begin(GradTarget::Model, Sync::Yes).unwrap();
                hand_in(&pass, &grad);
                pass.finish().unwrap()
            };
            let read = |reduced: &phalanx_reducer::Reduced| {
                let grad = reduced.dense(0).unwrap();
                try_download::<f32>(&*group, grad.memory().0)
            };
            assert_eq!(read(&step()).unwrap(), [0.5; LEN]);
            let disturbed = step();
            if rank.rank() == 1 {
                let err = read(&disturbed).expect_err("it has failed");
                assert_eq!(err.kind(), ErrorKind::Broken, "{err}");
            }
            // Rank 0 does not look at its gradients: it learns it all the same.
            let start = Instant::now();
            let err = loop {
                match reducer.begin(GradTarget::Model, Sync::Yes) {
                    Ok(nothing_sent) => drop(nothing_sent),
                    Err(err) => break err,
                }
                assert!(start.elapsed() < PATIENCE, "every step begins well");
                std::thread::sleep(Duration::from_millis(5));
            };
            assert!(err.to_string().contains("allreduce #1"), "{err}");
            let err = group.shutdown().expect_err("the group is broken");
            assert_eq!(err.kind(), ErrorKind::Broken, "{err}");
        });
    });
}
