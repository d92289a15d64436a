//! A thread that is inside the library holds up nobody else's end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_nccl::Options;
use phalanx_pg::{
    Buffer, CallKind, CallOptions, Error, ErrorKind, ProcessGroupExt, ReduceOp, Result, Work,
};
use phalanx_testkit::Rank;

use super::repeated;
use crate::scenarios::faults::{LIMIT, PATIENCE, connect, goes_on, sum};
use crate::scenarios::{Group, connect_with, download, upload};

fn start(group: &Group, limit: Duration) -> Result<Work<Buffer>> {
    let options = CallOptions::default().with_timeout(limit);
    let mine = upload(&**group, &[1.0f32; 100]);
    group.with(options).allreduce(mine, ReduceOp::Sum)
}

/// The second sum is on the device, where it waits for a rank that does not come; the third is
/// being issued by another thread, which does not come back. How they end.
fn one_waits_one_is_stuck(group: &Group, limits: [Duration; 2]) -> [Error; 2] {
    assert_eq!(
        sum(&**group, PATIENCE).expect("the first works"),
        [2.0; 100]
    );
    let second = start(group, limits[0]).expect("issued");
    let other = Arc::clone(group);
    let third = std::thread::spawn(move || start(&other, limits[1]).map(drop));
    let second = second.synchronize().map(drop);
    let third = third.join().unwrap();
    [second, third].map(|end| end.expect_err("nobody else calls it"))
}

/// On rank 1 what is above. The end of its two operations; none on rank 0, which goes on too.
fn with_one_stuck(rank: &Rank, limits: [Duration; 2]) -> Option<[Error; 2]> {
    let group = connect(rank, "world");
    let ends = match rank.rank() {
        0 => {
            assert_eq!(sum(&*group, PATIENCE).expect("it works"), [2.0; 100]);
            rank.store().wait(&["ended"]).expect("rank 1 ends");
            None
        }
        _ => {
            let ends = one_waits_one_is_stuck(&group, limits);
            rank.store().set("ended", b"").expect("the store");
            Some(ends)
        }
    };
    drop(group);
    goes_on(rank);
    ends
}

#[test]
fn emu_an_operation_that_the_abort_ends_has_not_succeeded() {
    repeated(|world| {
        world.env("EMU_NCCL_FAULT", "1:2:block").run(|rank| {
            let ends = with_one_stuck(rank, [LIMIT; 2]);
            for (seq, err) in (1..).zip(ends.into_iter().flatten()) {
                assert_eq!(err.place().call, Some(CallKind::AllReduce), "{err}");
                assert_eq!(err.place().seq, Some(seq), "{err}");
                // The timeout is the cause: what the library says about its own end is not.
                let kinds = [ErrorKind::Timeout, ErrorKind::Broken];
                assert!(kinds.contains(&err.kind()), "{err}");
                assert!(!err.to_string().contains("ncclInternalError"), "{err}");
            }
        });
    });
}

#[test]
fn emu_a_timeout_is_kept_while_another_thread_is_inside_the_library() {
    repeated(|world| {
        world.env("EMU_NCCL_FAULT", "1:2:block").run(|rank| {
            let limits = [LIMIT, Duration::from_secs(12)];
            if let Some([second, third]) = with_one_stuck(rank, limits) {
                assert_eq!(second.kind(), ErrorKind::Timeout, "{second}");
                assert_eq!(third.kind(), ErrorKind::Broken, "{third}");
                assert!(third.to_string().contains("allreduce #1"), "{third}");
            }
        });
    });
}

/// The next sum does not come back from the library, or not within twelve seconds. One that is called
/// behind it by another thread ends in its own time.
fn one_behind(rank: &Rank, group: &Group) {
    let issued = group.sequence();
    let other = Arc::clone(group);
    let limit = Duration::from_secs(12);
    let stuck = std::thread::spawn(move || start(&other, limit).map(drop));
    // Until it has taken its number it may be the later one.
    let begun = Instant::now();
    while group.sequence() == issued && begun.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(1));
    }
    let behind = start(group, LIMIT).and_then(Work::synchronize);
    let behind = behind.expect_err("one before it is stuck");
    assert_eq!(behind.kind(), ErrorKind::Timeout, "{behind}");
    let stuck = stuck.join().unwrap().expect_err("it does not come back");
    assert_eq!(stuck.kind(), ErrorKind::Broken, "{stuck}");
    rank.store().set("ended", b"").expect("the store");
}

#[test]
fn emu_a_call_behind_one_that_does_not_come_back_keeps_its_timeout() {
    repeated(|world| {
        world.env("EMU_NCCL_FAULT", "1:1:block").run(|rank| {
            let group = connect(rank, "world");
            assert_eq!(sum(&*group, PATIENCE).expect("it works"), [2.0; 100]);
            if rank.rank() == 1 {
                one_behind(rank, &group);
            }
            rank.store().wait(&["ended"]).expect("rank 1 ends");
        });
    });
}

/// Transports are connected at a communicator's first operation, which is in progress until the
/// others come to theirs, as in NCCL.
const LAZY: (&str, &str) = ("EMU_NCCL_CONNECT", "lazy");

/// A group whose communicator is there, and its transports are not.
fn eager(rank: &Rank) -> Group {
    let mut options = Options::default();
    options.eager = true;
    connect_with(rank, &options, "world", PATIENCE)
}

#[test]
fn emu_a_first_operation_waits_for_the_others_inside_the_library() {
    repeated(|world| {
        world.env(LAZY.0, LAZY.1).run(|rank| {
            let group = eager(rank);
            if rank.rank() == 1 {
                rank.store().wait(&["calling"]).expect("rank 0 comes to it");
            }
            rank.store().set("calling", b"").expect("the store");
            let works = [0, 1].map(|_| start(&group, PATIENCE).expect("accepted"));
            for work in works {
                let sum = work.synchronize().expect("both come");
                assert_eq!(download::<f32>(&*group, &sum), [2.0; 100]);
            }
            group.shutdown().expect("an orderly end");
        });
    });
}

#[test]
fn emu_ranks_that_send_twice_before_they_receive_meet_at_first_use() {
    repeated(|world| {
        world.env(LAZY.0, LAZY.1).run(|rank| {
            let group = connect(rank, "world");
            let peer = 1 - rank.rank();
            let send = |value: i64| group.send(upload(&*group, &[value]).freeze(), peer, 0);
            let sent = [7, 8].map(|value| send(value).expect("accepted"));
            for value in [7i64, 8] {
                let room = upload(&*group, &[0i64]);
                let got = group.recv(room, peer, 0).expect("accepted");
                let got = got.synchronize().expect("it was sent");
                assert_eq!(download::<i64>(&*group, &got), [value]);
            }
            for work in sent {
                work.synchronize().expect("it was received");
            }
            group.shutdown().expect("an orderly end");
        });
    });
}

#[test]
fn emu_a_first_operation_to_which_nobody_comes_keeps_its_timeout() {
    repeated(|world| {
        world.env(LAZY.0, LAZY.1).run(|rank| {
            let group = eager(rank);
            if rank.rank() == 0 {
                let err = start(&group, LIMIT).and_then(Work::synchronize);
                let err = err.expect_err("nobody comes");
                assert_eq!(err.kind(), ErrorKind::Timeout, "{err}");
                assert_eq!(err.place().seq, Some(0), "{err}");
                rank.store().set("ended", b"").expect("the store");
            }
            rank.store().wait(&["ended"]).expect("rank 0 ends");
        });
    });
}

#[test]
fn emu_a_call_behind_a_first_operation_keeps_its_timeout() {
    repeated(|world| {
        world.env(LAZY.0, LAZY.1).run(|rank| {
            let group = eager(rank);
            if rank.rank() == 1 {
                one_behind(rank, &group);
            }
            rank.store().wait(&["ended"]).expect("rank 1 ends");
        });
    });
}
