//! The file itself: opening it safely, locking it, reading on and appending.

use std::fs::File;
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::log::Replica;
use crate::deadline::Deadline;
use crate::error::{Result, StoreError};

/// Bytes read at once, unless a single record is larger.
const CHUNK: usize = 256 << 10;
const FIRST_LOCK_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_LOCK_PAUSE: Duration = Duration::from_millis(5);

/// Which lock an operation needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lock {
    Shared,
    Exclusive,
}

/// The file behind a path.
#[derive(Debug)]
pub(super) struct Disk {
    path: PathBuf,
    /// Never read. While it is open no other file can get the same inode number, so a file that
    /// replaced ours is told from it.
    _pin: File,
    device: u64,
    inode: u64,
}

impl Disk {
    /// Opens the file, creating it for this user alone.
    pub(super) fn create(path: &Path) -> Result<Self> {
        // The process may change its directory.
        let path = std::path::absolute(path).map_err(|err| failed("finding", path, err))?;
        let pin = open(&path, OFlags::CREATE)?;
        let meta = inspect(&path, &pin)?;
        Ok(Self {
            path,
            _pin: pin,
            device: meta.dev(),
            inode: meta.ino(),
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the same file once more.
    ///
    /// Every operation does: a lock belongs to one opening, so this excludes threads of one
    /// process from each other too, and network file systems show other hosts' writes to whoever
    /// opens after them.
    pub(super) fn reopen(&self) -> Result<OpenFile<'_>> {
        let file = match open(&self.path, OFlags::empty()) {
            Err(err) if is_gone(&err) => return Err(gone(&self.path)),
            other => other?,
        };
        let meta = inspect(&self.path, &file)?;
        if (meta.dev(), meta.ino()) != (self.device, self.inode) {
            return Err(gone(&self.path));
        }
        Ok(OpenFile {
            file,
            path: &self.path,
        })
    }
}

/// One opening of the file.
#[derive(Debug)]
pub(super) struct OpenFile<'a> {
    file: File,
    path: &'a Path,
}

impl<'a> OpenFile<'a> {
    pub(super) fn size(&self) -> Result<u64> {
        inspect(self.path, &self.file).map(|meta| meta.len())
    }

    /// Waits for a lock. Trying again and again is what a bounded wait takes: `flock` has no
    /// time limit. The file may be removed in the meantime; nobody would see what is written then.
    pub(super) fn lock(
        self,
        kind: Lock,
        op: &'static str,
        deadline: &Deadline,
    ) -> Result<Locked<'a>> {
        let operation = match kind {
            Lock::Shared => FlockOperation::NonBlockingLockShared,
            Lock::Exclusive => FlockOperation::NonBlockingLockExclusive,
        };
        let mut pause = FIRST_LOCK_PAUSE;
        loop {
            match rustix::fs::flock(&self.file, operation) {
                Ok(()) => {
                    let removed = inspect(self.path, &self.file)?.nlink() == 0;
                    let locked = Locked { open: self };
                    return match removed {
                        true => Err(gone(locked.open.path)),
                        false => Ok(locked),
                    };
                }
                Err(Errno::WOULDBLOCK) if deadline.passed() => {
                    return Err(lock_timeout(op, self.path, deadline));
                }
                Err(Errno::WOULDBLOCK) => {
                    std::thread::sleep(pause.mul_f64(0.5 + fastrand::f64()).min(deadline.left()));
                    pause = (2 * pause).min(LONGEST_LOCK_PAUSE);
                }
                Err(Errno::INTR) => {}
                Err(err) => return Err(failed("locking", self.path, err.into())),
            }
        }
    }
}

/// The file with a lock on it.
#[derive(Debug)]
pub(super) struct Locked<'a> {
    open: OpenFile<'a>,
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // Closing is not enough: a process forked by another thread may hold the same opening for
        // the moment until it executes its program.
        if let Err(err) = rustix::fs::flock(&self.open.file, FlockOperation::Unlock) {
            tracing::warn!(path = %self.open.path.display(), %err, "could not unlock a store file");
        }
    }
}

impl Locked<'_> {
    /// Reads what was added since the last time. A torn record at the end is left alone.
    pub(super) fn catch_up(&self, replica: &mut Replica) -> Result<()> {
        let size = self.open.size()?;
        if size < replica.offset {
            let reason = format!(
                "it shrank to {size} bytes after {} had been read; was it emptied or rewritten?",
                replica.offset
            );
            return Err(refused(self.open.path, ErrorKind::InvalidData, reason));
        }
        let mut buf = Vec::new();
        let mut want = CHUNK;
        while replica.offset < size {
            let left = size - replica.offset;
            buf.resize(left.min(want as u64) as usize, 0);
            self.open
                .file
                .read_exact_at(&mut buf, replica.offset)
                .map_err(|err| failed("reading", self.open.path, err))?;
            let progress = replica.replay(&buf).map_err(|corrupt| {
                let reason = format!(
                    "{corrupt}, near byte {}; is it a store file?",
                    replica.offset
                );
                refused(self.open.path, ErrorKind::InvalidData, reason)
            })?;
            if progress.need as u64 > size - replica.offset {
                break;
            }
            want = progress.need.max(CHUNK);
        }
        Ok(())
    }

    /// Adds records to a log of which `replica` is up to date, in one write.
    pub(super) fn append(&self, replica: &mut Replica, records: &[u8]) -> Result<()> {
        let file = &self.open.file;
        let end = replica.offset;
        if self.open.size()? > end {
            tracing::warn!(
                path = %self.open.path.display(),
                at = end,
                "cutting off a record that its writer did not live to finish"
            );
            file.set_len(end)
                .map_err(|err| failed("repairing", self.open.path, err))?;
        }
        if let Err(err) = file.write_all_at(records, end) {
            // What cannot be taken back is a torn record like any other.
            let _ = file.set_len(end);
            return Err(failed("writing to", self.open.path, err));
        }
        let replayed = replica.replay(records);
        debug_assert_eq!(replayed.map(|progress| progress.taken), Ok(records.len()));
        Ok(())
    }

    /// Takes the file away while everyone else is kept out.
    pub(super) fn remove(&self) -> Result<()> {
        std::fs::remove_file(self.open.path).map_err(|err| failed("removing", self.open.path, err))
    }
}

fn open(path: &Path, extra: OFlags) -> Result<File> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NOCTTY | extra;
    match rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR) {
        Ok(fd) => Ok(File::from(fd)),
        Err(Errno::LOOP) => {
            let reason = "it is a symbolic link, and somebody else may have put it there";
            Err(refused(path, ErrorKind::PermissionDenied, reason))
        }
        Err(err) => Err(failed("opening", path, err.into())),
    }
}

/// Refuses what another user could have placed where a store file is expected.
fn inspect(path: &Path, file: &File) -> Result<std::fs::Metadata> {
    let meta = file
        .metadata()
        .map_err(|err| failed("inspecting", path, err))?;
    let own = rustix::process::geteuid().as_raw();
    if !meta.is_file() {
        let reason = "it is not a regular file";
        return Err(refused(path, ErrorKind::InvalidInput, reason));
    }
    if meta.uid() != own {
        let reason = format!(
            "it belongs to user {}, and this process runs as {own}",
            meta.uid()
        );
        return Err(refused(path, ErrorKind::PermissionDenied, reason));
    }
    if meta.nlink() > 1 {
        let reason = "it has a second name (a hard link)";
        return Err(refused(path, ErrorKind::PermissionDenied, reason));
    }
    Ok(meta)
}

pub(super) fn lock_timeout(op: &'static str, path: &Path, deadline: &Deadline) -> StoreError {
    StoreError::Timeout {
        op,
        what: format!("the lock on {}, which somebody else holds", path.display()),
        waited: deadline.elapsed(),
    }
}

/// Whether the file of a handle is no longer there.
pub(super) fn is_gone(err: &StoreError) -> bool {
    matches!(err, StoreError::Io { kind, .. } if *kind == ErrorKind::NotFound)
}

fn gone(path: &Path) -> StoreError {
    let reason = "it was removed or replaced while it was in use";
    refused(path, ErrorKind::NotFound, reason)
}

fn failed(doing: &str, path: &Path, err: Error) -> StoreError {
    StoreError::io(format!("{doing} the store file {}", path.display()), err)
}

fn refused(path: &Path, kind: ErrorKind, reason: impl Into<String>) -> StoreError {
    StoreError::io(
        format!("the store file {} cannot be used", path.display()),
        Error::new(kind, reason.into()),
    )
}
