//! The processes of a world, however they were started.

mod direct;
mod launched;

use std::io;

use phalanx_store::Deadline;

use crate::log::Log;
use crate::outcome::{End, LauncherOutcome};

pub(crate) use direct::Direct;
pub(crate) use launched::{Exchange, Launched, call_back};

/// One process per rank. Dropping a crew kills what is left of it.
pub(crate) trait Crew {
    fn size(&self) -> usize;

    /// Waits until something has ended; returns the ranks that have. May return early with none.
    fn wait(&mut self, until: Deadline) -> io::Result<Vec<(usize, End)>>;

    /// Whether all has ended, the launcher included.
    fn finished(&self) -> bool;

    /// Ends everything, for certain.
    fn kill(&mut self) -> io::Result<()>;

    fn log(&self, rank: usize) -> &Log;

    fn launcher(&self) -> Option<LauncherOutcome> {
        None
    }
}
