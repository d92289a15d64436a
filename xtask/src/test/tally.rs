//! What a suite's output says about its tests.

use std::collections::VecDeque;
use std::process::ExitStatus;

use crate::Failure;

/// How many lines of a failing suite's end are repeated if it is not made of tests.
const TAIL_LINES: usize = 60;

/// How many lines of failing tests are repeated.
const FAILURE_LINES: usize = 1000;

/// The reason that marks a test as no test: `#[ignore = "..."]` on what another test runs in a
/// process of its own. It is neither skipped nor, on its own, worth a pass.
const CHILD: &str = "the child process of another test";

/// Counts the tests of a suite while its commands run, and remembers what failed.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) passed: u64,
    pub(super) failed: u64,
    pub(super) skipped: u64,
    why_skipped: Vec<String>,
    /// The name of the first test that failed, or what failed instead of a test.
    pub(super) first_failure: Option<String>,
    /// What to show again at the end.
    pub(super) evidence: Vec<String>,
    before: Counts,
    tail: VecDeque<String>,
    failures: Vec<String>,
    in_failures: bool,
    /// Since the last result.
    ignored: Vec<String>,
}

/// What libtest reported before the running command.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Counts {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Tally {
    /// Takes in one line of output.
    pub(super) fn read(&mut self, line: &str) {
        if line == "failures:" {
            self.in_failures = true;
        }
        if self.in_failures && self.failures.len() < FAILURE_LINES {
            self.failures.push(line.to_owned());
        }
        if let Some(reason) = parse_ignored(line) {
            self.ignored.push(reason.to_owned());
        }
        let failed = parse_failed(line, self.in_failures);
        self.first_failure = self.first_failure.take().or(failed.map(str::to_owned));
        if let Some(counts) = parse_result(line) {
            self.in_failures = false;
            self.passed += counts.passed;
            self.failed += counts.failed;
            self.count_ignored(counts.ignored);
        }
        if self.tail.len() == TAIL_LINES {
            self.tail.pop_front();
        }
        self.tail.push_back(line.to_owned());
    }

    /// Takes in how a command ended. One without tests counts as one.
    pub(super) fn end_of_command(&mut self, status: Result<ExitStatus, Failure>) {
        let problem = match status {
            Ok(status) if status.success() => None,
            Ok(status) => Some(status.to_string()),
            Err(failure) => Some(failure.to_string()),
        };
        let ran = self.passed > self.before.passed || self.failed > self.before.failed;
        match problem {
            None if !ran => self.passed += 1,
            None => {}
            Some(problem) => {
                // It failed by something other than a test: a build, a crash.
                if self.failed == self.before.failed {
                    self.failed += 1;
                    let error = self.tail.iter().find(|line| line.starts_with("error"));
                    let what = error.unwrap_or(&problem).clone();
                    self.first_failure.get_or_insert(what);
                }
                let tail: Vec<String> = self.tail.drain(..).collect();
                let tests = std::mem::take(&mut self.failures);
                self.evidence.extend(tests);
                self.evidence.push("the last lines:".into());
                self.evidence.extend(tail);
                self.evidence.push(problem);
            }
        }
        self.tail.clear();
        self.failures.clear();
        self.before.passed = self.passed;
        self.before.failed = self.failed;
    }

    /// Counts something that was not run.
    pub(super) fn skip(&mut self, count: u64, why: &str) {
        self.skipped += count;
        if !self.why_skipped.iter().any(|known| known == why) {
            self.why_skipped.push(why.to_owned());
        }
    }

    /// All reasons for which something was not run.
    pub(super) fn why_skipped(&self) -> String {
        self.why_skipped.join("; ")
    }

    fn count_ignored(&mut self, mut count: u64) {
        for reason in std::mem::take(&mut self.ignored) {
            count = count.saturating_sub(1);
            if reason != CHILD {
                self.skip(1, &format!("#[ignore] {reason}"));
            }
        }
        // Tests whose line was broken up by other output still count.
        if count > 0 {
            self.skip(count, "#[ignore]");
        }
    }
}

/// Reads libtest's `test name ... ignored, reason`.
fn parse_ignored(line: &str) -> Option<&str> {
    let (_, reason) = line.strip_prefix("test ")?.split_once(" ... ignored")?;
    Some(reason.strip_prefix(", ").unwrap_or("without a reason"))
}

/// Reads libtest's `test name ... FAILED`; among the failures also `---- name stdout ----`, because
/// other output may have broken up the first.
fn parse_failed(line: &str, in_failures: bool) -> Option<&str> {
    let result = line.strip_prefix("test ");
    let result = result.and_then(|rest| rest.strip_suffix(" ... FAILED"));
    let heading = line.strip_prefix("---- ").filter(|_| in_failures);
    result.or_else(|| heading?.strip_suffix(" stdout ----"))
}

/// Reads libtest's `test result: ok. 3 passed; 0 failed; 1 ignored; ...`.
fn parse_result(line: &str) -> Option<Counts> {
    let rest = line.strip_prefix("test result: ")?;
    let (_, rest) = rest.split_once(". ")?;
    let mut counts = Counts::default();
    for part in rest.split("; ") {
        let (number, what) = part.split_once(' ')?;
        match what {
            "passed" => counts.passed = number.parse().ok()?,
            "failed" => counts.failed = number.parse().ok()?,
            "ignored" => counts.ignored = number.parse().ok()?,
            _ => break,
        }
    }
    Some(counts)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn tally(lines: &[&str], code: i32) -> Tally {
        let mut tally = Tally::default();
        lines.iter().for_each(|line| tally.read(line));
        tally.end_of_command(Ok(ExitStatus::from_raw(code << 8)));
        tally
    }

    const GOOD: &str = "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0s";
    const BAD: &str = "test result: FAILED. 2 passed; 2 failed; 0 ignored; 0 measured; \
                       0 filtered out; finished in 5.11s";

    #[test]
    fn results_of_all_test_programs_are_summed() {
        let tally = tally(&[GOOD, "other text", BAD, GOOD], 101);
        assert_eq!((tally.passed, tally.failed, tally.skipped), (8, 2, 2));
        assert_eq!(tally.why_skipped(), "#[ignore]");
    }

    #[test]
    fn what_another_test_runs_is_not_skipped() {
        let child = format!("test a ... ignored, {CHILD}");
        let result = GOOD.replace("1 ignored", "3 ignored");
        let lines = [
            &child,
            "test b ... ignored, slow",
            "test c ... ignored",
            &result,
            GOOD,
        ];
        let tally = tally(&lines, 0);
        assert_eq!((tally.passed, tally.failed, tally.skipped), (6, 0, 3));
        let why = "#[ignore] slow; #[ignore] without a reason; #[ignore]";
        assert_eq!(tally.why_skipped(), why);
    }

    #[test]
    fn a_command_without_tests_counts_as_one() {
        assert_eq!(tally(&["hello"], 0).passed, 1);
        let failed = tally(&["hello"], 1);
        assert_eq!((failed.passed, failed.failed), (0, 1));
        assert_eq!(
            failed.evidence,
            ["the last lines:", "hello", "exit status: 1"]
        );
    }

    #[test]
    fn a_crash_after_passing_tests_is_a_failure() {
        let tally = tally(&[GOOD], 101);
        assert_eq!((tally.passed, tally.failed), (3, 1));
    }

    #[test]
    fn failing_tests_are_remembered_when_others_follow() {
        let mut lines = vec!["failures:", "---- a stdout ----", "boom", BAD];
        lines.extend([GOOD; 2 * TAIL_LINES]);
        let evidence = tally(&lines, 101).evidence;
        assert_eq!(
            evidence[..4],
            ["failures:", "---- a stdout ----", "boom", BAD]
        );
        assert!(evidence.len() < TAIL_LINES + 10);
    }

    #[test]
    fn the_first_failure_has_a_name() {
        let first = |lines: &[&str]| tally(lines, 101).first_failure.expect("a failure");
        let lines = [
            "test a ... ok",
            "test m::b ... FAILED",
            "test c ... FAILED",
            BAD,
        ];
        assert_eq!(first(&lines), "m::b");
        let lines = [
            "test a ... noise",
            "FAILED",
            "failures:",
            "",
            "---- a stdout ----",
            BAD,
        ];
        assert_eq!(first(&lines), "a");
        let error = "error: could not compile `x` (lib)";
        assert_eq!(first(&["   Compiling x", error, "more"]), error);
        assert_eq!(first(&[]), "exit status: 101");
        assert_eq!(tally(&[GOOD], 0).first_failure, None);
    }

    #[test]
    fn a_second_command_is_judged_on_its_own() {
        let mut tally = tally(&[GOOD], 0);
        tally.end_of_command(Ok(ExitStatus::from_raw(0)));
        assert_eq!((tally.passed, tally.failed), (4, 0));
        tally.end_of_command(Err("no such program".into()));
        assert_eq!((tally.passed, tally.failed), (4, 1));
    }

    #[test]
    fn other_text_is_no_result() {
        assert_eq!(parse_result("test result: soon"), None);
        assert_eq!(parse_result("passed; failed"), None);
        // A test that runs tests shows theirs when it fails.
        assert_eq!(parse_result(&format!("  | {GOOD}")), None);
    }
}
