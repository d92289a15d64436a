//! The harness keeps its promises about worlds that end by themselves or at the deadline.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use phalanx_testkit::{End, World, is_rank};

/// Long enough for anything that is meant to end, short enough to fail while one watches.
const LONG: Duration = Duration::from_secs(120);

/// The report of a test's only world, which must fail. A rank does not come back from `run`.
fn failure(run: impl FnOnce()) -> String {
    failure_of_one(run).expect("ranks end in the body")
}

/// The report of one of a test's worlds, which must fail. A rank of a later world gets none.
fn failure_of_one(run: impl FnOnce()) -> Option<String> {
    let result = catch_unwind(AssertUnwindSafe(run));
    if is_rank() {
        return None;
    }
    let panic = result.expect_err("the world should have failed");
    Some(*panic.downcast::<String>().expect("a report"))
}

/// Where a text stands in a report.
fn position(report: &str, text: &str) -> usize {
    let found = report.find(text);
    found.unwrap_or_else(|| panic!("{text:?} is missing in: {report}"))
}

fn sleep_forever() -> ! {
    loop {
        std::thread::sleep(LONG);
    }
}

#[test]
fn every_rank_runs_in_a_process_of_its_own() {
    World::new(3).env("GREETING", "hello").check(
        |ctx| {
            assert_eq!(ctx.size(), 3);
            assert_eq!(ctx.var("RANK"), ctx.rank().to_string());
            assert_eq!(ctx.var("LOCAL_RANK"), ctx.rank().to_string());
            assert_eq!(ctx.var("WORLD_SIZE"), "3");
            assert_eq!(ctx.var("LOCAL_WORLD_SIZE"), "3");
            let name = ctx.dir().join(ctx.rank().to_string());
            std::fs::write(name, std::process::id().to_string()).unwrap();
            println!("{} from rank {}", ctx.var("GREETING"), ctx.rank());
        },
        |outcome| {
            assert!(outcome.succeeded(), "{}", outcome.report());
            let mut pids = vec![std::process::id().to_string()];
            for rank in outcome.ranks() {
                let text = format!("hello from rank {}\n", rank.rank);
                assert_eq!(rank.log, text);
                let file = outcome.dir().join(rank.rank.to_string());
                pids.push(std::fs::read_to_string(file).unwrap());
            }
            pids.sort();
            pids.dedup();
            assert_eq!(pids.len(), 4, "{pids:?}");
        },
    );
}

#[test]
fn a_variable_can_be_taken_away_from_the_ranks() {
    World::new(2).env_remove("RANK").run(|ctx| {
        assert!(std::env::var_os("RANK").is_none());
        assert!(ctx.rank() < 2);
    });
}

#[test]
fn the_rank_that_panicked_first_is_reported_first_with_its_message() {
    struct Tell(std::path::PathBuf);
    impl Drop for Tell {
        fn drop(&mut self) {
            std::fs::write(&self.0, "").unwrap();
            // The others fail and report long before this rank is done with unwinding.
            std::thread::sleep(Duration::from_millis(300));
        }
    }
    let report = failure(|| {
        World::new(3).deadline(LONG).run(|ctx| {
            let failed = ctx.dir().join("failed");
            if ctx.rank() == 2 {
                let _tell = Tell(failed);
                panic!("the cause of it all");
            }
            while !failed.exists() {
                std::thread::sleep(Duration::from_millis(1));
            }
            panic!("a consequence");
        });
    });
    let headline = report.lines().next().unwrap();
    assert!(
        headline.starts_with("rank 2 of 3 panicked: the cause of it all (after "),
        "{headline}"
    );
    let first = position(&report, "--- rank 2 of 3");
    assert!(first < position(&report, "--- rank 0 of 3"), "{report}");
    assert!(first < position(&report, "--- rank 1 of 3"), "{report}");
    assert_eq!(report.matches("a consequence").count(), 4, "{report}");
}

#[test]
fn the_others_are_killed_soon_after_a_rank_has_failed() {
    let start = Instant::now();
    let report = failure(|| {
        World::new(3).deadline(LONG).run(|ctx| {
            ctx.op("wait for ever");
            if ctx.rank() == 1 {
                panic!("boom");
            }
            sleep_forever();
        });
    });
    position(&report, "rank 1 of 3 panicked: boom");
    position(&report, "rank 0 of 3: was killed by the harness");
    position(&report, "rank 2 of 3: was killed by the harness");
    assert!(start.elapsed() < LONG, "they were killed at the deadline");
}

#[test]
fn leaving_the_process_is_no_way_to_pass() {
    for code in [7, 0] {
        let report = failure_of_one(|| {
            World::new(2).deadline(LONG).run(|ctx| {
                if ctx.rank() == 1 {
                    println!("last words");
                    std::process::exit(code);
                }
            });
        });
        let Some(report) = report else { continue };
        position(&report, &format!("rank 1 of 2 exited with code {code}"));
        position(&report, "  | last words");
    }
}

#[test]
fn a_hang_ends_at_the_deadline_with_every_ranks_last_operation() {
    let report = failure(|| {
        World::new(3).deadline(Duration::from_secs(4)).run(|ctx| {
            ctx.op("something earlier");
            match ctx.rank() {
                0 => tracing::trace!(target: "phalanx::op", seq = 17, peer = 2, "recv"),
                1 => return,
                _ => ctx.op("allreduce of 12 bytes"),
            }
            println!("and more text after it");
            sleep_forever();
        });
    });
    let headline = report.lines().next().unwrap();
    assert_eq!(headline, "ranks 0, 2 of 3 were still running after 4.000 s");
    position(&report, "last operation: recv seq=17 peer=2\n");
    position(&report, "last operation: something earlier\n");
    position(&report, "last operation: allreduce of 12 bytes\n");
    position(&report, "rank 1 of 3: finished");
}

#[test]
fn events_of_libraries_are_in_the_log_from_info_on() {
    World::new(1).check(
        |_| {
            tracing::info!("heard");
            tracing::debug!("not heard");
        },
        |outcome| {
            let log = &outcome.rank(0).log;
            assert!(log.contains("heard"), "{log}");
            assert!(!log.contains("not heard"), "{log}");
        },
    );
}

#[test]
fn survivors_of_an_expected_death_go_on() {
    World::new(3).deadline(LONG).check(
        |ctx| {
            if ctx.rank() == 1 {
                let me = rustix::process::getpid();
                rustix::process::kill_process(me, rustix::process::Signal::KILL).unwrap();
                sleep_forever();
            }
            // Longer than the grace that `run` would give them.
            std::thread::sleep(Duration::from_millis(2500));
            println!("still here");
        },
        |outcome| {
            assert_eq!(outcome.rank(1).end, End::Signaled(9));
            assert_eq!(outcome.first_failure().map(|r| r.rank), Some(1));
            for rank in [0, 2] {
                let rank = outcome.rank(rank);
                assert_eq!(rank.end, End::Finished);
                assert!(rank.log.contains("still here"), "{}", rank.log);
            }
        },
    );
}

#[test]
fn a_hang_is_a_failure_even_where_ranks_may_die() {
    let report = failure(|| {
        World::new(1)
            .deadline(Duration::from_millis(300))
            .check(|_| sleep_forever(), |_| ());
    });
    position(&report, "ranks 0 of 1 were still running after 0.300 s");
}

#[test]
fn one_test_may_start_several_worlds() {
    let mut inspected = Vec::new();
    World::new(1).check(
        |_| println!("first"),
        |o| inspected.push(o.rank(0).log.clone()),
    );
    World::new(2).run(|ctx| assert_eq!(ctx.size(), 2));
    World::new(1).check(
        |_| println!("third"),
        |o| inspected.push(o.rank(0).log.clone()),
    );
    for size in 1..=3 {
        World::new(size).check(
            |ctx| println!("{size} {}", ctx.size()),
            |outcome| {
                assert_eq!(outcome.ranks().len(), size);
                inspected.push(outcome.rank(0).log.clone());
            },
        );
    }
    assert_eq!(inspected, ["first\n", "third\n", "1 1\n", "2 2\n", "3 3\n"]);
}

#[test]
fn worlds_may_run_side_by_side() {
    let (mut a, mut b) = (String::new(), String::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let world = World::new(2).env("WORLD", "a");
            world.check(
                |ctx| println!("{} {}", ctx.var("WORLD"), ctx.dir().display()),
                |outcome| a = outcome.rank(1).log.clone(),
            );
        });
        scope.spawn(|| {
            let world = World::new(2).env("WORLD", "b");
            world.check(
                |ctx| println!("{} {}", ctx.var("WORLD"), ctx.dir().display()),
                |outcome| b = outcome.rank(1).log.clone(),
            );
        });
    });
    assert!(a.starts_with("a ") && b.starts_with("b "), "{a} {b}");
    assert_ne!(a[2..], b[2..]);
}

#[test]
fn a_rank_that_ran_no_test_is_an_error() {
    for check in [false, true] {
        let report = failure_of_one(|| {
            let world = World::new(2).test_name("there_is_no_such_test");
            match check {
                true => world.check(|_| (), |_| panic!("nothing to inspect")),
                false => world.run(|_| ()),
            }
        });
        let Some(report) = report else { continue };
        position(&report, "never reached the test body");
        position(&report, "World::test_name");
        position(&report, "running 0 tests");
    }
}

fn body_in_a_helper(test: &str) {
    World::new(2)
        .test_name(test)
        .run(|ctx| assert_eq!(ctx.size(), 2));
}

#[test]
fn a_helper_names_the_test_it_is_called_from() {
    body_in_a_helper("a_helper_names_the_test_it_is_called_from");
}

#[test]
fn a_rank_starts_no_world_of_its_own() {
    let report = failure(|| World::new(1).run(|_| World::new(1).run(|_| ())));
    position(&report, "a rank cannot start a world of its own");
}

mod inner {
    #[test]
    fn tests_in_modules_are_found() {
        super::World::new(2).run(|_| ());
    }
}
