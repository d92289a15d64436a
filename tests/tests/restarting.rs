//! Training under `phalanx run` with ranks that are killed, and with one that is stopped.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use phalanx_testkit::Proc;
use phalanx_tests::programs;
use rustix::process::{Pid, Signal, kill_process};

const WATCHDOG: Duration = Duration::from_secs(120);
const RANKS: usize = 3;

/// The example `checkpoint` under the launcher.
fn training(dir: &Path, steps: usize, pause_ms: usize, flags: &[&str]) -> Command {
    let mut command = Command::new(programs().join("phalanx"));
    for name in ["PHALANX_TOKEN", "PHALANX_BACKEND", "PHALANX_TIMEOUT"] {
        command.env_remove(name);
    }
    command.args(["run", "--nproc", "3"]).args(flags).arg("--");
    command.arg(programs().join("examples/checkpoint")).arg(dir);
    command.args([steps.to_string(), pause_ms.to_string()]);
    command
}

/// Waits until a rank has done a step; the id of its process.
fn reached(proc: &Proc, rank: usize, step: usize) -> Pid {
    let prefix = format!("[{rank}] step {step} pid ");
    let pid = proc.log().wait_for_line(WATCHDOG, |line| {
        Pid::from_raw(line.strip_prefix(&prefix)?.trim().parse().ok()?)
    });
    pid.unwrap_or_else(|| panic!("never at step {step}:\n{}", proc.log().text()))
}

/// Waits for its end: the exit code, and all that was printed.
fn end(mut proc: Proc) -> (Option<i32>, String) {
    let status = proc.wait_for(WATCHDOG).unwrap();
    let text = proc.log().text();
    let status = status.unwrap_or_else(|| panic!("it does not end:\n{text}"));
    (status.code(), text)
}

/// The parameters that each rank ended with.
fn parameters(text: &str) -> Vec<&str> {
    let last = text
        .lines()
        .filter_map(|line| line.split_once("parameters "));
    last.map(|(_, parameters)| parameters).collect()
}

#[test]
fn whichever_rank_is_killed_training_ends_as_if_nothing_had_happened() {
    const STEPS: usize = 40;
    let dir = tempfile::tempdir().unwrap();
    let calm = training(&dir.path().join("calm"), STEPS, 0, &[]);
    let (code, calm) = end(Proc::spawn(calm).unwrap());
    assert_eq!(code, Some(0), "{calm}");
    let expected = parameters(&calm);
    assert_eq!(expected.len(), RANKS, "{calm}");
    assert!(expected.iter().all(|p| *p == expected[0]), "{calm}");
    for victim in 0..RANKS {
        let dir = dir.path().join(format!("killed-{victim}"));
        let run = training(&dir, STEPS, 5, &["--max-restarts", "2"]);
        let proc = Proc::spawn(run).unwrap();
        kill_process(reached(&proc, victim, 12), Signal::KILL).unwrap();
        // Once more, in the second attempt.
        let resumed = |line: &str| line.contains("resumed after step").then_some(());
        proc.log().wait_for_line(WATCHDOG, resumed).unwrap();
        kill_process(reached(&proc, victim, 27), Signal::KILL).unwrap();
        let (code, text) = end(proc);
        assert_eq!(code, Some(0), "{text}");
        let named = format!("rank {victim} failed first: killed by SIGKILL");
        assert_eq!(text.matches(&named).count(), 2, "{text}");
        assert_eq!(parameters(&text), expected, "{text}");
    }
}

#[test]
fn a_stopped_rank_is_found_by_the_recordings_of_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let dumps = dir.path().join("dumps");
    let mut run = training(&dir.path().join("data"), 1_000_000, 1, &["--grace", "0.5"]);
    run.env("PHALANX_DUMP_DIR", &dumps)
        .env("PHALANX_TIMEOUT", "3s");
    let proc = Proc::spawn(run).unwrap();
    kill_process(reached(&proc, 1, 20), Signal::STOP).unwrap();
    let (code, text) = end(proc);
    assert_eq!(code, Some(1), "{text}");
    let output = Command::new(programs().join("phalanx"))
        .arg("trace")
        .arg(&dumps)
        .arg("--perfetto")
        .arg(dir.path().join("trace.json"))
        .arg("--svg")
        .arg(dir.path().join("trace.svg"))
        .output()
        .unwrap();
    let found = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{found}");
    assert!(found.contains("none of rank 1"), "{found}");
    assert!(found.contains("  rank 1 left no recording"), "{found}");
    assert!(found.contains("look there first"), "{found}");
    assert!(found.contains("rank 0 is in operation"), "{found}");
    assert!(found.contains("rank 1 did not reach all"), "{found}");
    for file in ["trace.json", "trace.svg"] {
        assert!(dir.path().join(file).metadata().unwrap().len() > 1000);
    }
}
