//! How a world ended, and the text that tells a reader about it.

use std::fmt;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

/// How one rank ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum End {
    /// The body returned and the process exited cleanly.
    Finished,
    /// The body panicked with this message.
    Panicked(String),
    /// The process exited with this code without the body having returned, or with a code other
    /// than 0 after it had.
    Exited(i32),
    /// The process was killed by this signal, not by the harness.
    Signaled(i32),
    /// The harness killed it: the deadline had passed, or another rank had failed.
    Killed,
    /// Started by a launcher, it went away without a word; a launcher hides exit codes.
    Lost,
    /// The process never reached the body, for this reason.
    NeverRan(String),
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Finished => write!(f, "finished"),
            Self::Panicked(message) => write!(f, "panicked: {message}"),
            Self::Exited(0) => write!(f, "exited with code 0 before its body returned"),
            Self::Exited(code) => write!(f, "exited with code {code}"),
            Self::Signaled(signal) => write!(f, "was killed by signal {signal}"),
            Self::Killed => write!(f, "was killed by the harness"),
            Self::Lost => write!(f, "went away before its body returned"),
            Self::NeverRan(why) => write!(f, "never reached the test body: {why}"),
        }
    }
}

/// One rank of a world that has ended.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RankOutcome {
    /// The rank.
    pub rank: usize,
    /// How it ended.
    pub end: End,
    /// When, since the start of the world; for a panic, when it was raised.
    pub after: Duration,
    /// The last MiB of what it printed.
    pub log: String,
    /// What it last said to be doing (see [`Rank::op`](crate::Rank::op)).
    pub last_op: Option<String>,
}

/// The launcher of a world that has ended.
#[derive(Debug, Clone)]
pub(crate) struct LauncherOutcome {
    /// `None` if it had to be killed.
    pub(crate) status: Option<ExitStatus>,
    pub(crate) log: String,
}

/// A world that has ended, for [`World::check`](crate::World::check) to look at.
#[derive(Debug)]
pub struct Outcome {
    pub(crate) ranks: Vec<RankOutcome>,
    pub(crate) launcher: Option<LauncherOutcome>,
    /// The deadline, if that was what ended the world.
    pub(crate) overdue: Option<Duration>,
    pub(crate) dir: PathBuf,
}

impl Outcome {
    /// All ranks in order.
    pub fn ranks(&self) -> &[RankOutcome] {
        &self.ranks
    }

    /// One rank.
    pub fn rank(&self, rank: usize) -> &RankOutcome {
        &self.ranks[rank]
    }

    /// The directory that the ranks shared; removed after the check.
    pub fn dir(&self) -> &std::path::Path {
        &self.dir
    }

    /// The rank that failed before the others, if any failed by itself.
    pub fn first_failure(&self) -> Option<&RankOutcome> {
        self.ranks
            .iter()
            .filter(|r| !matches!(r.end, End::Finished | End::Killed))
            .min_by_key(|r| r.after)
    }

    /// Whether every rank finished.
    pub fn succeeded(&self) -> bool {
        self.overdue.is_none()
            && self.ranks.iter().all(|r| r.end == End::Finished)
            && self.launcher_failure().is_none()
    }

    /// Whether the outcome says nothing about the code under test: it hung, or was never reached.
    pub(crate) fn inconclusive(&self) -> bool {
        self.overdue.is_some()
            || self
                .ranks
                .iter()
                .any(|r| matches!(r.end, End::NeverRan(_) | End::Killed))
    }

    fn launcher_failure(&self) -> Option<String> {
        match self.launcher.as_ref()?.status {
            Some(status) if status.success() => None,
            Some(status) => Some(format!("the launcher ended with {status}")),
            None => Some("the launcher was killed by the harness".into()),
        }
    }

    /// The whole story: the cause first, then each rank's log, the first to fail first.
    pub fn report(&self) -> String {
        let mut text = self.headline();
        text.push('\n');
        let first = self.first_failure().map(|r| r.rank);
        let mut ranks: Vec<_> = self.ranks.iter().collect();
        ranks.sort_by_key(|r| (Some(r.rank) != first, r.rank));
        for rank in ranks {
            let (size, after) = (self.ranks.len(), rank.after.as_secs_f64());
            let op = rank.last_op.as_deref().unwrap_or("none");
            let _ = writeln!(text, "\n--- rank {} of {size}: {}", rank.rank, rank.end);
            let _ = writeln!(text, "    after {after:.3} s; last operation: {op}");
            append_log(&mut text, &rank.log);
        }
        if let (Some(launcher), Some(failure)) = (&self.launcher, self.launcher_failure()) {
            let _ = writeln!(text, "\n--- {failure}");
            append_log(&mut text, &launcher.log);
        }
        text
    }

    fn headline(&self) -> String {
        let size = self.ranks.len();
        if let Some(first) = self.first_failure() {
            let after = first.after.as_secs_f64();
            let (rank, end) = (first.rank, &first.end);
            return format!("rank {rank} of {size} {end} (after {after:.3} s)");
        }
        if let Some(limit) = self.overdue {
            let late: Vec<String> = self
                .ranks
                .iter()
                .filter(|r| r.end == End::Killed)
                .map(|r| r.rank.to_string())
                .collect();
            let late = match late.len() {
                0 => "only the launcher was".to_owned(),
                _ => format!("ranks {} of {size} were", late.join(", ")),
            };
            return format!("{late} still running after {:.3} s", limit.as_secs_f64());
        }
        match self.launcher_failure() {
            Some(failure) => failure,
            None => format!("all {size} ranks finished"),
        }
    }
}

fn append_log(text: &mut String, log: &str) {
    for line in log.trim_end().lines() {
        text.push_str("  | ");
        text.push_str(line);
        text.push('\n');
    }
}
