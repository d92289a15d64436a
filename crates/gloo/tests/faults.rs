//! What goes wrong, one by one, with real processes.

mod common;

use std::time::Duration;

use common::{DEADLINE, connect, init};
use phalanx_conformance::group::{break_by_timeout, form_too_late, wake_by_abort};
use phalanx_gloo::GlooGroup;
use phalanx_pg::{
    Buffer, CallKind, CallOptions, Checked, DType, ErrorKind, ProcessGroup, ProcessGroupExt,
    ReduceOp,
};
use phalanx_testkit::{End, Outcome, World};

/// Elements: more than travels with the first messages of a collective.
const LEN: usize = 300_000;

fn finished(outcome: &Outcome, ranks: &[usize]) {
    for &rank in ranks {
        let end = &outcome.rank(rank).end;
        assert_eq!(*end, End::Finished, "{}", outcome.report());
    }
}

/// No goodbye, no unwinding.
fn die() -> ! {
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
        .unwrap();
    loop {
        std::thread::park();
    }
}

#[test]
fn a_rank_that_is_killed_ends_what_others_wait_for() {
    World::new(4).deadline(DEADLINE).check(
        |ctx| {
            let group = connect(ctx);
            group.barrier().unwrap();
            if ctx.rank() == 1 {
                std::thread::sleep(Duration::from_millis(100));
                die();
            }
            let message = group.recv(Buffer::zeroed(DType::F32, 3), 1, 5).unwrap();
            let sum = group.allreduce(Buffer::zeroed(DType::F32, LEN), ReduceOp::Sum);
            let queued = group.barrier_async().unwrap();
            let err = sum.unwrap().wait().expect_err("rank 1 is dead");
            assert_eq!(err.kind(), ErrorKind::PeerLost, "{err:?}");
            assert_eq!(err.peer(), Some(1), "{err}");
            let place = err.place();
            assert_eq!(
                (place.call, place.seq),
                (Some(CallKind::AllReduce), Some(1))
            );
            for err in [message.wait().map(drop), queued.wait(), group.barrier()] {
                let err = err.expect_err("the group is broken");
                assert_eq!(err.peer(), Some(1), "{err}");
            }
        },
        |outcome| finished(outcome, &[0, 2, 3]),
    );
}

#[test]
fn a_rank_that_comes_late_is_waited_for() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        if ctx.rank() == 2 {
            std::thread::sleep(Duration::from_millis(700));
        }
        let group = connect(ctx);
        if ctx.rank() == 0 {
            std::thread::sleep(Duration::from_millis(700));
        }
        group.barrier().unwrap();
        group.shutdown().unwrap();
    });
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        if ctx.rank() == 1 {
            return;
        }
        let mut init = init(ctx);
        init.timeout = Duration::from_secs(1);
        let err = GlooGroup::connect(&init).expect_err("rank 1 does not come");
        assert_eq!(err.kind(), ErrorKind::Timeout, "{err:?}");
        let text = err.to_string();
        // Who waits for whom is in the order of the ranks.
        assert!(
            text.contains("rank 1") || text.contains("ranks [1"),
            "{text}"
        );
    });
}

/// Long enough for ranks that are there.
const SHORT: Duration = Duration::from_secs(3);

#[test]
fn a_rank_that_is_late_to_form_a_group_is_named_and_so_are_those_who_gave_up() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        let mut init = init(ctx);
        init.timeout = SHORT;
        let world = GlooGroup::connect(&init).unwrap();
        form_too_late(&world, &*ctx.store());
        world.shutdown().unwrap();
    });
}

#[test]
fn a_message_of_no_elements_may_come_from_anybody() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        let nothing = || Buffer::zeroed(DType::F32, 0);
        if ctx.rank() == 0 {
            let mut from: Vec<usize> = (1..3)
                .map(|_| group.recv_any(nothing(), 4).unwrap().wait().unwrap().1)
                .collect();
            from.sort_unstable();
            assert_eq!(from, [1, 2]);
        } else {
            group
                .send(nothing().freeze(), 0, 4)
                .unwrap()
                .wait()
                .unwrap();
        }
        group.barrier().unwrap();
        group.shutdown().unwrap();
    });
}

#[test]
fn messages_of_too_many_tags_are_refused_before_any_is_lost() {
    World::new(2).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        let value = |tag: u32| f64::from(tag);
        if ctx.rank() == 1 {
            ctx.store().wait(&["refused"]).unwrap();
            for tag in 0..1024 {
                let data = Buffer::from_vec(vec![value(tag)]).freeze();
                group.send(data, 0, tag).unwrap().wait().unwrap();
            }
            group.shutdown().unwrap();
            return;
        }
        let recv = |tag| group.recv(Buffer::zeroed(DType::F64, 1), 1, tag);
        let open: Vec<_> = (0..1024).map(|tag| recv(tag).unwrap()).collect();
        let err = recv(1024).expect_err("it would need one more queue");
        assert_eq!(err.kind(), ErrorKind::QueueFull, "{err:?}");
        let told = "1024 queues, one for each peer and tag";
        assert!(err.to_string().contains(told), "{err}");
        ctx.store().set("refused", b"").unwrap();
        for (tag, work) in (0..).zip(open) {
            assert_eq!(
                work.wait().unwrap().as_slice::<f64>().unwrap(),
                [value(tag)]
            );
        }
        group.shutdown().unwrap();
    });
}

#[test]
fn what_a_rank_has_sent_comes_also_if_it_drops_the_group_at_once() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        let recv = |tag| {
            let room = Buffer::zeroed(DType::F32, 1000);
            group.recv(room, 0, tag).and_then(|work| work.wait())
        };
        match ctx.rank() {
            0 => {
                for tag in 0..3 {
                    let data = Buffer::from_vec(vec![tag as f32; 1000]).freeze();
                    group.send(data, 1, tag).unwrap().wait().unwrap();
                }
                drop(group);
            }
            1 => {
                // Rank 2 waits for nothing that was sent, and is told so before.
                ctx.store().wait(&["told"]).unwrap();
                for tag in 0..3 {
                    let came = recv(tag).unwrap();
                    assert_eq!(came.as_slice::<f32>().unwrap(), [tag as f32; 1000]);
                }
                let err = recv(3).expect_err("rank 0 has sent no more");
                assert_eq!(
                    (err.kind(), err.peer()),
                    (ErrorKind::Aborted, Some(0)),
                    "{err}"
                );
            }
            _ => {
                let err = recv(0).expect_err("rank 0 has sent nothing here");
                assert_eq!(
                    (err.kind(), err.peer()),
                    (ErrorKind::Aborted, Some(0)),
                    "{err}"
                );
                ctx.store().set("told", b"").unwrap();
            }
        }
    });
}

#[test]
fn a_collective_that_runs_out_of_time_names_those_who_did_not_come() {
    World::new(4).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        group.barrier().unwrap();
        if [1, 3].contains(&ctx.rank()) {
            ctx.store().wait(&["late/0", "late/2"]).unwrap();
            return;
        }
        let options = CallOptions::blocking().with_timeout(Duration::from_secs(1));
        let sum = group
            .with(options)
            .allreduce(Buffer::zeroed(DType::F32, LEN), ReduceOp::Sum);
        let err = sum.and_then(|work| work.wait()).expect_err("two are late");
        assert_eq!(
            (err.kind(), err.peer()),
            (ErrorKind::Timeout, Some(1)),
            "{err:?}"
        );
        assert!(err.to_string().contains("ranks 1, 3 did not come"), "{err}");
        ctx.store()
            .set(&format!("late/{}", ctx.rank()), b"")
            .unwrap();
    });
}

#[test]
fn ranks_that_call_different_things_are_not_said_to_be_late() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        group.barrier().unwrap();
        let options = CallOptions::blocking().with_timeout(Duration::from_secs(1));
        let group = group.with(options);
        let ended = match ctx.rank() {
            0 => group.barrier(),
            _ => {
                let sum = group.allreduce(Buffer::zeroed(DType::F32, LEN), ReduceOp::Sum);
                sum.and_then(|work| work.wait()).map(drop)
            }
        };
        let err = ended.expect_err("they do not meet");
        // Others may still ask this rank.
        let own = format!("over/{}", ctx.rank());
        ctx.store().set(&own, b"").unwrap();
        ctx.store().wait(&["over/0", "over/1", "over/2"]).unwrap();
        assert_eq!(err.kind(), ErrorKind::Timeout, "{err:?}");
        let text = err.to_string();
        assert!(
            text.contains("all ranks came, but the data did not"),
            "{text}"
        );
        assert!(text.contains("PHALANX_DEBUG=detail"), "{text}");
        assert!(!text.contains("not all ranks came"), "{text}");
    });
}

#[test]
fn a_process_that_has_dropped_the_whole_is_not_said_to_have_ended() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        let world = connect(ctx);
        let over = ["over/0", "over/2"];
        if ctx.rank() == 1 {
            drop(world);
            ctx.store().wait(&over).unwrap();
            return;
        }
        let err = world
            .new_group(&[0, 1, 2], "all")
            .expect_err("rank 1 is not there");
        let seen = (err.kind(), err.peer());
        assert_eq!(seen, (ErrorKind::Aborted, Some(1)), "{err}");
        assert!(err.to_string().contains("rank 1 has dropped"), "{err}");
        ctx.store()
            .set(&format!("over/{}", ctx.rank()), b"")
            .unwrap();
        // The other must not find this one gone first.
        ctx.store().wait(&over).unwrap();
    });
}

#[test]
fn an_operation_that_takes_too_long_breaks_the_group_for_everybody() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        break_by_timeout(&connect(ctx), &*ctx.store());
    });
}

#[test]
fn an_abort_wakes_what_is_blocked_here_and_elsewhere() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        wake_by_abort(&connect(ctx), &*ctx.store());
    });
}

#[test]
fn a_part_that_fails_leaves_the_whole_as_it_was() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        let world = connect(ctx);
        if let Some(part) = world.split(&[0, 2], "part").unwrap() {
            if ctx.rank() == 0 {
                part.abort("enough of this part");
            }
            let err = part.barrier().expect_err("it is aborted");
            assert!(err.to_string().contains("enough of this part"), "{err}");
        }
        let sum = world.allreduce(Buffer::from_vec(vec![2.0f32; LEN]), ReduceOp::Sum);
        let sum = sum.unwrap().wait().unwrap();
        assert_eq!(sum.as_slice::<f32>().unwrap(), [6.0; LEN]);
        world.shutdown().unwrap();
    });
}

/// Gloo alone lets some of them pass, and ends the process for others.
#[test]
fn different_calls_are_an_error_under_checked() {
    World::new(2).deadline(DEADLINE).run(|ctx| {
        let group = Checked::new(connect(ctx)).unwrap();
        let odd = usize::from(ctx.rank() == 1);
        let zeros = |len| Buffer::zeroed(DType::F32, len);
        let call = |case| match case {
            0 => group.allreduce(zeros(LEN + odd), ReduceOp::Sum).map(drop),
            1 => group.broadcast(zeros(2 + 4 * odd), 0).map(drop),
            2 => group.broadcast(zeros(2), odd).map(drop),
            3 => {
                let op = [ReduceOp::Sum, ReduceOp::Max][odd];
                group.allreduce(zeros(2), op).map(drop)
            }
            4 if odd == 1 => group.barrier(),
            4 => group.allreduce(zeros(2), ReduceOp::Sum).map(drop),
            5 => group.allgather(zeros(1 + odd).freeze()).map(drop),
            _ => {
                let bufs = (0..2 + odd).map(|_| zeros(1)).collect();
                group.allreduce_coalesced(bufs, ReduceOp::Sum).map(drop)
            }
        };
        let aspects = [
            "length", "length", "root", "operator", "call", "length", "length",
        ];
        for (case, aspect) in aspects.into_iter().enumerate() {
            let err = call(case).expect_err("they differ");
            assert_eq!(err.kind(), ErrorKind::Mismatch, "{err:?}");
            let told = format!("they differ in: {aspect}");
            assert!(err.to_string().contains(&told), "{err}");
        }
        group.barrier().unwrap();
        group.shutdown().unwrap();
    });
}

/// Not a wish: what gloo does, and why the documentation says to use `Checked`.
#[test]
fn different_lengths_without_checked_end_the_process_that_gets_too_much() {
    World::new(2).deadline(DEADLINE).check(
        |ctx| {
            let group = connect(ctx);
            let len = if ctx.rank() == 0 { 4 } else { LEN };
            let done = group
                .broadcast(Buffer::zeroed(DType::F32, len), 1)
                .and_then(|work| work.wait());
            println!("{done:?}");
        },
        |outcome| {
            assert_eq!(
                outcome.rank(0).end,
                End::Signaled(6),
                "{}",
                outcome.report()
            );
        },
    );
}

#[test]
fn a_transport_that_is_not_there_is_refused_by_name() {
    let world = World::new(1).env("GLOO_DEVICE_TRANSPORT", "IBVERBS");
    world.run(|ctx| {
        let err = GlooGroup::connect(&init(ctx)).expect_err("not built in");
        assert_eq!(err.kind(), ErrorKind::Unsupported, "{err:?}");
        assert!(err.to_string().contains("this build has TCP"), "{err}");
    });
}

#[test]
fn an_interface_can_be_named_and_a_wrong_one_is_refused() {
    World::new(2).env("GLOO_SOCKET_IFNAME", "lo").run(|ctx| {
        let group = connect(ctx);
        group.barrier().unwrap();
        group.shutdown().unwrap();
    });
    World::new(1)
        .env("GLOO_SOCKET_IFNAME", "nowhere0")
        .run(|ctx| {
            let err = GlooGroup::connect(&init(ctx)).expect_err("there is no such interface");
            assert_eq!(err.kind(), ErrorKind::Invalid, "{err:?}");
            assert!(err.to_string().contains("nowhere0"), "{err}");
        });
}

#[test]
fn a_second_process_with_the_same_rank_is_refused() {
    World::new(2).deadline(DEADLINE).run(|ctx| {
        if ctx.rank() == 1 {
            ctx.store().wait(&["joined"]).unwrap();
        }
        let mut init = init(ctx);
        init.rank = 0;
        init.timeout = Duration::from_secs(3);
        if ctx.rank() == 0 {
            ctx.store().set("joined", b"").unwrap();
        }
        let err = GlooGroup::connect(&init).expect_err("there is no rank 1");
        println!("{err}");
        assert!(
            [ErrorKind::Invalid, ErrorKind::Timeout].contains(&err.kind()),
            "{err:?}"
        );
    });
}
