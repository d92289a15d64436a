//! The limit of open files of this process.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Raises it as far as the system permits, and returns it.
pub(crate) fn raise_limit() -> usize {
    let mut limit = getrlimit(Resource::Nofile);
    let before = limit.current;
    limit.current = limit.maximum;
    let reached = match setrlimit(Resource::Nofile, limit) {
        Ok(()) => limit.maximum,
        Err(err) => {
            tracing::warn!("cannot raise the limit of open files: {err}");
            before
        }
    };
    reached.map_or(usize::MAX, |n| n as usize)
}
