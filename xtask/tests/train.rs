//! `cargo xtask train` for real: built, launched, trained.

use std::process::Command;
use std::time::Duration;

use phalanx_testkit::Proc;

/// Mostly for the compiler, which may have everything to do.
const WATCHDOG: Duration = Duration::from_secs(900);

/// Runs it to its end: whether it succeeded, and what it printed.
fn train(args: &[&str]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg("train").args(args);
    for name in ["PHALANX_TOKEN", "PHALANX_BACKEND", "PHALANX_TIMEOUT"] {
        command.env_remove(name);
    }
    let mut proc = Proc::spawn(command).unwrap();
    let status = proc.wait_for(WATCHDOG).unwrap();
    let text = proc.log().text();
    let status = status.unwrap_or_else(|| panic!("it does not end:\n{text}"));
    (status.success(), text)
}

/// What follows `prefix` on the one line that begins with it.
fn after<'a>(text: &'a str, prefix: &str) -> &'a str {
    let mut found = text.lines().filter_map(|line| line.strip_prefix(prefix));
    let (first, second) = (found.next(), found.next());
    assert_eq!(second, None, "{text}");
    first.unwrap_or_else(|| panic!("no line {prefix:?}:\n{text}"))
}

#[test]
fn two_processes_learn_to_read_digits_and_end_with_the_same_parameters() {
    let (success, text) = train(&["--nproc", "2"]);
    assert!(success, "{text}");
    let accuracy = after(&text, "held-out accuracy ").split(' ').next();
    let accuracy: f64 = accuracy.unwrap().parse().unwrap();
    assert!(accuracy > 96.0, "{text}");
    let sha256 = after(&text, "ranks 2, identical parameters sha256 ");
    assert!(sha256.len() == 64 && sha256.bytes().all(|b| b.is_ascii_hexdigit()));
    after(&text, "wall time 2 ranks ");
    let progress = |line: &str| line.starts_with("[0] ") && line.contains("samples/s");
    assert!(text.lines().filter(|line| progress(line)).count() > 1);
    // Only rank 0 speaks, and the single process to compare with does not.
    assert!(!text.lines().any(|line| line.starts_with("[1] ")), "{text}");
    assert_eq!(text.matches("epoch  1/").count(), 1, "{text}");
}

#[test]
fn figures_come_as_json_too() {
    let args = ["--nproc", "2", "--epochs", "1", "--backend", "reference"];
    let (success, text) = train(&[&args[..], &["--json"]].concat());
    assert!(success, "{text}");
    let line = text.lines().find(|line| line.starts_with('{'));
    let figures: serde_json::Value = serde_json::from_str(line.unwrap()).unwrap();
    assert_eq!(figures["figures"]["ranks"], 2);
    assert_eq!(figures["figures"]["backend"], "reference");
    assert_eq!(figures["one_process"]["figures"]["ranks"], 1);
    assert!(figures["wall_seconds"].as_f64().unwrap() > 0.0);
}
