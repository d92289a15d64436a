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

/// A world in which rank 0 serves the store, as without a launcher.
fn served_by_rank_0(size: usize) -> World {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port().to_string();
    World::new(size)
        .env("MASTER_PORT", port)
        .env_remove("TORCHELASTIC_USE_AGENT_STORE")
}

#[test]
fn worlds_follow_each_other_on_one_port() {
    served_by_rank_0(3)
        .env("PHALANX_TIMEOUT", "30s")
        .deadline(Duration::from_secs(100))
        .run(|ctx| {
            for cycle in 0..30 {
                let group = phalanx::init().unwrap_or_else(|err| panic!("cycle {cycle}: {err}"));
                // Another rank is the last to leave each time.
                if cycle % 4 == ctx.rank() {
                    std::thread::sleep(Duration::from_millis(5));
                }
                group
                    .shutdown()
                    .unwrap_or_else(|err| panic!("end of cycle {cycle}: {err}"));
            }
        });
}

#[test]
fn worlds_with_a_token_follow_each_other_too() {
    served_by_rank_0(2)
        .env("PHALANX_TIMEOUT", "30s")
        .env("PHALANX_TOKEN", "a shared secret")
        .deadline(Duration::from_secs(100))
        .run(|_| {
            for cycle in 0..30 {
                let group = phalanx::init().unwrap_or_else(|err| panic!("cycle {cycle}: {err}"));
                group.shutdown().unwrap();
            }
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
fn a_recording_is_written_on_demand() {
    World::new(2).run(|ctx| {
        let err = phalanx::dump().unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Invalid, "{err}");
        assert!(err.to_string().contains("PHALANX_DUMP_DIR"), "{err}");
        let dir = ctx.dir().join("dumps");
        let group = Init::from_env().unwrap().dump_dir(&dir).start().unwrap();
        group.barrier().unwrap();
        let path = phalanx::dump().unwrap();
        assert_eq!(path, dir.join(format!("rank_{}.json", ctx.rank())));
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.contains("native:barrier"), "{text}");
        let recorder = phalanx::recorder().unwrap();
        assert_eq!(recorder.trace().entries.len(), 1);
        group.shutdown().unwrap();
        drop((group, recorder));
        assert!(phalanx::recorder().is_none());
    });
}

#[test]
fn a_signal_shows_what_a_process_hangs_in() {
    let world = World::new(2).env("PHALANX_DUMP_ON_SIGUSR1", "1");
    world.run(|ctx| {
        let dir = ctx.dir().join("dumps");
        let group = Init::from_env().unwrap().dump_dir(&dir).start().unwrap();
        if ctx.rank() == 0 {
            let buf = Buffer::zeroed(DType::F32, 8);
            let hanging = group.allreduce(buf, ReduceOp::Sum).unwrap();
            let pid = std::process::id().to_string();
            let mut kill = std::process::Command::new("kill");
            assert!(kill.args(["-USR1", &pid]).status().unwrap().success());
            let file = dir.join("rank_0.json");
            while !file.exists() {
                std::thread::sleep(Duration::from_millis(1)); // the world's deadline ends it
            }
            let text = std::fs::read_to_string(file).unwrap();
            assert!(text.contains("native:all_reduce"), "{text}");
            assert!(!text.contains("\"state\":\"completed\""), "{text}");
            ctx.store().set("seen", b"").unwrap();
            hanging.wait().unwrap();
        } else {
            ctx.store().wait(&["seen"]).unwrap();
            let buf = Buffer::zeroed(DType::F32, 8);
            group.allreduce(buf, ReduceOp::Sum).unwrap().wait().unwrap();
        }
        group.shutdown().unwrap();
    });
}

#[test]
fn bad_settings_are_refused_before_anybody_meets() {
    let refused = |init: phalanx::Result<Init>| {
        let err = init.and_then(Init::start).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Invalid, "{err}");
        err.to_string()
    };
    World::new(1).env("PHALANX_TIMEOUT", "abc").run(|_| {
        let text = refused(Init::from_env());
        assert!(text.contains("PHALANX_TIMEOUT=\"abc\""), "{text}");
    });
    let world = World::new(1).env("PHALANX_DUMP_ON_SIGUSR1", "yes");
    world.run(|_| {
        let text = refused(Init::from_env());
        assert!(text.contains("neither \"0\" nor \"1\""), "{text}");
    });
    World::new(1).run(|ctx| {
        let text = refused(Init::from_env().map(|init| init.dump_on_signal(true)));
        assert!(text.contains("set PHALANX_DUMP_DIR"), "{text}");
        let file = ctx.dir().join("file");
        std::fs::write(&file, b"").unwrap();
        let text = refused(Init::from_env().map(|init| init.dump_dir(&file)));
        assert!(text.contains("dump directory"), "{text}");
        let text = refused(Init::from_env().map(|init| init.dump_dir("/proc/phalanx")));
        assert!(text.contains("cannot be made"), "{text}");
    });
}

#[test]
fn a_backend_that_does_not_exist_is_not_advertised() {
    World::new(1)
        .env("PHALANX_BACKEND", "cuda:pigeons")
        .run(|_| {
            let err = phalanx::init().unwrap_err().to_string();
            assert!(err.contains("no backend \"pigeons\""), "{err}");
            assert!(!err.contains("feature"), "{err}");
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
        assert!(
            err.contains("nativ") && err.contains("known: native"),
            "{err}"
        );
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
            // It may have been noticed before the call.
            let first = err.cause().unwrap_or(&err);
            assert_eq!(first.kind(), ErrorKind::PeerLost, "{err:?}");
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
