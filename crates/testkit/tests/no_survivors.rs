//! Nothing survives a test, not even one that was killed; and other programs may start the ranks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use phalanx_testkit::{End, Proc, Signal, World};

const LONG: Duration = Duration::from_secs(120);

/// Set when a helper below is to do its work: where its ranks leave their process ids.
const PIDS_VAR: &str = "KILLED_TEST_PIDS";

/// A launcher such as mpirun, in one line of shell; each rank in a session of its own, as some
/// launchers do, so that no signal to the process group reaches it.
fn shell_launcher() -> [&'static str; 4] {
    let script = r#"i=0; while [ $i -lt {n} ]; do RANK=$i setsid "$@" & i=$((i+1)); done; wait"#;
    ["sh", "-c", script, "launcher"]
}

#[test]
#[ignore = "the child process of another test"]
fn helper_that_is_killed() {
    if std::env::var_os(PIDS_VAR).is_some() {
        World::new(3).deadline(LONG).run(|ctx| hang(ctx.rank()));
    }
}

#[test]
#[ignore = "the child process of another test"]
fn helper_with_a_launcher_that_is_killed() {
    if std::env::var_os(PIDS_VAR).is_some() {
        let world = World::new(3).deadline(LONG).launcher(shell_launcher());
        world.run(|ctx| hang(ctx.rank()));
    }
}

fn hang(rank: usize) {
    let dir = std::env::var(PIDS_VAR).unwrap();
    let file = Path::new(&dir).join(rank.to_string());
    std::fs::write(file, format!("{}\n", std::process::id())).unwrap();
    // Not for ever: where the harness fails, this is what it leaves behind.
    std::thread::sleep(2 * LONG);
}

/// Whether a process still does something; what nobody has waited for yet is dead all the same.
fn alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z ") && !stat.contains(") X "))
}

fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let start = Instant::now();
    while !happened() {
        assert!(start.elapsed() < LONG, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs a helper as a test process, kills it when its ranks are there, and sees them go.
fn kill_while_running(helper: &str) {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([helper, "--exact", "--include-ignored", "--nocapture"])
        .env(PIDS_VAR, dir.path());
    let mut test = Proc::spawn(command).unwrap();
    let mut pids = Vec::new();
    for rank in 0..3 {
        let file = dir.path().join(rank.to_string());
        eventually("the start of all ranks", || {
            let pid = std::fs::read_to_string(&file).unwrap_or_default();
            let complete = pid.ends_with('\n');
            if complete {
                pids.push(pid.trim().to_owned());
            }
            complete
        });
    }
    assert!(pids.iter().all(|pid| alive(pid)), "{pids:?}");

    test.signal(Signal::KILL).unwrap();
    eventually("the end of all ranks", || {
        !pids.iter().any(|pid| alive(pid))
    });
    assert!(test.wait_for(LONG).unwrap().is_some());
}

#[test]
fn ranks_end_when_the_test_is_killed() {
    kill_while_running("helper_that_is_killed");
}

#[test]
fn launched_ranks_end_when_the_test_is_killed() {
    kill_while_running("helper_with_a_launcher_that_is_killed");
}

#[test]
fn a_launcher_starts_the_ranks() {
    World::new(3)
        .deadline(LONG)
        .launcher(shell_launcher())
        .check(
            |ctx| {
                assert_eq!(ctx.size(), 3);
                println!("this is rank {}", ctx.rank());
            },
            |outcome| {
                assert!(outcome.succeeded(), "{}", outcome.report());
                for rank in outcome.ranks() {
                    let text = format!("this is rank {}\n", rank.rank);
                    assert_eq!(rank.log, text);
                }
            },
        );
}

#[test]
fn a_launched_rank_may_panic_or_vanish() {
    World::new(3)
        .deadline(LONG)
        .launcher(shell_launcher())
        .check(
            |ctx| match ctx.rank() {
                0 => panic!("boom"),
                1 => std::process::exit(3),
                _ => (),
            },
            |outcome| {
                assert_eq!(outcome.rank(0).end, End::Panicked("boom".into()));
                assert_eq!(outcome.rank(1).end, End::Lost);
                assert_eq!(outcome.rank(2).end, End::Finished);
            },
        );
}

#[test]
fn launched_ranks_that_hang_are_killed_at_the_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::new(3)
        .deadline(Duration::from_secs(4))
        .env(PIDS_VAR, dir.path())
        .launcher(shell_launcher());
    let panic = catch_unwind(AssertUnwindSafe(|| world.run(|ctx| hang(ctx.rank()))));
    let report = panic.expect_err("a hang").downcast::<String>().unwrap();
    let expected = "ranks 0, 1, 2 of 3 were still running after 4.000 s";
    assert_eq!(report.lines().next(), Some(expected));
    for rank in 0..3 {
        let pid = std::fs::read_to_string(dir.path().join(rank.to_string())).unwrap();
        assert!(!alive(pid.trim()), "rank {rank} is still alive");
    }
}

#[test]
fn a_launcher_that_starts_too_few_ranks_is_an_error() {
    let world = World::new(2).deadline(LONG);
    let world = world.launcher(["sh", "-c", r#"RANK=0 "$@"; echo that was all"#, "launcher"]);
    let panic = catch_unwind(AssertUnwindSafe(|| world.run(|_| ())));
    let report = panic
        .expect_err("rank 1 is missing")
        .downcast::<String>()
        .unwrap();
    let expected = "rank 1 of 2 never reached the test body: the launcher ended";
    assert!(report.starts_with(expected), "{report}");
}
