//! What happens in one run.

use std::fmt;
use std::time::Duration;

/// What happens to the victim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// SIGKILL.
    Kill,
    /// SIGSTOP; SIGKILL once everybody has noticed.
    StopThenKill,
    /// SIGSTOP; SIGCONT once everybody has noticed.
    StopThenResume,
}

/// What happens in one run; the same on all ranks, since it follows from a number.
#[derive(Debug, Clone)]
pub struct Plan {
    /// All of it follows from this.
    pub seed: u64,
    /// How many processes.
    pub ranks: usize,
    /// The host that each pretends to be on.
    pub hosts: Vec<usize>,
    /// What happens.
    pub fault: Fault,
    /// To whom.
    pub victim: usize,
    /// When, after all have met.
    pub delay: Duration,
    /// Of every operation.
    pub timeout: Duration,
}

impl Plan {
    /// The run with this number, of 2 to `most_ranks` ranks.
    pub fn new(seed: u64, most_ranks: usize) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let ranks = rng.usize(2..=most_ranks.max(2));
        let hosts = match rng.usize(0..10) {
            // The first two together and the rest elsewhere, or every other one.
            0 | 1 => (0..ranks)
                .map(|rank| usize::from(rank >= 2.min(ranks - 1)))
                .collect(),
            2 => (0..ranks).map(|rank| rank % 2).collect(),
            _ => vec![0; ranks],
        };
        let fault = match rng.usize(0..8) {
            0 => Fault::StopThenKill,
            1 => Fault::StopThenResume,
            _ => Fault::Kill,
        };
        let timeout = match fault {
            Fault::Kill => Duration::from_secs(60),
            // Longer than a busy machine keeps a process waiting.
            _ => Duration::from_millis(2000),
        };
        Self {
            seed,
            ranks,
            hosts,
            fault,
            victim: rng.usize(0..ranks),
            delay: Duration::from_micros(rng.u64(0..120_000)),
            timeout,
        }
    }

    /// Who sends the signals: somebody else.
    pub(super) fn saboteur(&self) -> usize {
        usize::from(self.victim == 0)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            seed,
            ranks,
            hosts,
            fault,
            victim,
            delay,
            ..
        } = self;
        write!(
            f,
            "run {seed}: {ranks} ranks on hosts {hosts:?}, {fault:?} of rank {victim} after {delay:?}"
        )
    }
}
