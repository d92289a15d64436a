//! Runs the commands of the documentation, and compares what they print.
//!
//! A block marked `sh` is run by bash in an empty directory, with `phalanx` and the examples in the
//! PATH. If a block marked `text` follows, each of its lines has to be among what was printed, in
//! any order; `...` in it stands for anything. A block marked `sh not-run` is what it says.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use phalanx_testkit::Proc;
use phalanx_tests::programs;

const WATCHDOG: Duration = Duration::from_secs(120);

/// Commands, and what they should print.
struct Example {
    line: usize,
    script: String,
    expected: Vec<String>,
}

fn examples(text: &str) -> Vec<Example> {
    let mut found: Vec<Example> = Vec::new();
    let mut kind: Option<&str> = None;
    let mut follows = false;
    for (number, line) in text.lines().enumerate() {
        match (kind, line.strip_prefix("```")) {
            (None, Some(mark)) => {
                kind = Some(mark);
                if mark == "sh" {
                    found.push(Example {
                        line: number + 1,
                        script: String::new(),
                        expected: vec![],
                    });
                }
            }
            (Some(closed), Some(_)) => {
                follows = closed == "sh";
                kind = None;
            }
            (Some(mark), None) => {
                let last = found.last_mut();
                match (mark, last) {
                    ("sh", Some(last)) => last.script += &format!("{line}\n"),
                    ("text", Some(last)) if follows => last.expected.push(line.to_owned()),
                    _ => {}
                }
            }
            (None, None) if line.trim().is_empty() => {}
            (None, None) => follows = false,
        }
    }
    found
}

fn matches(pattern: &str, line: &str) -> bool {
    let mut parts = pattern.split("...");
    let Some(mut rest) = parts.next().and_then(|first| line.strip_prefix(first)) else {
        return false;
    };
    let open = pattern.contains("...");
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.is_empty() || (open && pattern.ends_with("..."))
}

fn run(page: &str, example: &Example, dir: &Path) {
    let bin = programs();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::split_paths(&path);
    let path = [bin.clone(), bin.join("examples")].into_iter().chain(path);
    let mut bash = Command::new("bash");
    bash.args(["-euo", "pipefail", "-c", &example.script])
        .current_dir(dir)
        .env("PATH", std::env::join_paths(path).unwrap());
    for name in [
        "PHALANX_TOKEN",
        "PHALANX_TIMEOUT",
        "PHALANX_BACKEND",
        "RANK",
    ] {
        bash.env_remove(name);
    }
    let place = format!("{page}:{}", example.line);
    let mut proc = Proc::spawn(bash).unwrap_or_else(|err| panic!("{place}: bash: {err}"));
    let status = proc.wait_for(WATCHDOG).unwrap();
    let printed = proc.log().text();
    let success = status.is_some_and(|status| status.success());
    assert!(success, "{place}: {status:?}\n{printed}");
    for expected in &example.expected {
        let found = printed.lines().any(|line| matches(expected, line));
        assert!(found, "{place}: no line {expected:?} in\n{printed}");
    }
    println!("{place}: ok");
}

#[test]
fn commands_in_the_documentation_do_what_it_says() {
    let docs = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let mut count = 0;
    for page in [
        "quick-start.md",
        "launching.md",
        "debugging.md",
        "checkpoints.md",
        "security.md",
    ] {
        let text = std::fs::read_to_string(docs.join(page)).unwrap();
        for example in examples(&text) {
            let dir = tempfile::tempdir().unwrap();
            run(page, &example, dir.path());
            count += 1;
        }
    }
    assert!(count >= 10, "{count} examples were found");
}

#[test]
fn a_pattern_is_a_whole_line_with_gaps() {
    assert!(matches("a ... c", "a b c"));
    assert!(matches("a ...", "a b c"));
    assert!(matches("...c", "a b c"));
    assert!(matches("a b c", "a b c"));
    assert!(!matches("a b", "a b c"));
    assert!(!matches("a ... d", "a b c"));
    assert!(!matches("b", "a b c"));
    let text = "```sh not-run\nx\n```\n```sh\ny\n```\n\n```text\nz\n```\nword\n```text\nw\n```\n";
    let found = examples(text);
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].script.as_str(), found[0].line), ("y\n", 4));
    assert_eq!(found[0].expected, ["z"]);
}
