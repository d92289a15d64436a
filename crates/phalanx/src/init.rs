//! From a process that a launcher started to a group of all of them.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use phalanx_pg::registry::{self, GroupInit};
use phalanx_pg::{
    Call, CallOptions, Checked, Error, ErrorKind, ProcessGroup, RawWork, Result,
    delegate_description,
};
use phalanx_store::rendezvous::{self, LauncherEnv, Rendezvous, RendezvousOptions};

use crate::backends::{check_features, default_backend, register_built_in, world_of};
use crate::recording::Recording;

/// Names the backend: `native`, a registered one, or pairs such as `cpu:native,cuda:nccl`.
const BACKEND_VAR: &str = "PHALANX_BACKEND";
/// `detail` compares every collective across ranks before it runs.
const DEBUG_VAR: &str = "PHALANX_DEBUG";
/// Where the flight recorder writes when a group breaks; unset records nothing.
const DUMP_VAR: &str = "PHALANX_DUMP_DIR";
/// `1`: the flight recorder also writes when the process gets SIGUSR1.
const SIGNAL_VAR: &str = "PHALANX_DUMP_ON_SIGUSR1";

/// What the launcher said about this process: rank, local rank, node rank, sizes, restart count.
///
/// Needs no group, so it can choose a device or a log file before [`init`].
pub fn env() -> Result<LauncherEnv> {
    Ok(LauncherEnv::from_env()?)
}

/// Meets the other ranks of the job and connects with them, as the environment says.
///
/// | variable | meaning |
/// |---|---|
/// | `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, or a launcher's own | who and where, see [`rendezvous`] |
/// | `PHALANX_BACKEND` | the backend, if not the default |
/// | `PHALANX_TIMEOUT` | how long meeting and operations may take |
/// | `PHALANX_TOKEN` | the job's secret |
/// | `PHALANX_DEBUG=detail` | compare every collective across ranks before it runs |
/// | `PHALANX_DUMP_DIR` | record operations, and write them there when the group breaks |
/// | `PHALANX_DUMP_ON_SIGUSR1=1` | and when the process gets that signal |
///
/// One world at a time: a second `init` before the first group has been dropped is an error.
pub fn init() -> Result<Arc<dyn ProcessGroup>> {
    Init::from_env()?.start()
}

/// As [`init`], with the backend of this name.
pub fn init_with(backend: &str) -> Result<Arc<dyn ProcessGroup>> {
    Init::from_env()?.backend(backend).start()
}

/// The choices behind [`init`], for programs that make some themselves.
///
/// ```
/// use std::time::Duration;
/// use phalanx::prelude::*;
///
/// let group = phalanx::Init::from_env()?.timeout(Duration::from_secs(60)).checked(true).start()?;
/// group.barrier()?;
/// group.shutdown()?;
/// # Ok::<(), phalanx::Error>(())
/// ```
#[derive(Debug, Clone)]
#[must_use = "nothing happens before start()"]
pub struct Init {
    backend: Option<String>,
    timeout: Option<Duration>,
    checked: bool,
    dump_dir: Option<PathBuf>,
    dump_on_signal: bool,
    options: RendezvousOptions,
}

impl Init {
    /// The environment's choices.
    pub fn from_env() -> Result<Self> {
        let text = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        let choice = |name: &str, off: &str, on: &str| match text(name).as_deref() {
            None => Ok(false),
            Some(value) if value == off => Ok(false),
            Some(value) if value == on => Ok(true),
            Some(other) => Err(Error::invalid(format!(
                "{name}={other:?} is neither {off:?} nor {on:?}"
            ))),
        };
        let checked = choice(DEBUG_VAR, "off", "detail")?;
        Ok(Self {
            backend: text(BACKEND_VAR),
            timeout: None,
            checked,
            dump_dir: text(DUMP_VAR).map(PathBuf::from),
            dump_on_signal: choice(SIGNAL_VAR, "0", "1")?,
            options: RendezvousOptions::from_env()?,
        })
    }

    /// Uses the backend of this name.
    pub fn backend(self, name: impl Into<String>) -> Self {
        Self {
            backend: Some(name.into()),
            ..self
        }
    }

    /// How long operations may take unless they say otherwise.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self {
            timeout: Some(timeout),
            ..self
        }
    }

    /// Whether every collective is compared across ranks before it runs.
    pub fn checked(self, checked: bool) -> Self {
        Self { checked, ..self }
    }

    /// Records operations, and writes them into `dir` when the group breaks or
    /// [`dump`](crate::dump) is called. `dir` is made if need be.
    pub fn dump_dir(self, dir: impl Into<PathBuf>) -> Self {
        Self {
            dump_dir: Some(dir.into()),
            ..self
        }
    }

    /// Whether the recording is also written when the process gets SIGUSR1, which shows what it
    /// hangs in. Needs a dump directory.
    ///
    /// Without it this crate does not touch the signal, which then ends the process.
    pub fn dump_on_signal(self, dump_on_signal: bool) -> Self {
        Self {
            dump_on_signal,
            ..self
        }
    }

    /// Meets and connects: returns when all ranks are there.
    pub fn start(self) -> Result<Arc<dyn ProcessGroup>> {
        let claim = Claim::new()?;
        register_built_in();
        let backend = match &self.backend {
            Some(name) => name.as_str(),
            None => default_backend()?,
        };
        check_features(backend)?;
        let recording = self.recording()?;
        let (mut group, meeting) = self.connect(backend)?;
        if self.checked {
            group = Checked::new(group)?;
        }
        if let Some(recording) = &recording {
            group = recording.of(group);
        }
        Ok(Arc::new(World {
            group,
            _recording: recording,
            meeting: Mutex::new(meeting),
            _claim: claim,
        }))
    }

    /// The group, with what it was made through.
    fn connect(&self, backend: &str) -> Result<(Arc<dyn ProcessGroup>, Option<Rendezvous>)> {
        let timeout = self.timeout;
        let timeout = timeout.unwrap_or_else(|| self.options.timeouts.group());
        if let Some(world) = world_of(backend, timeout) {
            return Ok((world?, None));
        }
        let meeting = rendezvous::join(LauncherEnv::from_env()?, &self.options)?;
        let mut init = GroupInit::new(
            Arc::clone(&meeting.store),
            meeting.rank(),
            meeting.world_size(),
        );
        init.timeout = timeout;
        init.token = self.options.token.clone();
        init.bind = meeting.local_ip();
        Ok((registry::create(backend, &init)?, Some(meeting)))
    }

    fn recording(&self) -> Result<Option<Recording>> {
        match &self.dump_dir {
            Some(dir) => Recording::start(dir.clone(), self.dump_on_signal).map(Some),
            None if self.dump_on_signal => Err(Error::invalid(format!(
                "a dump on SIGUSR1 needs a directory to write to; set {DUMP_VAR} or call \
                 Init::dump_dir"
            ))),
            None => Ok(None),
        }
    }
}

static ACTIVE: AtomicBool = AtomicBool::new(false);

/// The right to be this process's world.
#[derive(Debug)]
struct Claim;

impl Claim {
    fn new() -> Result<Self> {
        match ACTIVE.swap(true, Ordering::AcqRel) {
            false => Ok(Self),
            true => Err(Error::new(
                ErrorKind::Invalid,
                "init was called before; shut that group down and drop it first",
            )),
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        ACTIVE.store(false, Ordering::Release);
    }
}

/// The group of all ranks, with what it was made through.
///
/// The fields are dropped in this order: the group while the store is there, the claim last.
#[derive(Debug)]
struct World {
    group: Arc<dyn ProcessGroup>,
    _recording: Option<Recording>,
    /// The store that subgroups meet through; present until an orderly end, if there is one.
    meeting: Mutex<Option<Rendezvous>>,
    _claim: Claim,
}

impl ProcessGroup for World {
    delegate_description!(group);

    fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        self.group.submit(call, options)
    }

    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
        self.group.split(ranks, name)
    }

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
    }

    /// Also gives up the store: nobody loses it while others still need it.
    fn shutdown(&self) -> Result<()> {
        self.group.shutdown()?;
        match self.meeting.lock().take() {
            Some(meeting) => Ok(meeting.leave()?),
            None => Ok(()),
        }
    }

    fn sequence(&self) -> u64 {
        self.group.sequence()
    }

    fn p2p_sequence(&self) -> u64 {
        self.group.p2p_sequence()
    }
}
