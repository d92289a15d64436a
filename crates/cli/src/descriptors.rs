//! The limit of open files of this process.

use rustix::process::{Resource, getrlimit, setrlimit};

/// As it stands; `None` is no limit.
pub(crate) fn limit() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

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

/// Most open files to make room for in advance: a table of half a megabyte.
const MAX_TABLE: u64 = 1 << 16;

/// Gives the kernel's table of open files its size now.
///
/// It grows by doubling, for which a process with several threads has to wait. With the table made
/// in advance, pauses of 20 ms while thousands connect were gone.
pub(crate) fn reserve_table() {
    let room = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let last = room.min(MAX_TABLE).saturating_sub(1) as i32;
    if let Err(err) = rustix::io::fcntl_dupfd_cloexec(std::io::stderr(), last) {
        tracing::debug!("the table of open files keeps its size: {err}");
    }
}
