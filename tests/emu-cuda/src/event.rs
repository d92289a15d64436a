//! Events: how far a stream has come.

use std::ffi::c_uint;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::code::{INVALID_HANDLE, NOT_READY, Result};
use crate::context;
use crate::stream::Stream;

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: c_uint = 2;

/// Stands for its newest mark. Who waits, waits for the mark that is the newest at that moment;
/// later ones, also on other streams, change nothing about it.
pub(crate) struct Event {
    timed: bool,
    newest: Mutex<Arc<Mark>>,
}

/// One place on a stream.
#[derive(Default)]
pub(crate) struct Mark {
    reached: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Mark {
    /// Marks the end of what is on a stream now, without the joins that default streams make.
    pub(crate) fn put_on(stream: &Stream) -> Arc<Self> {
        let mark = Arc::new(Self::default());
        let placed = Arc::clone(&mark);
        stream.push(move || {
            placed.reach();
            Ok(())
        });
        mark
    }

    fn reach(&self) {
        *self.reached.lock() = Some(Instant::now());
        self.changed.notify_all();
    }

    pub(crate) fn wait(&self) {
        let mut reached = self.reached.lock();
        while reached.is_none() {
            self.changed.wait(&mut reached);
        }
    }
}

impl Event {
    /// One that was never recorded counts as reached.
    pub(crate) fn new(flags: c_uint) -> Arc<Self> {
        let mark = Mark::default();
        mark.reach();
        Arc::new(Self {
            timed: flags & DISABLE_TIMING == 0,
            newest: Mutex::new(Arc::new(mark)),
        })
    }

    /// Marks the end of what is on the stream now.
    pub(crate) fn record(&self, stream: &Arc<Stream>) {
        let mark = Arc::new(Mark::default());
        *self.newest.lock() = Arc::clone(&mark);
        context::enqueue(stream, move || {
            mark.reach();
            Ok(())
        });
    }

    pub(crate) fn newest(&self) -> Arc<Mark> {
        Arc::clone(&self.newest.lock())
    }

    pub(crate) fn query(&self) -> Result<()> {
        match self.newest().reached.lock().is_some() {
            true => Ok(()),
            false => Err(NOT_READY),
        }
    }

    pub(crate) fn until(&self, end: &Event) -> Result<Duration> {
        if !self.timed || !end.timed {
            return Err(INVALID_HANDLE);
        }
        let (from, to) = (*self.newest().reached.lock(), *end.newest().reached.lock());
        let (from, to) = from.zip(to).ok_or(NOT_READY)?;
        Ok(to.saturating_duration_since(from))
    }
}
