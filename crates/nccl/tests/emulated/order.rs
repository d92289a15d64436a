//! Streams, events and who owns memory until when.

use phalanx_pg::{Buffer, Call, ProcessGroup, ProcessGroupExt};

use crate::device::{Emulator, count};
use crate::scenarios::{self, connect, download, upload};

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

/// Messages to and from everybody else, each twice.
fn exchange(group: &dyn ProcessGroup, round: i32) {
    let me = group.rank();
    let others = (0..group.size()).filter(|&peer| peer != me);
    let calls = others.flat_map(|peer| {
        let send = |i: i32| Call::Send {
            data: upload(group, &[me as i32, i, round]).freeze(),
            peer,
            tag: 0,
        };
        let recv = || Call::Recv {
            buf: upload(group, &[-1; 3]),
            peer: Some(peer),
            tag: 0,
        };
        [send(0), recv(), recv(), send(1)]
    });
    let got = group.batch_p2p(calls.collect()).unwrap().wait().unwrap();
    let got: Vec<Buffer> = got.into_iter().flatten().collect();
    let received: Vec<Vec<i32>> = got.iter().map(|buf| download(group, buf)).collect();
    let others = (0..group.size()).filter(|&peer| peer != me);
    let sent = others.flat_map(|peer| [0, 1].map(|i| vec![peer as i32, i, round]));
    assert_eq!(received, sent.collect::<Vec<_>>());
}

#[test]
fn emu_batched_messages_are_one_group_call() {
    Emulator::new().world(3).run(|rank| {
        let group = connect(rank);
        // The first round makes the communicators, and each part is started when its one is there.
        exchange(&*group, 0);
        for round in 1..4 {
            let before = count("emu_nccl_groups");
            exchange(&*group, round);
            assert_eq!(count("emu_nccl_groups") - before, 1);
        }
        group.shutdown().unwrap();
    });
}

#[test]
fn emu_operators_and_types_are_nccls() {
    Emulator::new().world(2).run(|rank| {
        scenarios::operators(rank);
    });
}
