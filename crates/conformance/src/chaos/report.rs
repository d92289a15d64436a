//! What became of a rank, and of many runs.

use std::fmt;
use std::time::Duration;

use super::{Fault, Plan};

/// First word of the line.
const WORD: &str = "chaos-report";

/// What a rank that ended in order has to say; travels as a line of its output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// From the fault to the error on a survivor; for a rank that was stopped, how long after the
    /// timeout. `None` on the rank that was stopped and went on.
    pub after: Option<Duration>,
    /// Whether the error names the victim itself.
    pub direct: bool,
}

impl Report {
    pub(super) fn resumed() -> Self {
        Self {
            after: None,
            direct: true,
        }
    }

    pub(super) fn failed(plan: &Plan, after: Duration, direct: bool) -> Self {
        let after = match plan.fault {
            Fault::Kill => after,
            _ => after.saturating_sub(plan.timeout),
        };
        Self {
            after: Some(after),
            direct,
        }
    }

    /// Finds the report in what a rank has printed.
    pub fn find(output: &str) -> Option<Self> {
        let line = output.lines().find_map(|line| line.split_once(WORD))?.1;
        let mut words = line.split_whitespace();
        let after = words.next()?;
        let after = after.parse().ok().map(Duration::from_micros);
        Some(Self {
            after,
            direct: words.next()? == "direct",
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let after = match self.after {
            Some(after) => after.as_micros().to_string(),
            None => "-".into(),
        };
        let whom = if self.direct { "direct" } else { "indirect" };
        write!(f, "{WORD} {after} {whom}")
    }
}

/// What became of many runs.
#[derive(Debug, Default)]
pub struct Summary {
    /// Runs that have ended.
    pub runs: usize,
    /// Of these, how many killed a rank.
    pub kills: usize,
    /// And how many stopped one.
    pub stops: usize,
    /// Runs in which a rank did not come to an end.
    pub hangs: usize,
    /// Runs in which a rank got a wrong result or a wrong error.
    pub wrong: usize,
    /// Survivors whose timeout named a rank that itself waited for the one that was stopped.
    pub indirect: usize,
    to_error: Vec<Duration>,
    lateness: Vec<Duration>,
}

impl Summary {
    /// A run went well, its ranks said this.
    pub fn add(&mut self, plan: &Plan, reports: &[Report]) {
        self.runs += 1;
        let times = match plan.fault {
            Fault::Kill => {
                self.kills += 1;
                &mut self.to_error
            }
            _ => {
                self.stops += 1;
                &mut self.lateness
            }
        };
        times.extend(reports.iter().filter_map(|report| report.after));
        self.indirect += reports.iter().filter(|report| !report.direct).count();
    }

    /// A run did not.
    pub fn add_failure(&mut self, plan: &Plan, hung: bool) {
        self.add(plan, &[]);
        match hung {
            true => self.hangs += 1,
            false => self.wrong += 1,
        }
    }

    /// Whether all went well.
    pub fn is_clean(&self) -> bool {
        self.hangs == 0 && self.wrong == 0
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            runs,
            kills,
            stops,
            hangs,
            wrong,
            indirect,
            ..
        } = self;
        write!(
            f,
            "chaos: {runs} runs, {kills} kills, {stops} stops, hangs {hangs}, wrong {wrong}"
        )?;
        write!(f, "; from the kill to the error {}", Spread(&self.to_error))?;
        write!(f, "; after the timeout {}", Spread(&self.lateness))?;
        write!(
            f,
            "; {indirect} timeouts named a rank that waited for the stopped one"
        )
    }
}

struct Spread<'a>(&'a [Duration]);

impl fmt::Display for Spread<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut times = self.0.to_vec();
        times.sort();
        let at = |share: f64| {
            let index = (times.len() as f64 * share) as usize;
            let time = times.get(index.min(times.len().saturating_sub(1)));
            time.map_or(0.0, |time| time.as_secs_f64() * 1e3)
        };
        write!(
            f,
            "p50 {:.2} ms, p99 {:.2} ms, max {:.2} ms",
            at(0.5),
            at(0.99),
            at(1.0)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_found_among_other_lines() {
        let report = Report {
            after: Some(Duration::from_micros(1234)),
            direct: false,
        };
        let text = format!("hello\n{report}\nbye\n");
        assert_eq!(Report::find(&text), Some(report));
        assert_eq!(
            Report::find(&Report::resumed().to_string()),
            Some(Report::resumed())
        );
        assert_eq!(Report::find("nothing"), None);
    }
}
