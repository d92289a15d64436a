//! What goes wrong, and what every rank then says.

mod handed_over;
mod stuck;

use std::time::{Duration, Instant};

use phalanx_nccl::Options;
use phalanx_pg::{Call, CallKind, CallOptions, Error, ErrorKind, ProcessGroup, ProcessGroupExt};
use phalanx_testkit::{End, World};

use crate::device::Emulator;
use crate::scenarios::faults::{self as scenarios, LIMIT, PATIENCE, connect, goes_on, sum};
use crate::scenarios::{connect_with, download, upload};

/// How often each fault is tried: five times, or as often as `cargo xtask soak nccl` asks. Not a
/// variable of Phalanx's: the harness takes those away from ranks, which must count as far.
fn repeated(test: impl Fn(World)) {
    let times = std::env::var("EMU_REPEAT").ok();
    let times = times.map_or(5, |text| text.parse().expect("a number"));
    let emulator = Emulator::new();
    for _ in 0..times {
        test(emulator.world(2));
    }
}

/// The first operation works, the second is disturbed: its error.
fn second_fails(group: &dyn ProcessGroup) -> Error {
    assert_eq!(sum(group, PATIENCE).expect("the first works"), [2.0; 100]);
    let start = Instant::now();
    let err = sum(group, LIMIT).expect_err("the second is disturbed");
    assert!(start.elapsed() < PATIENCE, "{err}");
    assert_eq!(err.place().call, Some(CallKind::AllReduce), "{err}");
    assert_eq!(err.place().seq, Some(1), "{err}");
    assert_eq!(err.place().rank, Some(group.rank()), "{err}");
    let later = sum(group, PATIENCE).expect_err("the group is broken");
    assert_eq!(later.kind(), ErrorKind::Broken, "{later}");
    assert_eq!(later.place().seq, Some(2), "{later}");
    err
}

#[test]
fn emu_an_operation_that_hangs_times_out_and_the_process_goes_on() {
    repeated(|world| {
        world.env("EMU_NCCL_FAULT", "1:1:hang").run(|rank| {
            let group = connect(rank, "world");
            let err = second_fails(&*group);
            let told = err.kind() == ErrorKind::Broken;
            assert!(told || err.kind() == ErrorKind::Timeout, "{err:?}");
            drop(group);
            goes_on(rank);
        });
    });
}

#[test]
fn emu_an_asynchronous_error_reaches_every_rank() {
    repeated(|world| {
        world.env("EMU_NCCL_FAULT", "1:1:async=3").run(|rank| {
            let group = connect(rank, "world");
            let err = second_fails(&*group);
            let text = err.to_string();
            match rank.rank() {
                1 => {
                    assert!(text.contains("ncclInternalError"), "{text}");
                    let later = sum(&*group, PATIENCE).expect_err("the group is broken");
                    let cause = later.cause().expect("it says why");
                    let place = (cause.place().call, cause.place().seq);
                    assert_eq!(place, (Some(CallKind::AllReduce), Some(1)), "{later}");
                }
                _ => assert!(
                    text.contains("ncclInternalError") || text.contains("not finished"),
                    "{text}"
                ),
            }
            drop(group);
            goes_on(rank);
        });
    });
}

#[test]
fn emu_a_call_that_does_not_come_back_is_ended_by_the_abort() {
    repeated(|world| {
        world.env("EMU_NCCL_FAULT", "1:1:block").run(|rank| {
            let group = connect(rank, "world");
            second_fails(&*group);
            drop(group);
            goes_on(rank);
        });
    });
}

#[test]
fn emu_a_split_that_a_rank_does_not_join_is_a_timeout_and_breaks_the_group() {
    repeated(|world| {
        world.run(|rank| {
            let mut options = Options::default();
            options.eager = true;
            let group = connect_with(rank, &options, "world", LIMIT);
            if rank.rank() == 0 {
                let err = group.split(&[0, 1], "both").expect_err("nobody else does");
                assert_eq!(err.kind(), ErrorKind::Timeout, "{err}");
                assert!(err.to_string().contains("split"), "{err}");
                rank.store().set("tried", b"").unwrap();
            }
            rank.store().get("tried").unwrap();
            // Rank 1 may also learn it from the library, in which its sum meets the split.
            let err = sum(&*group, PATIENCE).expect_err("the group is broken");
            let told = err.kind() == ErrorKind::Broken;
            assert!(told || rank.rank() == 1, "{err}");
            let later = sum(&*group, PATIENCE).expect_err("it stays so");
            assert_eq!(later.kind(), ErrorKind::Broken, "{later}");
            drop(group);
            goes_on(rank);
        });
    });
}

#[test]
fn emu_an_error_ends_the_process_if_that_is_asked_for() {
    let world = Emulator::new();
    let world = world.world(2).env("EMU_NCCL_FAULT", "1:1:hang");
    world.check(
        |rank| {
            let mut options = Options::default();
            options.tear_down = true;
            let group = connect_with(rank, &options, "world", LIMIT);
            assert_eq!(sum(&*group, PATIENCE).expect("the first works"), [2.0; 100]);
            let err = sum(&*group, LIMIT).expect_err("the second is disturbed");
            std::thread::sleep(PATIENCE);
            panic!("still there after {err}");
        },
        |outcome| {
            let aborted = |rank| outcome.rank(rank).end == End::Signaled(6);
            assert!(aborted(0) || aborted(1), "{}", outcome.report());
            let again = |rank| outcome.rank(rank).end == End::Killed;
            let both = [0, 1].into_iter().all(|rank| aborted(rank) || again(rank));
            assert!(both, "{}", outcome.report());
        },
    );
}

/// A message to the other rank of two and one from it, as a batch.
fn exchange(group: &dyn ProcessGroup, limit: Duration) -> Result<(), Error> {
    let (peer, tag) = (1 - group.rank(), 0);
    let send = Call::Send {
        data: upload(group, &[1.0f32; 100]).freeze(),
        peer,
        tag,
    };
    let recv = Call::Recv {
        buf: upload(group, &[0.0f32; 100]),
        peer: Some(peer),
        tag,
    };
    let options = CallOptions::default().with_timeout(limit);
    let work = group.with(options).batch_p2p(vec![send, recv])?;
    let got = work.synchronize()?;
    let received = got[1].as_ref().expect("what was received");
    assert_eq!(download::<f32>(group, received), [1.0; 100]);
    Ok(())
}

#[test]
fn emu_a_batch_that_does_not_come_back_is_ended_by_the_abort() {
    repeated(|world| {
        // A batch has a part in each direction: it is the second one that is disturbed.
        world.env("EMU_NCCL_FAULT", "1:2:block").run(|rank| {
            let group = connect(rank, "world");
            exchange(&*group, PATIENCE).expect("the first works");
            let start = Instant::now();
            let err = exchange(&*group, LIMIT).expect_err("the second is disturbed");
            assert!(start.elapsed() < PATIENCE, "{err}");
            assert_eq!(err.place().call, Some(CallKind::Batch), "{err}");
            let later = exchange(&*group, PATIENCE).expect_err("the group is broken");
            assert_eq!(later.kind(), ErrorKind::Broken, "{later}");
            drop(group);
            goes_on(rank);
        });
    });
}

#[test]
fn emu_a_rank_that_dies_is_a_timeout_or_a_lost_peer() {
    for (how, kind) in [
        ("", ErrorKind::Timeout),
        ("remote_error", ErrorKind::PeerLost),
    ] {
        repeated(|world| {
            let world = world.env("EMU_NCCL_FAULT", "1:1:exit");
            world.env("EMU_NCCL_PEER_DEATH", how).check(
                |rank| {
                    let group = connect(rank, "world");
                    let err = second_fails(&*group);
                    println!("the error is {:?}", err.kind());
                },
                |outcome| {
                    let survivor = outcome.rank(0);
                    assert_eq!(survivor.end, End::Finished, "{}", outcome.report());
                    let expected = format!("the error is {kind:?}");
                    assert!(survivor.log.contains(&expected), "{}", survivor.log);
                },
            );
        });
    }
}

#[test]
fn emu_an_abort_ends_the_others_operations_at_once() {
    repeated(|world| {
        world.run(|rank| {
            scenarios::abort(rank);
        });
    });
}

#[test]
fn emu_a_rank_that_never_comes_is_a_timeout_of_the_first_operation() {
    repeated(|world| {
        world.run(|rank| {
            scenarios::never_comes(rank);
        });
    });
}
