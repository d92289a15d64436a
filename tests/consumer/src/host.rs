//! The directory that all groups of a job share, and who is alive.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use phalanx::pg::registry::GroupInit;
use phalanx::pg::{Error, ErrorKind, Result};

/// One rank's view of the job's directory.
///
/// Every rank holds a lock on a file of its own for as long as it lives. The kernel gives it back
/// however the process ends, so a lock that can be had is a rank that is gone.
#[derive(Debug)]
pub(crate) struct Host {
    dir: PathBuf,
    rank: usize,
    own: File,
    /// By rank in the world.
    locks: Vec<File>,
}

impl Host {
    /// Waits until all ranks are there: rank 0 makes the directory and tells the others.
    pub(crate) fn meet(init: &GroupInit) -> Result<Self> {
        let limit = init.timeout.min(init.store.timeout());
        if init.rank == 0 {
            let dir = make_dir().map_err(|err| failed("a directory for the job", &err))?;
            init.store.set("files/dir", dir.as_os_str().as_bytes())?;
        }
        let dir = init.store.get_for("files/dir", limit)?;
        let dir = PathBuf::from(OsStr::from_bytes(&dir));
        let lock = |rank: usize| dir.join(format!("alive-{rank}"));
        let own = File::create(lock(init.rank)).map_err(|err| {
            let what = format!("{} (are all ranks on this host?)", dir.display());
            failed(&what, &err)
        })?;
        own.try_lock().map_err(|_| {
            let what = format!("rank {} has joined before", init.rank);
            Error::invalid(what)
        })?;
        let mut host = Self { dir: dir.clone(), rank: init.rank, own, locks: Vec::new() };
        init.store.barrier_for("files/met", init.world_size, limit)?;
        let locks = (0..init.world_size).map(|rank| File::open(lock(rank)));
        host.locks =
            locks.collect::<io::Result<_>>().map_err(|err| failed("the ranks' locks", &err))?;
        Ok(host)
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Whether a rank of the world has ended, in whatever way.
    pub(crate) fn is_gone(&self, rank: usize) -> bool {
        // Shared, so that two ranks that ask at the same time do not take each other for it.
        self.locks[rank].try_lock_shared().is_ok()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.own.unlock();
        // The last one out tidies up, also after those who could not.
        if (0..self.locks.len()).all(|rank| rank == self.rank || self.is_gone(rank)) {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

/// The error of something that the operating system refused.
pub(crate) fn failed(what: &str, err: &io::Error) -> Error {
    Error::new(ErrorKind::Backend, format!("{what}: {err}"))
}

fn make_dir() -> io::Result<PathBuf> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let nanos = since.map_or(0, |since| since.as_nanos());
    let name = format!("phalanx-files-{}-{nanos}", std::process::id());
    let dir = std::env::temp_dir().join(name);
    // For this user only: whoever can write here can write into the results.
    DirBuilder::new().mode(0o700).create(&dir)?;
    Ok(dir)
}
