//! Streams, events and who owns memory until when.

use crate::device::Emulator;
use crate::scenarios;

const SUM: [f32; 1000] = [3.0; 1000];

#[test]
fn emu_an_operation_waits_for_its_input_and_the_host_does_not() {
    Emulator::new().world(2).run(|rank| {
        assert_eq!(scenarios::sum_of_late_input(rank, false).unwrap(), SUM);
    });
}

#[test]
fn emu_the_calling_threads_own_stream_is_waited_for() {
    Emulator::new().world(2).run(|rank| {
        assert_eq!(scenarios::sum_of_late_input(rank, true).unwrap(), SUM);
    });
}

/// The control of the two above: without the waits the result is wrong.
#[test]
fn emu_without_waits_the_result_is_wrong() {
    let emulator = Emulator::new();
    for per_thread in ["", "yes"] {
        let world = emulator.world(2).env("EMU_CUDA_IGNORE_WAITS", "1");
        world.env("PER_THREAD", per_thread).run(|rank| {
            let per_thread = !rank.var("PER_THREAD").is_empty();
            let sum = scenarios::sum_of_late_input(rank, per_thread);
            // Wrong values, or memory that was freed while it was used.
            assert_ne!(sum.ok(), Some(SUM.to_vec()), "a missing wait does not show");
        });
    }
}

#[test]
fn emu_dropped_works_keep_their_memory() {
    Emulator::new().world(2).run(|rank| {
        scenarios::dropped_works_keep_their_memory(rank);
    });
}

#[test]
fn emu_batches_are_one_operation() {
    Emulator::new().world(3).run(|rank| {
        scenarios::batches(rank);
    });
}

#[test]
fn emu_operators_and_types_are_nccls() {
    Emulator::new().world(2).run(|rank| {
        scenarios::operators(rank);
    });
}
