//! Processor time and processors of the two sides of a measurement.

use std::fs;
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::Failure;

/// Processor time that all threads of a process have used.
pub(crate) fn used_by(pid: u32) -> Result<Duration, Failure> {
    let mut nanos = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let path = task?.path().join("schedstat");
        // A thread that ended since the listing has no figures any more.
        let Ok(text) = fs::read_to_string(&path) else {
            continue;
        };
        nanos += first_number(&text).ok_or_else(|| format!("{}: no number", path.display()))?;
    }
    Ok(Duration::from_nanos(nanos))
}

/// `schedstat` holds nanoseconds run, nanoseconds waited, slices.
fn first_number(schedstat: &str) -> Option<u64> {
    schedstat.split_ascii_whitespace().next()?.parse().ok()
}

/// Where server and load generator run.
///
/// Left to itself, the scheduler moves a pair of processes that wake each other between one
/// processor and two, and the cost of a wake-up differs several times: no two windows compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Placement {
    /// Each on a processor of its own.
    Apart,
    /// Both on the same processor: no wake-ups across processors, so the steadiest figures.
    Shared,
    /// Wherever the scheduler puts them.
    Free,
}

impl Placement {
    /// The processors of the server and of the load generator, if they are to be pinned.
    pub(crate) fn processors(self) -> Result<Option<(usize, usize)>, Failure> {
        let allowed = sched_getaffinity(None)?;
        let mut allowed = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
        let first = allowed.next().ok_or("no processor to run on")?;
        match self {
            Self::Free => Ok(None),
            Self::Shared => Ok(Some((first, first))),
            Self::Apart => match allowed.next_back() {
                Some(last) => Ok(Some((last, first))),
                None => Err("only one processor is allowed; use --placement shared".into()),
            },
        }
    }
}

/// Keeps this process, and those it starts from now on, on one processor.
pub(crate) fn pin(processor: usize) -> Result<(), Failure> {
    let mut set = CpuSet::new();
    set.set(processor);
    Ok(sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Instant;

    use super::*;

    #[test]
    fn schedstat_begins_with_the_time_run() {
        assert_eq!(first_number("123456 789 10\n"), Some(123_456));
        assert_eq!(first_number(""), None);
        assert_eq!(first_number("x 1 2"), None);
    }

    #[test]
    fn processor_time_grows() {
        // Another process: threads of other tests may end and take their times along.
        let mut busy = Command::new("sh");
        let mut busy = busy.args(["-c", "while :; do :; done"]).spawn().unwrap();
        let (start, before) = (Instant::now(), used_by(busy.id()).unwrap());
        let mut grown = false;
        while !grown && start.elapsed() < Duration::from_secs(30) {
            grown = used_by(busy.id()).unwrap() > before;
        }
        busy.kill().unwrap();
        busy.wait().unwrap();
        assert!(grown);
    }
}
