//! Runs examples as a person does who has just built them.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use phalanx_testkit::Proc;

use crate::build;

/// Mostly for the compiler, which may have everything to do.
const WATCHDOG: Duration = Duration::from_secs(1200);

/// Variables that would change what is started.
const FOREIGN: [&str; 5] = [
    "PHALANX_TOKEN",
    "PHALANX_BACKEND",
    "PHALANX_TIMEOUT",
    "RANK",
    "WORLD_SIZE",
];

/// What a program prints that has to succeed.
fn printed(program: &Path, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> String {
    let mut command = Command::new(program);
    command.args(args);
    for name in FOREIGN {
        command.env_remove(name);
    }
    let mut proc = Proc::spawn(command).expect("start the program");
    let status = proc.wait_for(WATCHDOG).expect("wait for the program");
    let text = proc.log().text();
    assert!(status.is_some_and(|status| status.success()), "{text}");
    text
}

/// Runs an example by itself; a line has to begin with `expected`.
///
/// # Panics
///
/// If it fails, or there is no such line.
pub fn alone(example: &str, args: &[&str], expected: &str) {
    let built = build(&["--example", example]);
    let text = printed(&built.join("examples").join(example), args);
    let found = text.lines().any(|line| line.starts_with(expected));
    assert!(found, "no line {expected:?}:\n{text}");
}

/// Runs an example as two ranks of `phalanx run`; a line of rank 0 has to begin with `expected`.
///
/// # Panics
///
/// If it fails, or there is no such line.
pub fn together(example: &str, args: &[&str], expected: &str) {
    let built = build(&["--example", example]);
    let program = built.join("examples").join(example);
    let run = ["run", "--nproc", "2", "--"].map(OsStr::new);
    let words = run.into_iter().chain([program.as_os_str()]);
    let words = words.chain(args.iter().map(OsStr::new));
    let text = printed(&built.join("phalanx"), words);
    let expected = format!("[0] {expected}");
    let found = text.lines().any(|line| line.starts_with(&expected));
    assert!(found, "no line {expected:?}:\n{text}");
}

/// Runs `cargo xtask train` with a framework to its end.
///
/// # Panics
///
/// If it fails, or does not say what it should.
pub fn train(framework: &str) {
    let built = build(&["--bin", "xtask"]);
    let args = ["train", "--framework", framework, "--nproc", "2"];
    let text = printed(&built.join("xtask"), args);
    let after = |prefix: &str| {
        let mut lines = text.lines();
        let line = lines.find_map(|line| line.strip_prefix(prefix));
        line.unwrap_or_else(|| panic!("no line {prefix:?}:\n{text}"))
    };
    let accuracy = after("held-out accuracy ").split(' ').next();
    let accuracy: f64 = accuracy.unwrap_or_default().parse().expect("a number");
    assert!(accuracy > 96.0, "{text}");
    assert_eq!(after("ranks 2, identical parameters sha256 ").len(), 64);
    after("wall time 2 ranks ");
    after("the same by hand:");
}
