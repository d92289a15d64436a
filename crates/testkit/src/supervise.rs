//! The watchdog: follows a crew of ranks until all have ended, or ends them.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use phalanx_store::Deadline;

use crate::crew::Crew;
use crate::outcome::{End, Outcome, RankOutcome};

/// How long the others may go on once a rank has failed: long enough to report what they saw.
const GRACE: Duration = Duration::from_secs(2);

/// What a failing rank means for the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// They get a moment and are killed.
    FailFast,
    /// They go on: the test is about what they do now.
    WaitForAll,
}

pub(crate) fn supervise(
    crew: &mut dyn Crew,
    limit: Duration,
    patience: Patience,
    dir: &Path,
) -> io::Result<Outcome> {
    let clock = Clock::start();
    let mut ends: Vec<Option<(End, Duration)>> = vec![None; crew.size()];
    let mut until = Deadline::after(limit);
    let mut failing = false;
    let mut overdue = None;
    while !crew.finished() {
        for (rank, end) in crew.wait(until)? {
            let fatal = match end {
                End::Finished => false,
                End::NeverRan(_) => true,
                _ => patience == Patience::FailFast,
            };
            if fatal && !failing {
                failing = true;
                until = until.min(GRACE);
            }
            let said = crew.log(rank).end().map(|mark| clock.at(mark.at));
            ends[rank] = Some((end, said.unwrap_or_else(|| clock.now())));
        }
        if until.passed() && !crew.finished() {
            crew.kill()?;
            overdue = (!failing).then_some(limit);
            break;
        }
    }
    let now = clock.now();
    let ranks = ends.into_iter().enumerate().map(|(rank, end)| {
        let (end, after) = end.unwrap_or((End::Killed, now));
        let log = crew.log(rank);
        RankOutcome {
            rank,
            end,
            after,
            log: log.text(),
            last_op: log.last_op(),
        }
    });
    Ok(Outcome {
        ranks: ranks.collect(),
        launcher: crew.launcher(),
        overdue,
        dir: dir.to_owned(),
    })
}

/// Puts times that ranks tell (by the wall clock, the only one that processes share) and times
/// seen here on one scale.
struct Clock {
    start: Instant,
    epoch: Duration,
}

impl Clock {
    fn start() -> Self {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            start: Instant::now(),
            epoch: epoch.unwrap_or_default(),
        }
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn at(&self, since_epoch: Duration) -> Duration {
        since_epoch.saturating_sub(self.epoch)
    }
}
