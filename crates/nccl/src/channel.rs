//! A communicator with its stream and the operations on it.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use phalanx_pg::{Call, Error, ErrorKind, Result};

use crate::comm::{Comm, Patience};
use crate::driver::{Device, Event, Stream};
use crate::op::Op;
use crate::step::Step;

/// How long an abort waits for a call that is in progress before it goes ahead.
const POLITENESS: Duration = Duration::from_millis(500);

/// How long memory is kept for a device that does not let go of it, before it is given up.
const DRAIN: Duration = Duration::from_secs(10);

/// Whom a communicator connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Line {
    /// All ranks.
    All,
    /// This rank as rank 0, and the one that it sends to as rank 1.
    To(usize),
    /// The rank that this one receives from as rank 0, and this one as rank 1.
    From(usize),
}

impl Line {
    /// The other end of messages.
    pub(crate) fn peer(self) -> Option<usize> {
        match self {
            Self::All => None,
            Self::To(peer) | Self::From(peer) => Some(peer),
        }
    }
}

/// One communicator: of all ranks, or for messages in one direction. Each has a stream of its own,
/// so that what waits for a peer holds up nothing else, not even an answer to it.
///
/// The communicator is made in a thread of its own when it is first needed; operations queue up
/// meanwhile. From then on callers issue operations themselves.
#[derive(Debug)]
pub(crate) struct Channel {
    pub(crate) line: Line,
    device: Arc<Device>,
    stream: Stream,
    comm: OnceLock<Comm>,
    inner: Mutex<Inner>,
    /// What a thread is about to put on the stream, for when it does not come back.
    issuing: Mutex<Option<Arc<Op>>>,
}

#[derive(Debug)]
struct Inner {
    /// Until the communicator is there.
    queue: VecDeque<Job>,
    /// On the stream, with the part that each is.
    flying: VecDeque<(Arc<Op>, usize)>,
    /// A thread makes the communicator.
    connecting: bool,
    /// When the last operation ended: the next one's time begins then.
    last_end: Instant,
    /// Memory of failed operations.
    buried: Vec<Call>,
}

/// One part of an operation, ready to be put on the stream.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) op: Arc<Op>,
    pub(crate) part: usize,
    /// What the stream has to wait for.
    pub(crate) ready: Arc<Vec<Event>>,
    pub(crate) steps: Vec<Step>,
}

/// What a look at a channel came to.
#[derive(Debug)]
pub(crate) enum Finding {
    /// An operation has not ended in time.
    Late(Arc<Op>),
    /// The library or the device reports a failure.
    Failed(Error),
}

impl Channel {
    pub(crate) fn new(line: Line, device: &Arc<Device>, high_priority: bool) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            line,
            device: Arc::clone(device),
            stream: Stream::new(device, high_priority)?,
            comm: OnceLock::new(),
            inner: Mutex::new(Inner {
                queue: VecDeque::new(),
                flying: VecDeque::new(),
                connecting: false,
                last_end: Instant::now(),
                buried: Vec::new(),
            }),
            issuing: Mutex::new(None),
        }))
    }

    /// Puts a job on the stream, or into the queue if there is no communicator yet. Whether one
    /// has to be made.
    pub(crate) fn push(&self, job: Job, patience: Patience<'_>) -> Result<bool> {
        let mut inner = self.inner.lock();
        match self.comm.get() {
            Some(comm) if inner.queue.is_empty() => {
                self.issue(comm, &mut inner, job, patience)?;
                Ok(false)
            }
            _ => {
                inner.queue.push_back(job);
                Ok(!std::mem::replace(&mut inner.connecting, true))
            }
        }
    }

    /// Claims to make the communicator although nothing is queued.
    pub(crate) fn claim(&self) -> bool {
        !std::mem::replace(&mut self.inner.lock().connecting, true)
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.comm.get().is_some()
    }

    /// The communicator is there: puts on the stream what has queued up.
    pub(crate) fn connected(&self, comm: Comm, patience: Patience<'_>) -> Result<()> {
        let mut inner = self.inner.lock();
        let comm = self.comm.get_or_init(|| comm);
        while let Some(job) = inner.queue.pop_front() {
            self.issue(comm, &mut inner, job, patience)?;
        }
        Ok(())
    }

    fn issue(
        &self,
        comm: &Comm,
        inner: &mut MutexGuard<'_, Inner>,
        job: Job,
        patience: Patience<'_>,
    ) -> Result<()> {
        *self.issuing.lock() = Some(Arc::clone(&job.op));
        let begun = self.begin(comm, &job, patience);
        *self.issuing.lock() = None;
        match begun {
            Ok(end) => {
                job.op.issued(job.part, end);
                inner.flying.push_back((job.op, job.part));
                Ok(())
            }
            Err(err) => {
                inner.buried.extend(job.op.fail(err.clone()));
                Err(err)
            }
        }
    }

    fn begin(&self, comm: &Comm, job: &Job, patience: Patience<'_>) -> Result<Event> {
        patience()?;
        self.device.bind()?;
        let stream = self.stream.raw();
        job.ready.iter().try_for_each(|event| event.hold(stream))?;
        comm.start(&job.steps, stream, patience)?;
        self.device.mark(stream)
    }

    /// Lets operations end that have, and finds what went wrong. The number of those left.
    pub(crate) fn look(&self) -> (usize, Option<Finding>) {
        let Some(mut inner) = self.inner.try_lock() else {
            let stuck = self.issuing.lock().clone();
            let late = stuck.filter(|op| op.enqueued.elapsed() > op.timeout);
            return (1, late.map(Finding::Late));
        };
        let mut over = Vec::new();
        while let Some((op, part)) = inner.flying.front() {
            match op.is_over(*part) {
                Ok(false) => break,
                Ok(true) => {
                    over.extend(inner.flying.pop_front());
                    inner.last_end = Instant::now();
                }
                Err(err) => return (1, Some(Finding::Failed(err))),
            }
        }
        let left = inner.flying.len() + inner.queue.len();
        let finding = inner.finding(self.comm.get());
        drop(inner);
        // Freeing memory runs others' code.
        over.iter().for_each(|(op, _)| op.release());
        (left, finding)
    }

    /// Number of operations that have not ended.
    pub(crate) fn outstanding(&self) -> usize {
        let inner = self.inner.lock();
        inner.flying.len() + inner.queue.len()
    }

    /// The first operation that has not ended.
    pub(crate) fn first(&self) -> Option<Arc<Op>> {
        self.inner.try_lock()?.first().cloned()
    }

    /// Fails everything and aborts the communicator. Never waits for a call that does not come
    /// back: the abort ends it.
    pub(crate) fn abort(&self, error: &dyn Fn(&Op) -> Error) {
        let polite = self.inner.try_lock_for(POLITENESS);
        let comm = self.comm.get();
        match polite {
            Some(mut inner) => {
                inner.fail_all(error);
                comm.map(Comm::abort);
            }
            None => {
                comm.map(Comm::abort);
                if let Some(mut inner) = self.inner.try_lock_for(DRAIN) {
                    inner.fail_all(error);
                }
            }
        }
    }

    /// Waits until the device has let go of failed operations' memory, and frees it. What it does
    /// not let go of is never freed.
    pub(crate) fn bury(&self) {
        let Some(mut inner) = self.inner.try_lock_for(POLITENESS) else {
            return;
        };
        let memory = std::mem::take(&mut inner.buried);
        drop(inner);
        if memory.is_empty() {
            return;
        }
        let end = self
            .device
            .bind()
            .and_then(|()| self.device.mark(self.stream.raw()));
        let deadline = Instant::now() + DRAIN;
        let drained = end.is_ok_and(|end| {
            while Instant::now() < deadline {
                match end.is_reached() {
                    Ok(false) => std::thread::sleep(Duration::from_millis(1)),
                    reached => return reached.is_ok(),
                }
            }
            false
        });
        match drained {
            true => drop(memory),
            false => {
                tracing::warn!(
                    "memory of {} failed operations is not freed: the device may still use it",
                    memory.len()
                );
                std::mem::forget(memory);
            }
        }
    }

    /// Begins an orderly end of the communicator, if there is one.
    pub(crate) fn begin_end(&self) -> Result<()> {
        let _calls = self.inner.lock();
        self.comm.get().map_or(Ok(()), Comm::begin_end)
    }

    /// Ends it, together with the other ranks.
    pub(crate) fn end(&self, patience: Patience<'_>) -> Result<()> {
        let _calls = self.inner.lock();
        self.comm.get().map_or(Ok(()), |comm| comm.end(patience))
    }
}

impl Inner {
    fn finding(&self, comm: Option<&Comm>) -> Option<Finding> {
        let op = self.first()?;
        if !self.flying.is_empty()
            && let Some(err) = comm.and_then(Comm::broken)
        {
            return Some(Finding::Failed(err));
        }
        let begun = op.enqueued.max(self.last_end);
        let late = begun.elapsed() > op.timeout;
        late.then(|| Finding::Late(Arc::clone(op)))
    }

    fn first(&self) -> Option<&Arc<Op>> {
        let flying = self.flying.front().map(|(op, _)| op);
        flying.or(self.queue.front().map(|job| &job.op))
    }

    fn fail_all(&mut self, error: &dyn Fn(&Op) -> Error) {
        let queued = self.queue.drain(..).map(|job| job.op);
        let all: Vec<Arc<Op>> = self
            .flying
            .drain(..)
            .map(|(op, _)| op)
            .chain(queued)
            .collect();
        self.buried
            .extend(all.iter().filter_map(|op| op.fail(error(op))));
    }
}

/// What an operation ends with at its timeout.
pub(crate) fn late(op: &Op, line: Line) -> Error {
    let limit = op.timeout.as_secs_f64();
    let peer = line.peer();
    let what = match line {
        Line::To(peer) => format!("rank {peer} did not receive within {limit:.1} s"),
        Line::From(peer) => format!("rank {peer} did not send within {limit:.1} s"),
        Line::All => format!("not finished within {limit:.1} s; does every rank call it?"),
    };
    let err = Error::new(ErrorKind::Timeout, what);
    match peer {
        Some(peer) => err.from_peer(peer),
        None => err,
    }
}
