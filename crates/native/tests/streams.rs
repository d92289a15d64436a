//! Several streams between two hosts, and ranks that end while a message is on them.

mod common;

use std::time::Duration;

use common::{DEADLINE, connect_across, die, finished, init, resume, stop, striped};
use phalanx_native::NativeGroup;
use phalanx_pg::{Buffer, CallKind, CallOptions, DType, ErrorKind, ProcessGroupExt, ReduceOp};
use phalanx_testkit::World;

/// Elements: hundreds of pieces for each pair of ranks.
const LEN: usize = 8 << 20;

#[test]
fn a_rank_that_ends_in_the_middle_of_a_striped_message_is_named() {
    for killed in [true, false] {
        let kind = match killed {
            true => ErrorKind::PeerLost,
            false => ErrorKind::Timeout,
        };
        striped(3).env("PHALANX_PIECE", "100000").check(
            |ctx| {
                let group = connect_across(ctx, &["a", "b", "c"]);
                group.barrier().unwrap();
                let options = CallOptions::default().with_timeout(Duration::from_secs(3));
                let sum = || {
                    let data = Buffer::zeroed(DType::F32, LEN);
                    group.with(options).allreduce(data, ReduceOp::Sum)
                };
                if ctx.rank() == 1 {
                    let work = sum().unwrap();
                    // What it has for rank 0 gets through; what it has for rank 2 is stuck where
                    // the sockets are full.
                    std::thread::sleep(Duration::from_millis(300));
                    ctx.store().set("in the middle", b"").unwrap();
                    match killed {
                        true => die(),
                        false => stop(ctx),
                    }
                    println!("resumed: {:?}", work.wait());
                    return;
                }
                if ctx.rank() == 2 {
                    ctx.store().wait(&["in the middle"]).unwrap();
                }
                let err = sum()
                    .and_then(|work| work.wait())
                    .expect_err("rank 1 is in the middle of it");
                assert_eq!(err.peer(), Some(1), "{err}");
                assert_eq!(err.place().call, Some(CallKind::AllReduce), "{err}");
                // Rank 2 may come to a group that is known to be broken.
                if ctx.rank() == 0 || err.kind() != ErrorKind::Broken {
                    assert_eq!(err.kind(), kind, "{err:?}");
                }
                let again = group.barrier().expect_err("the group is broken");
                assert_eq!(again.peer(), Some(1), "{again}");
                let survivors = ctx.store().add("survivors", 1).unwrap();
                if survivors == 2 && !killed {
                    resume(ctx);
                }
            },
            |outcome| finished(outcome, if killed { &[0, 2] } else { &[0, 1, 2] }),
        );
    }
}

#[test]
fn a_number_of_streams_that_is_none_is_refused_by_name() {
    let world = World::new(1).env("PHALANX_STREAMS", "many");
    world.deadline(DEADLINE).run(|ctx| {
        let err = NativeGroup::connect(&init(ctx)).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Invalid, "{err:?}");
        assert!(err.to_string().contains("PHALANX_STREAMS"), "{err}");
    });
}
