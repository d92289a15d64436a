//! What a rank knows about its own process and host.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::env::JobKey;
use crate::error::{Result, StoreError};

/// Which process holds a rank, as it writes itself into the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    host: String,
    pid: u32,
    /// When the process started, in the kernel's units; tells a pid from its later user.
    start: u64,
    /// Tells two ranks in one process apart.
    nonce: u64,
}

impl Identity {
    /// This process, as a new holder.
    pub(super) fn mine() -> Self {
        let pid = std::process::id();
        Self {
            host: host_name(),
            pid,
            start: Process::read(pid).map_or(0, |process| process.start),
            nonce: fastrand::u64(..),
        }
    }

    pub(super) fn to_wire(&self) -> String {
        let Self {
            host,
            pid,
            start,
            nonce,
        } = self;
        format!("{pid} {start} {nonce:x} {host}")
    }

    pub(super) fn from_wire(bytes: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(bytes).ok()?.splitn(4, ' ');
        Some(Self {
            pid: words.next()?.parse().ok()?,
            start: words.next()?.parse().ok()?,
            nonce: u64::from_str_radix(words.next()?, 16).ok()?,
            host: words.next()?.to_owned(),
        })
    }

    pub(super) fn is_same_process(&self, other: &Self) -> bool {
        (&self.host, self.pid, self.start) == (&other.host, other.pid, other.start)
    }

    /// Whether the process runs; `None` if it is on another host, where this cannot be seen.
    pub(super) fn is_running(&self) -> Option<bool> {
        let here = self.host == host_name();
        here.then(|| Process::read(self.pid).is_some_and(|process| process.start == self.start))
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid {} on host {}", self.pid, self.host)
    }
}

fn host_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

/// What the kernel tells about a process.
struct Process {
    parent: u32,
    start: u64,
}

impl Process {
    fn read(pid: u32) -> Option<Self> {
        Self::parse(&fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    /// The program's name stands in parentheses and may hold any byte, so fields count from its
    /// end.
    fn parse(stat: &[u8]) -> Option<Self> {
        let end = stat.iter().rposition(|&byte| byte == b')')?;
        let rest = std::str::from_utf8(&stat[end + 1..]).ok()?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        Some(Self {
            parent: fields.get(1)?.parse().ok()?,
            start: fields.get(19)?.parse().ok()?,
        })
    }
}

/// The nearest ancestor that does not have `variable`: the process that started the ranks, however
/// many shells lie between.
fn starter(variable: &str) -> Option<(u32, u64)> {
    const DEEPEST: usize = 256;
    let mut pid = Process::read(std::process::id())?.parent;
    for _ in 0..DEEPEST {
        let process = Process::read(pid)?;
        // What this user may not read was not started by this user's launcher.
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let is_rank = environment
            .split(|&byte| byte == 0)
            .filter_map(|entry| entry.strip_prefix(variable.as_bytes()))
            .any(|rest| rest.starts_with(b"="));
        if !is_rank {
            return Some((pid, process.start));
        }
        pid = process.parent;
    }
    None
}

/// The file in which the ranks of `job` meet, in a directory that only this user can enter.
pub(super) fn meeting_file(job: &JobKey) -> Result<PathBuf> {
    let key = match job {
        JobKey::Named(name) => name.clone(),
        JobKey::StartedBy { variable, name } => {
            let (pid, start) = starter(variable).ok_or_else(|| {
                StoreError::Invalid(format!(
                    "cannot tell which process started this job: no ancestor without {variable} \
                     is visible; set MASTER_ADDR and MASTER_PORT to meet over TCP instead"
                ))
            })?;
            let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
            format!("{name}-{pid}-{start}-{}", boot.trim())
        }
    };
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let dir = private_dir(runtime.as_deref(), &std::env::temp_dir())?;
    Ok(dir.join(file_name(&key)))
}

/// Readable as far as it goes, and different for different keys.
fn file_name(key: &str) -> String {
    const SHOWN: usize = 48;
    let safe = |c: char| match c {
        c if c.is_ascii_alphanumeric() || c == '-' => c,
        _ => '_',
    };
    let shown: String = key.chars().take(SHOWN).map(safe).collect();
    let digest = Sha256::digest(key.as_bytes());
    let digest: String = digest[..8].iter().map(|b| format!("{b:02x}")).collect();
    format!("{shown}-{digest}.store")
}

/// A directory that belongs to this user and is closed to others, made if need be.
///
/// `runtime` often names a directory of the host where the job was submitted, so it counts only if
/// it is here and this user's.
fn private_dir(runtime: Option<&Path>, temp: &Path) -> Result<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let usable = |dir: &&Path| {
        dir.is_absolute() && fs::metadata(dir).is_ok_and(|meta| meta.is_dir() && meta.uid() == uid)
    };
    let dir = match runtime.filter(usable) {
        Some(runtime) => runtime.join("phalanx"),
        None => temp.join(format!("phalanx-{uid}")),
    };
    match fs::DirBuilder::new().mode(0o700).create(&dir) {
        Err(err) if err.kind() != io::ErrorKind::AlreadyExists => {
            let what = format!("creating {} for the ranks to meet in", dir.display());
            return Err(StoreError::io(what, err));
        }
        _ => {}
    }
    // Not followed: a link could lead into a directory that others write.
    let meta = fs::symlink_metadata(&dir)
        .map_err(|err| StoreError::io(format!("looking at {}", dir.display()), err))?;
    let problem = if !meta.is_dir() {
        "is not a directory".to_owned()
    } else if meta.uid() != uid {
        format!("belongs to user {}, not to user {uid}", meta.uid())
    } else if meta.mode() & 0o077 != 0 {
        format!("is open to other users (mode {:o})", meta.mode() & 0o777)
    } else {
        return Ok(dir);
    };
    Err(StoreError::Invalid(format!(
        "{} {problem}, so the ranks will not meet in it; remove it or make it mode 700, or set \
         MASTER_ADDR and MASTER_PORT to meet over TCP",
        dir.display()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn an_identity_survives_the_wire_and_knows_whether_it_runs() {
        let me = Identity::mine();
        assert_eq!(
            Identity::from_wire(me.to_wire().as_bytes()),
            Some(me.clone())
        );
        assert_eq!(me.is_running(), Some(true));
        assert!(me.is_same_process(&Identity::mine()));
        assert_ne!(me, Identity::mine());
        let earlier = Identity {
            start: me.start.wrapping_sub(1),
            ..me.clone()
        };
        assert_eq!(earlier.is_running(), Some(false));
        let elsewhere = Identity {
            host: format!("not-{}", me.host),
            ..me
        };
        assert_eq!(elsewhere.is_running(), None);
        for junk in ["", "1", "1 2 3", "x 2 3 h", "1 2 zz h"] {
            assert_eq!(Identity::from_wire(junk.as_bytes()), None, "{junk}");
        }
    }

    #[test]
    fn a_program_name_does_not_shift_the_fields() {
        let rest = " S 42 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 987 0 0";
        for name in ["sh", "a b) S 1 (", "((", ")"] {
            let process = Process::parse(format!("7 ({name}){rest}").as_bytes()).unwrap();
            assert_eq!((process.parent, process.start), (42, 987), "{name}");
        }
        assert!(Process::parse(b"7 sh S 1").is_none());
        assert!(Process::parse(b"7 (sh) S 1").is_none());
    }

    #[test]
    fn the_starter_is_the_first_ancestor_without_the_variable() {
        let parent = Process::read(std::process::id()).unwrap().parent;
        assert_eq!(starter("PHALANX_NO_SUCH_VARIABLE").unwrap().0, parent);
        assert!(
            starter("PATH").is_none_or(|(pid, _)| pid != parent) || std::env::var("PATH").is_err()
        );
    }

    #[test]
    fn the_directory_is_private_or_refused() {
        let base = tempfile::tempdir().unwrap();
        let uid = rustix::process::geteuid().as_raw();
        let expected = base.path().join(format!("phalanx-{uid}"));
        assert_eq!(private_dir(None, base.path()).unwrap(), expected);
        assert_eq!(fs::metadata(&expected).unwrap().mode() & 0o777, 0o700);
        assert_eq!(private_dir(None, base.path()).unwrap(), expected);
        let gone = base.path().join("gone");
        assert_eq!(private_dir(Some(&gone), base.path()).unwrap(), expected);
        let runtime = private_dir(Some(base.path()), Path::new("/nonexistent")).unwrap();
        assert_eq!(runtime, base.path().join("phalanx"));

        fs::set_permissions(&expected, fs::Permissions::from_mode(0o755)).unwrap();
        let message = private_dir(None, base.path()).unwrap_err().to_string();
        assert!(message.contains("mode 755"), "{message}");
        fs::remove_dir(&expected).unwrap();
        symlink(base.path(), &expected).unwrap();
        let message = private_dir(None, base.path()).unwrap_err().to_string();
        assert!(message.contains("not a directory"), "{message}");
    }

    #[test]
    fn file_names_are_safe_and_distinct() {
        let name = file_name("prterun-node/1-77@1");
        assert!(name.starts_with("prterun-node_1-77_1-"), "{name}");
        assert_ne!(name, file_name("prterun-node_1-77@1"));
        assert!(file_name(&"x".repeat(10_000)).len() < 100);
    }
}
