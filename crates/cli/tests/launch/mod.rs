//! A `phalanx run` process with shell scripts as ranks.
#![allow(
    dead_code,
    reason = "every test file includes this and uses a part of it"
)]

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use phalanx_testkit::Proc;
use rustix::process::{Pid, test_kill_process};

/// Bounds every wait of the tests; nothing that works comes near it.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(60);

/// `phalanx run ARGS`, without what the surroundings may have set.
pub(crate) fn phalanx_run(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    for name in [
        "PHALANX_TOKEN",
        "PHALANX_TIMEOUT",
        "OMP_NUM_THREADS",
        "RANK",
    ] {
        command.env_remove(name);
    }
    command.arg("run").args(args);
    command
}

/// The same with `sh -c SCRIPT` as the program.
pub(crate) fn shell_ranks(args: &[&str], script: &str) -> Command {
    let mut command = phalanx_run(args);
    command.args(["--", "sh", "-c", script]);
    command
}

/// How a launcher ended, and all that it and its ranks wrote.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) code: Option<i32>,
    pub(crate) text: String,
}

impl End {
    #[track_caller]
    pub(crate) fn assert_contains(&self, expected: &str) {
        assert!(self.text.contains(expected), "no {expected:?} in {self:#?}");
    }
}

pub(crate) fn start(command: Command) -> Proc {
    Proc::spawn(command).expect("the program was built")
}

#[track_caller]
pub(crate) fn end(mut proc: Proc) -> End {
    let status = proc.wait_for(WATCHDOG).unwrap();
    let text = proc.log().text();
    let status = status.unwrap_or_else(|| panic!("it does not end:\n{text}"));
    End {
        code: status.code(),
        text,
    }
}

#[track_caller]
pub(crate) fn run(command: Command) -> End {
    end(start(command))
}

/// Waits for a line that contains `text`.
#[track_caller]
pub(crate) fn wait_for_line(proc: &Proc, text: &str) {
    let found = proc
        .log()
        .wait_for_line(WATCHDOG, |line| line.contains(text).then_some(()));
    assert!(found.is_some(), "no line {text:?}:\n{}", proc.log().text());
}

/// Waits until `condition` holds.
#[track_caller]
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < WATCHDOG, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The process ids that ranks have written into files of `dir`.
pub(crate) fn pids(dir: &Path) -> Vec<Pid> {
    let files = dir.read_dir().unwrap();
    let texts = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
    texts
        .flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>())
        .filter_map(|pid| Pid::from_raw(pid.trim().parse().ok()?))
        .collect()
}

/// Whether a process runs, and is not only waiting to be waited for.
pub(crate) fn runs(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    test_kill_process(pid).is_ok() && stat.is_ok_and(|stat| !stat.contains(") Z "))
}

/// Waits until none of them runs.
#[track_caller]
pub(crate) fn assert_gone(pids: &[Pid]) {
    eventually(&format!("{pids:?} are gone"), || {
        !pids.iter().any(|&pid| runs(pid))
    });
}
