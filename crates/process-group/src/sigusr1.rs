//! A flight recording when the operator asks for one.

use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::{Handle, Signals};

use crate::error::{Error, ErrorKind, Result};
use crate::recorder::Recorder;

/// Writes `rank_{rank}.json` into `dir` whenever the process gets SIGUSR1, until the answer is
/// dropped. `kill -USR1` then shows what a process hangs in.
///
/// Never installed unasked. Other handlers of the signal in this process go on working; after the
/// drop, SIGUSR1 is ignored by this crate and does not end the process.
pub fn dump_on_sigusr1(recorder: &Arc<Recorder>, dir: impl Into<PathBuf>) -> Result<SignalDump> {
    let failed = |err: std::io::Error| {
        Error::new(
            ErrorKind::Backend,
            format!("listening for SIGUSR1 failed: {err}"),
        )
    };
    let mut signals = Signals::new([SIGUSR1]).map_err(failed)?;
    let handle = signals.handle();
    let (recorder, dir) = (Arc::downgrade(recorder), dir.into());
    let thread = std::thread::Builder::new()
        .name("phalanx-sigusr1".into())
        .spawn(move || {
            for _ in signals.forever() {
                dump(&recorder, &dir);
            }
        })
        .map_err(failed)?;
    Ok(SignalDump {
        handle,
        thread: Some(thread),
    })
}

fn dump(recorder: &Weak<Recorder>, dir: &std::path::Path) {
    let Some(recorder) = recorder.upgrade() else {
        return;
    };
    match recorder.dump_in(dir) {
        Ok(path) => tracing::info!("flight recording on SIGUSR1: {}", path.display()),
        Err(err) => tracing::warn!("flight recording in {}: {err}", dir.display()),
    }
}

/// Listens for SIGUSR1 until it is dropped; see [`dump_on_sigusr1`].
///
/// `Send` and `Sync`; its own thread does the work.
#[derive(Debug)]
#[must_use = "dropping it stops listening"]
pub struct SignalDump {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Drop for SignalDump {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
