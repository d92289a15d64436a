//! What can go wrong in a backward pass.

use std::fmt;
use std::sync::Arc;

use crate::params::{ParamSpec, Slot};

/// Result of the reducer.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why gradients could not be averaged. Cheap to clone: a pass keeps its first error.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument makes no sense; nothing was changed or sent.
    #[error("{0}")]
    Invalid(Arc<str>),
    /// A gradient came a second time in one backward.
    #[error(
        "rank {rank}: the gradient of parameter {param} was marked ready twice in one backward. \
         Either it is used outside of the wrapped forward, or by several forwards that share a \
         backward without sharing their hooks; or backward runs parts of the model again, as \
         checkpointing does. If the model does the same in every iteration, static_graph allows \
         it"
    )]
    MarkedTwice {
        /// Own rank.
        rank: usize,
        /// Whose gradient.
        param: ParamName,
    },
    /// Backward is over and gradients are missing.
    #[error("rank {}: the reduction of this backward did not finish: {}", .0.rank, .0)]
    Unfinished(Arc<Unfinished>),
    /// Under `static_graph`, a gradient that was not there in the first backward, or more often.
    #[error(
        "rank {rank}: the graph changed although static_graph is set: parameter {param} had \
         {expected} gradients in the first backward and has another one now; do without \
         static_graph, or keep the graph as it was"
    )]
    GraphChanged {
        /// Own rank.
        rank: usize,
        /// Whose gradient.
        param: ParamName,
        /// How many gradients it had in the first backward.
        expected: u32,
    },
    /// A gradient that does not fit its parameter.
    #[error("the gradient of parameter {param} {problem}")]
    BadGradient {
        /// Whose gradient.
        param: ParamName,
        /// What is wrong with it.
        problem: Arc<str>,
    },
    /// Ranks do not have the same parameters or options. Every rank gets this error.
    #[error("rank {rank}: {problem}")]
    Differ {
        /// Own rank.
        rank: usize,
        /// Which ranks differ in what.
        problem: Arc<str>,
    },
    /// A comm hook failed. Its group was aborted, so that no other rank waits for this one.
    #[error("rank {rank}: the comm hook failed on bucket {bucket}: {problem}")]
    Hook {
        /// Own rank.
        rank: usize,
        /// Index of the bucket.
        bucket: usize,
        /// What it said.
        problem: Arc<str>,
    },
    /// An earlier pass failed, so ranks may be at different points: replace the group first.
    #[error(
        "an earlier backward did not finish its reduction, so ranks may be at different \
         points; replace the process group to go on: {0}"
    )]
    Stuck(Arc<Error>),
    /// The process group failed.
    #[error(transparent)]
    Group(#[from] phalanx_pg::Error),
}

/// As for people: it is what a `main` that returns an error shows.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Error {
    pub(crate) fn invalid(what: impl Into<Arc<str>>) -> Self {
        Self::Invalid(what.into())
    }

    /// The failure of the process group behind this error, which names the rank at fault.
    pub fn group(&self) -> Option<&phalanx_pg::Error> {
        match self {
            Self::Group(err) => Some(err),
            Self::Stuck(cause) => cause.group(),
            _ => None,
        }
    }
}

/// A parameter as errors show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamName {
    /// Its place in the agreed order.
    pub slot: Slot,
    /// Its name.
    pub name: Arc<str>,
}

impl ParamName {
    pub(crate) fn of(slot: Slot, params: &[ParamSpec]) -> Self {
        let name = params.get(slot).map_or("?", |param| &param.name);
        Self {
            slot,
            name: name.into(),
        }
    }
}

impl fmt::Display for ParamName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.slot, self.name)
    }
}

/// Which gradients are missing, and why that may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfinished {
    /// Own rank.
    pub rank: usize,
    /// The parameters without a gradient.
    pub missing: Vec<ParamName>,
    /// What to look at.
    pub why: Why,
}

/// What to look at when gradients are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// Neither `find_unused_parameters` nor `static_graph` is set.
    UnusedNotAllowed,
    /// `static_graph` is set, and parameters that had a gradient have none.
    GraphChanged,
    /// The pass was dropped after gradients had come.
    Dropped,
}

/// Most parameters that an error lists.
const MOST_LISTED: usize = 20;

impl fmt::Display for Unfinished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.missing.len() {
            0 => f.write_str("all gradients were there")?,
            1 => f.write_str("1 parameter has no gradient")?,
            n => write!(f, "{n} parameters have no gradient")?,
        }
        for (i, param) in self.missing.iter().take(MOST_LISTED).enumerate() {
            f.write_str(if i == 0 { ": " } else { ", " })?;
            write!(f, "{param}")?;
        }
        if self.missing.len() > MOST_LISTED {
            f.write_str(", ...")?;
        }
        f.write_str(match self.why {
            Why::UnusedNotAllowed => {
                "; if the model does not use all its parameters in every forward, or not all \
                 outputs go into the loss, set find_unused_parameters"
            }
            Why::GraphChanged => {
                "; they had one in the first backward and static_graph says that nothing \
                 changes: do without it, or keep the graph as it was"
            }
            Why::Dropped => {
                "; the pass was dropped while other ranks may wait for it: call finish after \
                 every backward, also after one that failed on all ranks"
            }
        })
    }
}
