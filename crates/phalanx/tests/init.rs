//! `init` between real processes, and its rules inside one.

use std::time::Duration;

use phalanx::prelude::*;
use phalanx::{ErrorKind, Init};
use phalanx_testkit::{End, World};

#[test]
fn ranks_that_a_launcher_started_form_a_group() {
    World::new(3).run(|ctx| {
        let env = phalanx::env().unwrap();
        assert_eq!((env.rank, env.world_size), (ctx.rank(), 3));
        let group = phalanx::init().unwrap();
        assert_eq!((group.rank(), group.size()), (ctx.rank(), 3));
        let mut values = [group.rank() as f64, 1.0];
        group
            .allreduce_in_place(&mut values, ReduceOp::Sum)
            .unwrap();
        assert_eq!(values, [3.0, 3.0]);
        let pair = group.new_group(&[0, 2], "pair").unwrap();
        assert_eq!(pair.is_some(), ctx.rank() != 1);
        if let Some(pair) = pair {
            pair.barrier().unwrap();
            pair.shutdown().unwrap();
        }
        group.shutdown().unwrap();
    });
}

#[test]
fn a_second_init_is_an_error_until_the_first_group_is_gone() {
    World::new(2).run(|_| {
        let first = phalanx::init().unwrap();
        let err = phalanx::init().unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Invalid, "{err}");
        first.barrier().unwrap();
        first.shutdown().unwrap();
        drop(first);
        let again = phalanx::init().unwrap();
        again.barrier().unwrap();
        again.shutdown().unwrap();
    });
}

#[test]
fn a_mismatch_is_found_when_asked_for() {
    World::new(2).env("PHALANX_DEBUG", "detail").run(|ctx| {
        let group = phalanx::init().unwrap();
        let buf = Buffer::zeroed(DType::F32, 1 + ctx.rank());
        let err = group.allreduce(buf, ReduceOp::Sum).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Mismatch, "{err}");
        group.barrier().unwrap();
        group.shutdown().unwrap();
    });
}

#[test]
fn a_broken_group_leaves_a_record() {
    World::new(2).run(|ctx| {
        let dir = ctx.dir().join("dumps");
        let group = Init::from_env().unwrap().dump_dir(&dir).start().unwrap();
        group.barrier().unwrap();
        if ctx.rank() == 0 {
            // The others are in the next barrier by then, and their abort is the failure recorded.
            std::thread::sleep(Duration::from_millis(300));
            group.abort("on purpose");
        }
        let err = group.barrier().unwrap_err();
        assert!(err.to_string().contains("on purpose"), "{err}");
        let file = dir.join(format!("rank_{}.json", ctx.rank()));
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(text.contains("on purpose"), "{text}");
    });
}

#[test]
fn the_job_token_guards_connections_between_ranks() {
    World::new(2)
        .env("PHALANX_TOKEN", "a shared secret")
        .run(|_| {
            let group = phalanx::init().unwrap();
            group.barrier().unwrap();
            group.shutdown().unwrap();
        });
}

#[test]
fn an_unknown_backend_is_named_with_those_that_are_known() {
    World::new(1).run(|_| {
        let err = phalanx::init_with("nativ").unwrap_err().to_string();
        assert!(err.contains("nativ") && err.contains("reference"), "{err}");
        let group = Init::from_env()
            .unwrap()
            .timeout(Duration::from_secs(5))
            .start()
            .unwrap();
        assert_eq!(group.timeout(), Duration::from_secs(5));
    });
}

#[test]
fn survivors_learn_which_rank_died() {
    World::new(3).check(
        |ctx| {
            let group = phalanx::init().unwrap();
            group.barrier().unwrap();
            if ctx.rank() == 1 {
                std::process::exit(7);
            }
            let err = group.barrier().unwrap_err();
            assert_eq!(err.kind(), ErrorKind::PeerLost, "{err:?}");
            assert_eq!(err.peer(), Some(1), "{err}");
        },
        |outcome| {
            for rank in [0, 2] {
                assert_eq!(
                    outcome.rank(rank).end,
                    End::Finished,
                    "{}",
                    outcome.report()
                );
            }
        },
    );
}
