//! What goes wrong, one by one, with real processes that mpirun starts.

mod common;

use std::time::Duration;

use common::{DEADLINE, TIMEOUT, connect, mpirun};
use phalanx_conformance::group::{break_by_timeout, form_too_late, wake_by_abort};
use phalanx_mpi::MpiGroup;
use phalanx_pg::registry::GroupInit;
use phalanx_pg::{
    Buffer, CallOptions, DType, ErrorKind, ProcessGroup, ProcessGroupExt, ReduceOp, Result,
};
use phalanx_testkit::{End, World};

/// Elements: more than travels with a hello.
const LEN: usize = 300_000;

#[test]
fn an_operation_that_takes_too_long_breaks_the_group_for_everybody() {
    mpirun(3).run(|ctx| {
        break_by_timeout(&connect(ctx), &*ctx.store());
    });
}

#[test]
fn a_collective_that_runs_out_of_time_names_those_who_did_not_come() {
    mpirun(5).run(|ctx| {
        let group = connect(ctx);
        group.barrier().unwrap();
        let late = ["late/0", "late/2", "late/4"];
        if [1, 3].contains(&ctx.rank()) {
            ctx.store().wait(&late).unwrap();
            return;
        }
        let options = CallOptions::blocking().with_timeout(Duration::from_secs(1));
        let sum = group
            .with(options)
            .allreduce(Buffer::zeroed(DType::F32, LEN), ReduceOp::Sum);
        let err = sum.and_then(|work| work.wait()).expect_err("two are late");
        // Before anything can go wrong, so that nobody waits for this rank then.
        let own = format!("late/{}", ctx.rank());
        ctx.store().set(&own, b"").unwrap();
        let seen = (err.kind(), err.peer());
        assert_eq!(seen, (ErrorKind::Timeout, Some(1)), "{err:?}");
        assert!(err.to_string().contains("ranks 1, 3 did not come"), "{err}");
        ctx.store().wait(&late).unwrap();
    });
}

#[test]
fn a_rank_that_another_launcher_has_started_is_not_taken_for_a_world_of_one() {
    World::new(1).env("WORLD_SIZE", "2").run(|_| {
        let err = MpiGroup::world(TIMEOUT).expect_err("there are two");
        assert_eq!(err.kind(), ErrorKind::Invalid);
        assert!(err.to_string().contains("--launcher mpirun"), "{err}");
    });
}

#[test]
fn a_rank_that_gives_up_leaves_nobody_behind_in_mpi() {
    mpirun(2).run(|ctx| {
        let group = connect(ctx);
        let ours = Buffer::from_vec(vec![1.0f32; LEN]);
        if ctx.rank() == 0 {
            // Has said hello, and does not wait for the answer.
            let options = CallOptions::blocking().with_timeout(Duration::from_millis(100));
            let sum = group.with(options).allreduce(ours, ReduceOp::Sum);
            let err = sum
                .and_then(|work| work.wait())
                .expect_err("rank 1 is late");
            assert_eq!(
                (err.kind(), err.peer()),
                (ErrorKind::Timeout, Some(1)),
                "{err}"
            );
            ctx.store().set("given up", b"").unwrap();
            ctx.store().wait(&["over"]).unwrap();
            return;
        }
        ctx.store().wait(&["given up"]).unwrap();
        // Its own hello is the last, so it enters MPI's collective without a look around.
        match group.allreduce(ours, ReduceOp::Sum).unwrap().wait() {
            Ok(sum) => assert_eq!(sum.as_slice::<f32>().unwrap(), [2.0; LEN]),
            Err(err) => assert!(err.to_string().contains("rank 0 reports"), "{err}"),
        }
        let err = group.barrier().expect_err("rank 0 has given up");
        assert!(err.to_string().contains("rank 0 reports"), "{err}");
        ctx.store().set("over", b"").unwrap();
    });
}

/// Long enough for ranks that are there.
const SHORT: Duration = Duration::from_secs(3);

/// For what nobody answers.
const IN_VAIN: Duration = Duration::from_secs(15);

#[test]
fn a_rank_that_is_late_to_form_a_group_is_named_and_nobody_waits_for_ever() {
    mpirun(3).run(|ctx| {
        let world = MpiGroup::world(SHORT).unwrap();
        form_too_late(&world, &*ctx.store());
        world.shutdown().unwrap();
    });
}

#[test]
fn groups_that_ranks_form_in_different_orders_are_an_error_and_not_a_deadlock() {
    mpirun(2).run(|ctx| {
        let world = MpiGroup::world(SHORT).unwrap();
        let mut names = ["first", "second"];
        names.rotate_left(ctx.rank());
        let other = Some(1 - ctx.rank());
        for name in names {
            let err = world
                .new_group(&[0, 1], name)
                .expect_err("in another order");
            assert_eq!(
                (err.kind(), err.peer()),
                (ErrorKind::Timeout, other),
                "{err}"
            );
            ctx.store()
                .set(&format!("{name}/{}", ctx.rank()), b"")
                .unwrap();
            let others = names[usize::from(name == names[0])];
            ctx.store()
                .wait(&[&format!("{others}/{}", 1 - ctx.rank())])
                .unwrap();
        }
        world.barrier().unwrap();
        world.shutdown().unwrap();
    });
}

#[test]
fn a_group_that_mpi_does_not_make_in_time_is_an_error_also_for_who_comes_later() {
    mpirun(2).run(|ctx| {
        let world = connect(ctx);
        if ctx.rank() == 0 {
            let err = MpiGroup::world(SHORT).expect_err("rank 1 is not there");
            assert_eq!(err.kind(), ErrorKind::Timeout, "{err:?}");
            ctx.store().set("gave up", b"").unwrap();
        } else {
            ctx.store().wait(&["gave up"]).unwrap();
            let second = MpiGroup::world(TIMEOUT).unwrap();
            let err = second.barrier().expect_err("rank 0 is not in it");
            assert_eq!(
                (err.kind(), err.peer()),
                (ErrorKind::Aborted, Some(0)),
                "{err:?}"
            );
            assert!(err.to_string().contains("rank 0 gave up"), "{err}");
        }
        world.barrier().unwrap();
        world.shutdown().unwrap();
    });
}

#[test]
fn a_process_that_ends_with_a_thread_inside_mpi_ends_the_job() {
    mpirun(2).check(
        |ctx| {
            let _world = connect(ctx);
            if ctx.rank() == 0 {
                MpiGroup::world(SHORT).expect_err("rank 1 is not there");
                return;
            }
            // It is mpirun that ends this: it has seen a process end that did not say so to MPI.
            std::thread::sleep(DEADLINE);
            panic!("nobody should come here");
        },
        |outcome| assert_eq!(outcome.rank(1).end, End::Lost, "{}", outcome.report()),
    );
}

#[test]
fn a_process_that_exits_with_a_group_in_use_is_named_to_the_others() {
    mpirun(3).check(
        |ctx| {
            let world = MpiGroup::world(IN_VAIN).unwrap();
            let part = world.new_group(&[0, 1, 2], "part").unwrap().unwrap();
            let ours = || Buffer::from_vec(vec![1i64; 100]);
            if ctx.rank() == 1 {
                let _open = world.allreduce(ours(), ReduceOp::Sum).unwrap();
                std::process::exit(0);
            }
            let waits = part.recv(ours(), 1, 3).unwrap();
            let sum = world.allreduce(ours(), ReduceOp::Sum).unwrap().wait();
            // It may have had its part in the sum.
            let ended = sum.and_then(|_| world.barrier());
            for err in [ended, waits.wait().map(drop)] {
                let err = err.expect_err("rank 1 has ended");
                let seen = (err.kind(), err.peer());
                assert_eq!(seen, (ErrorKind::Aborted, Some(1)), "{err}");
                assert!(err.to_string().contains("ended its process"), "{err}");
            }
        },
        |outcome| {
            for rank in [0, 2] {
                let end = &outcome.rank(rank).end;
                assert_eq!(*end, End::Finished, "{}", outcome.report());
            }
        },
    );
}

#[test]
fn only_a_member_that_drops_the_whole_keeps_a_group_from_being_formed() {
    mpirun(3).run(|ctx| {
        let world = connect(ctx);
        if ctx.rank() == 2 {
            assert!(world.new_group(&[0, 1], "part").unwrap().is_none());
            drop(world);
            ctx.store().set("dropped", b"").unwrap();
            return;
        }
        ctx.store().wait(&["dropped"]).unwrap();
        let part = world.new_group(&[0, 1], "part").unwrap().unwrap();
        part.barrier().unwrap();
        let err = world
            .new_group(&[0, 1, 2], "all")
            .expect_err("rank 2 is not there");
        let seen = (err.kind(), err.peer());
        assert_eq!(seen, (ErrorKind::Aborted, Some(2)), "{err}");
        part.shutdown().unwrap();
    });
}

#[test]
fn a_drop_ends_what_this_rank_still_waits_for() {
    mpirun(2).run(|ctx| {
        let group = MpiGroup::world(IN_VAIN).unwrap();
        if ctx.rank() == 1 {
            ctx.store().wait(&["over"]).unwrap();
            return;
        }
        let room = || Buffer::zeroed(DType::F32, 4);
        let from_one = group.recv(room(), 1, 7).unwrap();
        let from_any = group.recv_any(room(), 8).unwrap();
        let sent = group.send(Buffer::zeroed(DType::F32, LEN).freeze(), 1, 9);
        drop(group);
        let ended = [
            from_one.wait().map(drop),
            from_any.wait().map(drop),
            sent.unwrap().wait().map(drop),
        ];
        for err in ended {
            let err = err.expect_err("nobody answers");
            assert_eq!(err.kind(), ErrorKind::Aborted, "{err:?}");
            assert!(err.to_string().contains("the group was dropped"), "{err}");
        }
        ctx.store().set("over", b"").unwrap();
    });
}

#[test]
fn an_abort_wakes_what_is_blocked_here_and_elsewhere() {
    mpirun(3).run(|ctx| {
        wake_by_abort(&connect(ctx), &*ctx.store());
    });
}

#[test]
fn different_calls_are_an_error_on_every_rank_and_the_group_goes_on() {
    mpirun(4).run(|ctx| {
        let group = connect(ctx);
        let odd = ctx.rank() == 2;
        type Pair = (&'static str, fn(&dyn ProcessGroup, bool) -> Result<()>);
        let pairs: [Pair; 5] = [
            ("number of calls", |group, odd| {
                let count = if odd { 3 } else { 2 };
                let one = || Buffer::from_vec(vec![1i64]);
                let bufs = (0..count).map(|_| one()).collect();
                group
                    .allreduce_coalesced(bufs, ReduceOp::Sum)?
                    .wait()
                    .map(drop)
            }),
            ("length", |group, odd| {
                let len = if odd { 5 } else { 4 };
                let buf = Buffer::zeroed(DType::F32, len);
                group.allreduce(buf, ReduceOp::Sum)?.wait().map(drop)
            }),
            ("length", |group, odd| {
                let len = if odd { LEN } else { 4 };
                let buf = Buffer::zeroed(DType::F32, len);
                group.allreduce(buf, ReduceOp::Sum)?.wait().map(drop)
            }),
            ("call", |group, odd| match odd {
                true => group.barrier(),
                false => {
                    let buf = Buffer::zeroed(DType::F32, LEN);
                    group.broadcast(buf, 0)?.wait().map(drop)
                }
            }),
            ("root", |group, odd| {
                let root = if odd { 1 } else { 0 };
                let buf = Buffer::zeroed(DType::F32, LEN);
                group.broadcast(buf, root)?.wait().map(drop)
            }),
        ];
        for (aspect, call) in pairs {
            let err = call(&*group, odd).expect_err("rank 2 differs");
            assert_eq!(err.kind(), ErrorKind::Mismatch, "{aspect}: {err:?}");
            assert!(err.to_string().contains(aspect), "{aspect}: {err}");
            if !odd {
                assert_eq!(err.peer(), Some(2), "{err}");
            }
        }
        let sum = group.allreduce(Buffer::from_vec(vec![1i32]), ReduceOp::Sum);
        assert_eq!(sum.unwrap().wait().unwrap().as_slice::<i32>().unwrap(), [4]);
        group.shutdown().unwrap();
    });
}

#[test]
fn a_message_of_another_length_is_an_error_and_the_group_goes_on() {
    mpirun(2).run(|ctx| {
        let group = connect(ctx);
        for (len, what) in [(3, "sent 12 bytes"), (8, "more than there is room for")] {
            if ctx.rank() == 0 {
                let data = Buffer::from_vec(vec![1.0f32; len]).freeze();
                group.send(data, 1, 7).unwrap().wait().unwrap();
                continue;
            }
            let room = Buffer::zeroed(DType::F32, 5);
            let came = group.recv(room, 0, 7).unwrap().wait();
            let err = came.expect_err("not of this length");
            assert_eq!(
                (err.kind(), err.peer()),
                (ErrorKind::Mismatch, Some(0)),
                "{err:?}"
            );
            assert!(err.to_string().contains(what), "{err}");
        }
        group.barrier().unwrap();
        group.shutdown().unwrap();
    });
}

#[test]
fn counts_that_do_not_fit_are_an_error_where_they_are_seen_and_the_group_goes_on() {
    mpirun(3).run(|ctx| {
        let group = connect(ctx);
        // What rank 0 sends to rank 1, and what that expects.
        for (sent, expected) in [(2, 1), (1, 2), (0, 1), (1, 0)] {
            let mut send = vec![1; 3];
            let mut recv = vec![1; 3];
            match ctx.rank() {
                0 => send[1] = sent,
                1 => recv[0] = expected,
                _ => {}
            }
            let data = Buffer::from_vec(vec![ctx.rank() as i64; send.iter().sum()]).freeze();
            let room = Buffer::zeroed(DType::I64, recv.iter().sum());
            let came = group.alltoall_v(data, room, send, recv).unwrap().wait();
            if ctx.rank() == 1 {
                let err = came.expect_err("rank 0 sends something else");
                assert_eq!(
                    (err.kind(), err.peer()),
                    (ErrorKind::Mismatch, Some(0)),
                    "{err:?}"
                );
            } else {
                assert_eq!(came.unwrap().as_slice::<i64>().unwrap(), [0, 1, 2]);
            }
        }
        let sum = group.allreduce(Buffer::from_vec(vec![1i32; LEN]), ReduceOp::Sum);
        assert_eq!(
            sum.unwrap().wait().unwrap().as_slice::<i32>().unwrap(),
            [3; LEN]
        );
        group.shutdown().unwrap();
    });
}

#[test]
fn a_rank_that_is_killed_takes_the_job_with_it() {
    mpirun(3).check(
        |ctx| {
            let group = connect(ctx);
            group.barrier().unwrap();
            if ctx.rank() == 1 {
                let own = rustix::process::getpid();
                rustix::process::kill_process(own, rustix::process::Signal::KILL).unwrap();
            }
            // It is mpirun that ends this, long before the timeout.
            let sum = group.allreduce(Buffer::zeroed(DType::F32, LEN), ReduceOp::Sum);
            let ended = sum.and_then(|work| work.wait());
            panic!("nobody should come here: {ended:?}");
        },
        |outcome| {
            for rank in 0..3 {
                assert_eq!(outcome.rank(rank).end, End::Lost, "{}", outcome.report());
            }
        },
    );
}

#[test]
fn ranks_that_are_not_mpis_are_refused() {
    mpirun(2).run(|ctx| {
        let mut init = GroupInit::new(ctx.store(), 1 - ctx.rank(), 2);
        init.timeout = TIMEOUT;
        let err = MpiGroup::connect(&init).expect_err("the other way round");
        assert_eq!(err.kind(), ErrorKind::Invalid, "{err:?}");
        assert!(err.to_string().contains("for MPI it is rank"), "{err}");
        init.rank = ctx.rank();
        let group = MpiGroup::connect(&init).unwrap();
        group.shutdown().unwrap();
    });
}

#[test]
fn a_process_that_nobody_launched_is_a_world_of_one() {
    World::new(1).env("OMPI_ALLOW_RUN_AS_ROOT", "1").run(|_| {
        let group = MpiGroup::world(TIMEOUT).unwrap();
        assert_eq!((group.rank(), group.size()), (0, 1));
        let sum = group.allreduce(Buffer::from_vec(vec![3.0f32]), ReduceOp::Avg);
        assert_eq!(
            sum.unwrap().wait().unwrap().as_slice::<f32>().unwrap(),
            [3.0]
        );
        group.shutdown().unwrap();
    });
}
