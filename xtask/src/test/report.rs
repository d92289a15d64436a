//! The end of a run: what failed, a table, one line to grep for.

use std::fmt;
use std::time::Duration;

use super::tally::Tally;

/// The result of one suite.
pub(super) struct Line {
    suite: &'static str,
    time: Duration,
    tally: Tally,
}

impl Line {
    pub(super) fn new(suite: &'static str, time: Duration, tally: Tally) -> Self {
        Self { suite, time, tally }
    }

    /// The first failure, and why something was skipped.
    fn remarks(&self) -> String {
        let first = self.tally.first_failure.iter();
        let first = first.map(|name| format!("first failure: {name}"));
        let skipped = self.tally.why_skipped();
        let skipped = (!skipped.is_empty()).then_some(skipped);
        first.chain(skipped).collect::<Vec<_>>().join("; ")
    }

    fn minutes(&self) -> f64 {
        self.time.as_secs_f64() / 60.0
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally { passed, failed, .. } = self.tally;
        write!(f, "{}: {passed} passed, {failed} failed", self.suite)?;
        if self.tally.skipped > 0 {
            let (skipped, why) = (self.tally.skipped, self.tally.why_skipped());
            write!(f, ", {skipped} skipped ({why})")?;
        }
        write!(f, " in {:.1} min", self.minutes())
    }
}

/// The results of a run.
pub(super) struct Report {
    lines: Vec<Line>,
    require_all: bool,
}

impl Report {
    pub(super) fn new(require_all: bool) -> Self {
        let lines = Vec::new();
        Self { lines, require_all }
    }

    pub(super) fn add(&mut self, line: Line) {
        self.lines.push(line);
    }

    fn sum(&self, count: impl Fn(&Tally) -> u64) -> u64 {
        self.lines.iter().map(|line| count(&line.tally)).sum()
    }

    pub(super) fn succeeded(&self) -> bool {
        let skips_count = self.require_all && self.sum(|t| t.skipped) > 0;
        self.sum(|t| t.failed) == 0 && !skips_count
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in self.lines.iter().filter(|line| line.tally.failed > 0) {
            writeln!(f, "\n=== {} failed:", line.suite)?;
            for text in &line.tally.evidence {
                writeln!(f, "  | {text}")?;
            }
        }
        writeln!(f)?;
        writeln!(f, "suite        minutes   passed   failed  skipped  why")?;
        for line in &self.lines {
            let Tally {
                passed,
                failed,
                skipped,
                ..
            } = line.tally;
            let counts = format!("{passed:8} {failed:8} {skipped:8}");
            let row = format!(
                "{:<12} {:7.1} {counts}  {}",
                line.suite,
                line.minutes(),
                line.remarks()
            );
            writeln!(f, "{}", row.trim_end())?;
        }
        writeln!(f)?;
        let (passed, failed) = (self.sum(|t| t.passed), self.sum(|t| t.failed));
        let skipped = self.sum(|t| t.skipped);
        if self.require_all && skipped > 0 {
            writeln!(f, "{skipped} skipped, which --require-all does not allow")?;
        }
        write!(f, "{passed} passed, {failed} failed")?;
        match skipped {
            0 => writeln!(f),
            _ => writeln!(f, ", {skipped} skipped"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(require_all: bool, failed: u64, skipped: u64) -> Report {
        let mut report = Report::new(require_all);
        let mut tally = Tally::default();
        tally.passed = 5;
        tally.failed = failed;
        if skipped > 0 {
            tally.skip(skipped, "no mpirun");
        }
        tally.first_failure = (failed > 0).then(|| "a::b".into());
        tally.evidence = vec!["boom".into()];
        report.add(Line::new("first", Duration::from_secs(90), tally));
        let mut tally = Tally::default();
        tally.passed = 2;
        report.add(Line::new("second", Duration::ZERO, tally));
        report
    }

    #[test]
    fn the_last_line_stands_alone() {
        let text = report(false, 0, 0).to_string();
        assert!(text.ends_with("\n\n7 passed, 0 failed\n"), "{text}");
        let text = report(true, 1, 3).to_string();
        assert!(
            text.ends_with("\n7 passed, 1 failed, 3 skipped\n"),
            "{text}"
        );
    }

    #[test]
    fn skips_fail_a_run_only_where_everything_is_required() {
        assert!(report(false, 0, 1).succeeded());
        assert!(!report(true, 0, 1).succeeded());
        assert!(report(true, 0, 0).succeeded());
        assert!(!report(false, 1, 0).succeeded());
    }

    #[test]
    fn the_table_says_why_something_was_skipped() {
        let text = report(false, 0, 1).to_string();
        let row = "first            1.5        5        0        1  no mpirun\n";
        assert!(text.contains(row), "{text}");
        assert!(!text.contains("boom"), "{text}");
    }

    #[test]
    fn the_table_names_the_first_failure() {
        let text = report(false, 1, 1).to_string();
        let row =
            "first            1.5        5        1        1  first failure: a::b; no mpirun\n";
        assert!(text.contains(row), "{text}");
    }

    #[test]
    fn what_failed_is_shown_again() {
        assert!(
            report(false, 1, 0)
                .to_string()
                .contains("=== first failed:\n  | boom\n")
        );
    }
}
