//! Streams, events and who owns memory until when.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, result};
use phalanx_pg::{Buffer, Call, ProcessGroup, ProcessGroupExt, ReduceOp, State, Work, WorkStatus};

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

/// A program with several devices has one of them current, whichever calls it makes.
#[test]
fn emu_the_callers_current_device_stays_current() {
    Emulator::new().world(2).run(|rank| {
        let other = CudaContext::new(5).unwrap();
        other.bind_to_thread().unwrap();
        let own = result::ctx::get_current().unwrap();
        assert!(own.is_some());
        let unchanged = || assert_eq!(result::ctx::get_current().unwrap(), own);
        let group = connect(rank);
        unchanged();
        let mine = upload(&*group, &[1i64]);
        unchanged();
        let work = group.allreduce(mine, ReduceOp::Sum).unwrap();
        unchanged();
        let sum = work.wait().unwrap();
        unchanged();
        assert_eq!(download::<i64>(&*group, &sum), [2]);
        drop(sum);
        group.barrier().unwrap();
        unchanged();
        group.shutdown().unwrap();
        drop(group);
        unchanged();
    });
}

/// Asks how the operation ended when it is told that it has, as an executor's may.
struct Curious {
    status: WorkStatus,
    asked: AtomicBool,
}

impl Wake for Curious {
    fn wake(self: Arc<Self>) {
        let ended = matches!(self.status.state(), State::Succeeded);
        self.asked.store(ended, Ordering::Release);
    }
}

#[test]
fn emu_who_is_woken_may_ask_how_it_ended() {
    Emulator::new().world(2).run(|rank| {
        let group = connect(rank);
        let work: Work<Buffer> = group
            .allreduce(upload(&*group, &[1i64]), ReduceOp::Sum)
            .unwrap();
        let curious = Arc::new(Curious {
            status: work.status(),
            asked: AtomicBool::new(false),
        });
        let waker = Waker::from(Arc::clone(&curious));
        let mut work = pin!(work);
        let start = Instant::now();
        let mut context = Context::from_waker(&waker);
        // It may be over at once; otherwise whoever ends it wakes.
        if work.as_mut().poll(&mut context).is_pending() {
            while !curious.asked.load(Ordering::Acquire) {
                assert!(start.elapsed() < Duration::from_secs(30), "nobody wakes");
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(matches!(
                work.as_mut().poll(&mut context),
                Poll::Ready(Ok(_))
            ));
        }
        group.shutdown().unwrap();
    });
}
