//! The suite for [`ProcessGroup`], for whoever writes a backend.
//!
//! Every rank, a thread or a process, calls [`run_rank`] with its own group over all ranks; all
//! run the same cases in the same order, each on a fresh group split off the given one. Inputs are
//! computed from rank and position, so every rank knows what every other contributes and what must
//! come out, without trusting the backend to tell it.
//!
//! ```
//! use phalanx_conformance::group::{Level, run_rank};
//! use phalanx_reference::ReferenceGroup;
//!
//! std::thread::scope(|scope| {
//!     for group in ReferenceGroup::threads(2) {
//!         scope.spawn(move || {
//!             let report = run_rank(&group, Level::Sample);
//!             group.shutdown().expect("an orderly end");
//!             println!("{report}");
//!         });
//!     }
//! });
//! ```
//!
//! What a backend's [`Capabilities`](phalanx_pg::Capabilities) exclude is not asked of it, but
//! printed and counted. [`Level::Sample`] runs every call with every pair of element type,
//! operator, size, kind of memory and mode; [`Level::Full`] with every element type, operator and
//! size together.
//!
//! A backend whose memory the host cannot reach runs the suite inside [`OnDevice`], which copies
//! what every case works on to the device and back.
//!
//! A rank that dies cannot be tested from inside a rank; [`survive`] is what the others run.

mod calls;
mod combinations;
mod extras;
mod faults;
mod inputs;
mod on_device;
mod order;
mod pairwise;
mod subgroups;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_pg::{CallKind, CallOptions, ProcessGroup, ProcessGroupExt};

pub use faults::{break_by_timeout, form_too_late, survive, wake_by_abort};
pub use on_device::OnDevice;

/// How much of the product of calls, types, operators, sizes, memory and modes to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// A sample in which every pair of properties occurs in every case; minutes at most.
    Sample,
    /// The product of call, element type, operator and size, on buffers of up to 2^21 elements;
    /// on small ones of memory and mode too. For soak runs.
    Full,
}

/// One obligation of a process group.
#[derive(Clone, Copy)]
pub struct Case {
    name: &'static str,
    body: fn(&Bench) -> Outcome,
}

impl Case {
    /// The behaviour, as a name.
    pub fn name(&self) -> &'static str {
        self.name
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// A case goes through, or needs what the backend does not have.
type Outcome = Result<(), Skip>;

/// Why a case, or how many of its combinations, were not asked of the backend.
#[derive(Debug)]
struct Skip(String);

/// What a case works with: a fresh group, and how thorough to be.
struct Bench {
    group: Arc<dyn ProcessGroup>,
    level: Level,
}

impl Bench {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn needs(&self, calls: &[CallKind]) -> Outcome {
        let known = self.group.capabilities().calls;
        match calls.iter().find(|&&call| !known.contains(call)) {
            Some(call) => Err(Skip(format!("the backend has no {call}"))),
            None => Ok(()),
        }
    }

    /// A tag for messages, if there are any.
    fn tag(&self, tag: u32) -> u32 {
        match self.group.capabilities().tags {
            true => tag,
            false => 0,
        }
    }

    fn needs_tags(&self) -> Outcome {
        match self.group.capabilities().tags {
            true => Ok(()),
            false => Err(Skip("the backend has no tags".into())),
        }
    }

    /// A case about bits that depend on values and ranks only.
    fn needs_fixed_order(&self) -> Outcome {
        match self.group.capabilities().fixed_order {
            true => Ok(()),
            false => Err(Skip(
                "the backend's library chooses the order of summation".into(),
            )),
        }
    }

    /// A case that needs peers.
    fn needs_ranks(&self, count: usize) -> Outcome {
        match self.size() >= count {
            true => Ok(()),
            false => Err(Skip(format!("needs {count} ranks"))),
        }
    }
}

/// What became of the cases on this rank.
#[derive(Debug, Default)]
pub struct Report {
    /// The names of those that passed, with their times.
    pub passed: Vec<(&'static str, Duration)>,
    /// Those that were not asked of the backend, and why.
    pub skipped: Vec<(&'static str, String)>,
}

impl Report {
    /// That every case of the suite passed on each of `ranks` ranks, but for those that need more
    /// peers than there are.
    ///
    /// # Panics
    ///
    /// If another one was left out.
    pub fn assert_complete(&self, ranks: usize) {
        let unexpected = |(_, why): &&(&str, String)| !(why.starts_with("needs ") && ranks < 4);
        assert_eq!(self.skipped.iter().find(unexpected), None, "{self}");
        assert_eq!(self.passed.len() + self.skipped.len(), cases().len());
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, time) in &self.passed {
            writeln!(f, "ok   {name} ({:.2} s)", time.as_secs_f64())?;
        }
        for (name, why) in &self.skipped {
            writeln!(f, "skip {name}: {why}")?;
        }
        write!(
            f,
            "{} passed, {} skipped",
            self.passed.len(),
            self.skipped.len()
        )
    }
}

/// All cases, in the order in which they run.
pub fn cases() -> Vec<Case> {
    [
        calls::CASES,
        order::CASES,
        extras::CASES,
        subgroups::CASES,
        faults::CASES,
    ]
    .concat()
}

/// Runs all cases as one rank of `group`; panics with the name of the first that fails.
///
/// Every rank calls it. A rank that panics aborts the group, so the others do not wait for it.
pub fn run_rank(group: &Arc<dyn ProcessGroup>, level: Level) -> Report {
    run_cases(group, level, &cases(), &|group| group)
}

/// As [`run_rank`], with some of the [`cases`], and `wrap` around each case's group.
pub fn run_cases(
    group: &Arc<dyn ProcessGroup>,
    level: Level,
    cases: &[Case],
    wrap: &dyn Fn(Arc<dyn ProcessGroup>) -> Arc<dyn ProcessGroup>,
) -> Report {
    let everyone: Vec<usize> = (0..group.size()).collect();
    let mut report = Report::default();
    for case in cases {
        let start = Instant::now();
        tracing::info!(case = case.name, rank = group.rank(), "conformance");
        let fresh = group
            .split(&everyone, case.name)
            .unwrap_or_else(|err| panic!("case `{}`: no fresh group: {err}", case.name))
            .expect("every rank is a member");
        let fresh = wrap(fresh);
        // Nobody may break the group while others are still putting it together.
        group
            .barrier()
            .unwrap_or_else(|err| panic!("before case `{}`: {err}", case.name));
        let bench = Bench {
            group: fresh,
            level,
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| (case.body)(&bench)));
        match outcome {
            Ok(Ok(())) => report.passed.push((case.name, start.elapsed())),
            Ok(Err(Skip(why))) => report.skipped.push((case.name, why)),
            Err(panic) => {
                eprintln!(
                    "rank {}: conformance case `{}` failed",
                    group.rank(),
                    case.name
                );
                let reason = format!("conformance case `{}` failed", case.name);
                bench.group.abort(&reason);
                group.abort(&reason);
                resume_unwind(panic);
            }
        }
        // Nobody may start the next case, and with it new connections, while others still run.
        group
            .barrier()
            .unwrap_or_else(|err| panic!("after case `{}`: {err}", case.name));
    }
    report
}

/// Submits in the mode that alternates between ranks and rounds, so that both always meet.
fn mixed_options(rank: usize, round: usize) -> CallOptions {
    match (rank + round).is_multiple_of(2) {
        true => CallOptions::blocking(),
        false => CallOptions::default(),
    }
}
