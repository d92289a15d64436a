//! Streams: a thread each, jobs in order.

use std::collections::VecDeque;
use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::code::{Code, NOT_READY, Result};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;

type Job = Box<dyn FnOnce() -> Result<()> + Send>;

pub(crate) struct Stream {
    pub(crate) device: usize,
    pub(crate) priority: c_int,
    /// Whether it joins with the legacy default stream.
    pub(crate) joins_legacy: bool,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Waiting or running.
    open: usize,
    destroyed: bool,
    /// The first failure stays.
    failed: Option<Code>,
}

impl Stream {
    pub(crate) fn start(device: usize, flags: c_uint, priority: c_int) -> Arc<Self> {
        let stream = Arc::new(Self {
            device,
            priority,
            joins_legacy: flags & NON_BLOCKING == 0,
            queue: Mutex::default(),
            changed: Condvar::new(),
        });
        let worker = Arc::clone(&stream);
        std::thread::Builder::new()
            .name(format!("emu-stream-{device}"))
            .spawn(move || worker.work())
            .expect("a thread for a stream");
        stream
    }

    /// Jobs that were enqueued before the stream was destroyed still run.
    fn work(&self) {
        loop {
            let job = {
                let mut queue = self.queue.lock();
                loop {
                    if let Some(job) = queue.jobs.pop_front() {
                        break job;
                    }
                    if queue.destroyed {
                        return;
                    }
                    self.changed.wait(&mut queue);
                }
            };
            let result = job();
            let mut queue = self.queue.lock();
            queue.open -= 1;
            queue.failed = queue.failed.or(result.err());
            drop(queue);
            self.changed.notify_all();
        }
    }

    pub(crate) fn push(&self, job: impl FnOnce() -> Result<()> + Send + 'static) {
        let mut queue = self.queue.lock();
        queue.jobs.push_back(Box::new(job));
        queue.open += 1;
        drop(queue);
        self.changed.notify_all();
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        let mut queue = self.queue.lock();
        while queue.open > 0 {
            self.changed.wait(&mut queue);
        }
        queue.failed.map_or(Ok(()), Err)
    }

    pub(crate) fn query(&self) -> Result<()> {
        let queue = self.queue.lock();
        match queue.open {
            0 => queue.failed.map_or(Ok(()), Err),
            _ => Err(NOT_READY),
        }
    }

    pub(crate) fn destroy(&self) {
        self.queue.lock().destroyed = true;
        self.changed.notify_all();
    }
}
