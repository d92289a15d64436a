//! The process group suite on the emulated device.

use std::sync::Arc;
use std::time::Duration;

use phalanx_pg::ProcessGroup;

use crate::device::{Emulator, connect, device};
use phalanx_conformance::group::{Level, OnDevice, run_rank};

fn run(size: usize, name: &str) {
    let emulator = Emulator::new();
    let world = emulator.world(size).deadline(Duration::from_secs(600));
    // What does not wait for its input computes with old values.
    let world = world.env("EMU_CUDA_COPY_DELAY_US", "50");
    world.test_name(name).run(|rank| {
        let group = connect(rank);
        let device = device(&*group);
        let group: Arc<dyn ProcessGroup> = Arc::new(OnDevice::new(group, device));
        let report = run_rank(&group, Level::Sample);
        group.shutdown().unwrap();
        if rank.rank() == 0 {
            println!("{report}");
        }
    });
}

#[test]
fn emu_suite_passes_with_two_ranks() {
    run(2, "suite::emu_suite_passes_with_two_ranks");
}

#[test]
fn emu_suite_passes_with_four_ranks() {
    run(4, "suite::emu_suite_passes_with_four_ranks");
}
