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

/// Each recording is a generation; who waits, waits for the newest one at that moment, and later
/// recordings change nothing about it.
pub(crate) struct Event {
    timed: bool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    recorded: u64,
    reached: u64,
    at: Option<Instant>,
}

impl Event {
    pub(crate) fn new(flags: c_uint) -> Arc<Self> {
        Arc::new(Self {
            timed: flags & DISABLE_TIMING == 0,
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Marks the end of what is on the stream now.
    pub(crate) fn record(self: &Arc<Self>, stream: &Arc<Stream>) -> u64 {
        let generation = {
            let mut state = self.state.lock();
            state.recorded += 1;
            state.recorded
        };
        let event = Arc::clone(self);
        context::enqueue(stream, move || {
            event.reach(generation);
            Ok(())
        });
        generation
    }

    /// As [`record`](Event::record), for the joins that default streams make by themselves.
    pub(crate) fn record_plainly(self: &Arc<Self>, stream: &Stream) {
        self.state.lock().recorded = 1;
        let event = Arc::clone(self);
        stream.push(move || {
            event.reach(1);
            Ok(())
        });
    }

    fn reach(&self, generation: u64) {
        let mut state = self.state.lock();
        if generation > state.reached {
            state.reached = generation;
            state.at = Some(Instant::now());
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The newest recording; none if it has never been recorded.
    pub(crate) fn newest(&self) -> u64 {
        self.state.lock().recorded
    }

    pub(crate) fn wait(&self, generation: u64) {
        let mut state = self.state.lock();
        while state.reached < generation {
            self.changed.wait(&mut state);
        }
    }

    pub(crate) fn query(&self) -> Result<()> {
        let state = self.state.lock();
        match state.reached >= state.recorded {
            true => Ok(()),
            false => Err(NOT_READY),
        }
    }

    pub(crate) fn until(&self, end: &Event) -> Result<Duration> {
        if !self.timed || !end.timed {
            return Err(INVALID_HANDLE);
        }
        let (from, to) = (self.state.lock().at, end.state.lock().at);
        let (from, to) = from.zip(to).ok_or(NOT_READY)?;
        Ok(to.saturating_duration_since(from))
    }
}
