//! PyTorch's DDP, replayed with gradients in device memory.

use std::sync::Arc;
use std::time::Duration;

use phalanx_pg::DType;
use phalanx_reducer::{GradTarget, GradView, ParamSpec, Reducer, ReducerConfig, Sync};

use crate::device::{Emulator, count};
use crate::scenarios::ddp::{connect_both, replay_all};
use crate::scenarios::{download, upload};

#[test]
fn emu_ddp_gives_pytorchs_numbers_with_two_ranks() {
    let emulator = Emulator::new();
    let world = emulator.world(2).deadline(Duration::from_secs(240));
    world.env("EMU_CUDA_COPY_DELAY_US", "50").run(|rank| {
        replay_all(rank);
    });
}

#[test]
fn emu_ddp_gives_pytorchs_numbers_with_four_ranks() {
    let emulator = Emulator::new();
    let world = emulator.world(4).deadline(Duration::from_secs(240));
    world.env("EMU_CUDA_COPY_DELAY_US", "50").run(|rank| {
        replay_all(rank);
    });
}

#[test]
fn emu_gradients_on_a_device_do_not_pass_by_the_host() {
    const LEN: usize = 5000;
    Emulator::new().world(2).run(|rank| {
        let group = connect_both(rank, Duration::from_secs(60));
        let params = (0..3).map(|slot| ParamSpec {
            device: group.device(),
            ..ParamSpec::new(format!("p{slot}"), [LEN], DType::F32)
        });
        let config = ReducerConfig::default();
        let reducer = Reducer::new(params.collect(), Arc::clone(&group), config).unwrap();
        // More than one, since buckets are rebuilt after the first.
        for step in 0..3 {
            let value = |rank: usize, slot: usize| (rank + slot + step) as f32;
            let grads = [0, 1, 2].map(|slot| upload(&*group, &[value(rank.rank(), slot); LEN]));
            let before = count("emu_cuda_host_copies");
            assert!(before > 0, "uploads count");
            let pass = reducer.begin(GradTarget::Model, Sync::Yes).unwrap();
            for slot in [2, 1, 0] {
                let sink = pass.sink();
                sink.grad_ready(slot, GradView::Device(&grads[slot]))
                    .unwrap();
            }
            let reduced = pass.finish().unwrap();
            assert_eq!(count("emu_cuda_host_copies"), before);
            for slot in 0..3 {
                let average = (value(0, slot) + value(1, slot)) / 2.0;
                let grad = reduced.dense(slot).unwrap();
                let (memory, offset) = grad.memory();
                let values = download::<f32>(&*group, memory);
                assert_eq!(values[offset..][..LEN], [average; LEN]);
            }
        }
        group.shutdown().unwrap();
    });
}
