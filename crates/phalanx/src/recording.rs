//! The flight recorder of this process's world: what its last operations were.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use phalanx_pg::{
    Error, ErrorKind, ProcessGroup, Recorded, Recorder, RecorderOptions, Result, SignalDump,
    dump_on_sigusr1,
};

/// Where the world's recorder writes, and the recorder as long as there is one.
static WORLD: Mutex<Option<(Weak<Recorder>, PathBuf)>> = Mutex::new(None);

/// The flight recorder of this process's world, for a look at any time: `None` without a world, and
/// if it is not recorded.
///
/// What is recorded is chosen by `PHALANX_DUMP_DIR` or [`Init::dump_dir`](crate::Init::dump_dir).
///
/// ```
/// use phalanx::prelude::*;
///
/// let dir = std::env::temp_dir();
/// let group = phalanx::Init::from_env()?.dump_dir(dir).start()?;
/// group.barrier()?;
/// let recorder = phalanx::recorder().expect("the world is recorded");
/// assert_eq!(recorder.trace().entries.len(), 1);
/// group.shutdown()?;
/// # Ok::<(), phalanx::Error>(())
/// ```
pub fn recorder() -> Option<Arc<Recorder>> {
    let world = WORLD.lock();
    world.as_ref().and_then(|(recorder, _)| recorder.upgrade())
}

/// Writes the flight recording of this process's world into its dump directory, now, and says
/// where: `rank_N.json`.
pub fn dump() -> Result<PathBuf> {
    let world = WORLD.lock().clone();
    let recorded = world.and_then(|(recorder, dir)| Some((recorder.upgrade()?, dir)));
    let Some((recorder, dir)) = recorded else {
        return Err(Error::invalid(
            "no world of this process is recorded; set PHALANX_DUMP_DIR or call Init::dump_dir",
        ));
    };
    recorder.dump_in(&dir).map_err(|err| {
        let what = format!("writing the flight recording into {}: {err}", dir.display());
        Error::new(ErrorKind::Backend, what)
    })
}

/// A world's recording, until it is dropped.
#[derive(Debug)]
pub(crate) struct Recording {
    recorder: Arc<Recorder>,
    /// Listens, if asked to.
    _signal: Option<SignalDump>,
}

impl Recording {
    /// Records into `dir`, and writes there on SIGUSR1 too if `on_signal`.
    pub(crate) fn start(dir: PathBuf, on_signal: bool) -> Result<Self> {
        check_writable(&dir)?;
        let recorder = Arc::new(Recorder::new(RecorderOptions {
            dump_dir: Some(dir.clone()),
            ..RecorderOptions::default()
        }));
        let signal = on_signal.then(|| dump_on_sigusr1(&recorder, &dir));
        let signal = signal.transpose()?;
        *WORLD.lock() = Some((Arc::downgrade(&recorder), dir));
        Ok(Self {
            recorder,
            _signal: signal,
        })
    }

    pub(crate) fn of(&self, group: Arc<dyn ProcessGroup>) -> Arc<dyn ProcessGroup> {
        Recorded::new(group, &self.recorder)
    }
}

/// Found out before the ranks meet, and not when the recording is needed most.
fn check_writable(dir: &Path) -> Result<()> {
    let refused = |what: &str, err: std::io::Error| {
        let dir = dir.display();
        Error::invalid(format!("the dump directory {dir} cannot be {what}: {err}"))
    };
    std::fs::create_dir_all(dir).map_err(|err| refused("made", err))?;
    let probe = dir.join(format!(".phalanx-{}", std::process::id()));
    std::fs::write(&probe, b"").map_err(|err| refused("written to", err))?;
    // Whoever may write there may remove it; if not, an empty file stays.
    let _ = std::fs::remove_file(&probe);
    Ok(())
}
