//! The launcher names the rank that the others failed because of, not the one that ended first.

use std::process::Command;
use std::time::Duration;

use phalanx::prelude::*;
use phalanx_testkit::Proc;
use phalanx_tests::programs;

const WATCHDOG: Duration = Duration::from_secs(120);
/// How the rank fails; set by the test that starts this file's own program as ranks.
const HOW: &str = "PHALANX_TEST_HOW_TO_FAIL";
const CULPRIT: usize = 2;

/// The body of the ranks; as a test of its own it does nothing.
#[test]
fn rank() -> Result<(), phalanx::Error> {
    let Ok(how) = std::env::var(HOW) else {
        return Ok(());
    };
    let group = phalanx::init()?;
    group.barrier()?;
    if group.rank() == CULPRIT {
        match how.as_str() {
            "panic" => panic!("on purpose"),
            "error" => return Err(phalanx::Error::invalid("on purpose")),
            _ => std::process::abort(),
        }
    }
    group.barrier()?;
    group.shutdown()
}

#[test]
fn whoever_fails_is_named_also_if_others_end_before() {
    for how in ["panic", "error", "abort"] {
        let mut run = Command::new(programs().join("phalanx"));
        for name in ["PHALANX_TOKEN", "PHALANX_BACKEND", "PHALANX_TIMEOUT"] {
            run.env_remove(name);
        }
        run.args(["run", "--nproc", "4", "--"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "rank", "--nocapture"])
            .env(HOW, how);
        let mut proc = Proc::spawn(run).unwrap();
        let status = proc.wait_for(WATCHDOG).unwrap();
        let text = proc.log().text();
        assert!(status.is_some_and(|status| !status.success()), "{text}");
        let named = format!("phalanx: rank {CULPRIT} failed first: ");
        assert!(text.contains(&named), "{how}: {text}");
    }
}
