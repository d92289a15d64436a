//! What can go wrong in distributed data parallel.

use std::fmt;
use std::sync::Arc;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a step could not be taken.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument or a call makes no sense; nothing was changed or sent.
    #[error("{0}")]
    Invalid(Arc<str>),
    /// The reducer: unused parameters, gradients that came twice, ranks that differ, a lost rank.
    #[error(transparent)]
    Reducer(#[from] phalanx_reducer::Error),
    /// The process group.
    #[error(transparent)]
    Group(#[from] phalanx_pg::Error),
    /// A rank has no inputs left and [`JoinOptions`](crate::JoinOptions) asks to stop then.
    #[error("rank {rank}: a rank has run out of inputs, so all stop")]
    EarlyEnd {
        /// Own rank.
        rank: usize,
    },
    /// The front end: a framework's tensor could not be read or written.
    #[error("{0}")]
    Frontend(Arc<str>),
}

/// As for people: it is what a `main` that returns an error shows.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Error {
    /// An [`Error::Invalid`].
    pub fn invalid(what: impl Into<Arc<str>>) -> Self {
        Self::Invalid(what.into())
    }

    /// An [`Error::Frontend`], for implementations of [`Replica`](crate::Replica).
    pub fn frontend(what: impl Into<Arc<str>>) -> Self {
        Self::Frontend(what.into())
    }

    /// The failure of the process group behind this error, which names the rank at fault.
    pub fn group(&self) -> Option<&phalanx_pg::Error> {
        match self {
            Self::Group(err) => Some(err),
            Self::Reducer(err) => err.group(),
            _ => None,
        }
    }
}
