//! The process group suite.

use std::time::Duration;

use phalanx_testkit::Rank;

use crate::device::Emulator;
use crate::scenarios;

/// Cases that NCCL has nothing for. The others pass, or pass but for types and operators that it
/// lacks.
const NOT_ASKED: [&str; 6] = [
    "a monitored barrier lets everybody through",
    "a monitored barrier names who is missing",
    "cutting a vector into pieces changes no bit",
    "messages match by tag",
    "receiving from anybody names the sender",
    "sixteen-bit sums are rounded once",
];

fn run(rank: &Rank) {
    let report = scenarios::suite(rank);
    println!("{report}");
    let lacking = |why: &str| why.starts_with("passed, but without");
    let mut skipped: Vec<&str> = report
        .skipped
        .iter()
        .filter(|(_, why)| !lacking(why) && why != "needs 3 ranks")
        .map(|(name, _)| *name)
        .collect();
    skipped.sort_unstable();
    assert_eq!(skipped, NOT_ASKED);
}

/// What does not wait for its input computes with old values.
const COPY_DELAY: (&str, &str) = ("EMU_CUDA_COPY_DELAY_US", "50");

#[test]
fn emu_suite_passes_with_two_ranks() {
    let emulator = Emulator::new();
    let world = emulator.world(2).deadline(Duration::from_secs(300));
    world.env(COPY_DELAY.0, COPY_DELAY.1).run(|rank| {
        run(rank);
    });
}

#[test]
fn emu_suite_passes_with_four_ranks() {
    let emulator = Emulator::new();
    let world = emulator.world(4).deadline(Duration::from_secs(300));
    world.env(COPY_DELAY.0, COPY_DELAY.1).run(|rank| {
        run(rank);
    });
}

/// Before 2.28 NCCL has no gather, scatter and all-to-all: they are sends and receives.
#[test]
fn emu_suite_passes_on_an_older_library() {
    let emulator = Emulator::new();
    let world = emulator.world(3).deadline(Duration::from_secs(300));
    world.env("EMU_NCCL_VERSION", "22703").run(|rank| {
        run(rank);
    });
}
