//! Operations in progress.

use std::fmt;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::buffer::Buffer;
use crate::error::{Error, Result};

/// What a finished call hands back.
#[derive(Debug, Default)]
pub struct Done {
    /// The memory that was written to, or for in-place calls worked on.
    pub buffer: Option<Buffer>,
    /// Who sent, for a receive.
    pub source: Option<usize>,
    /// The results of a batch, in its order.
    pub parts: Vec<Done>,
}

impl From<Buffer> for Done {
    #[inline]
    fn from(buffer: Buffer) -> Self {
        Self {
            buffer: Some(buffer),
            ..Self::default()
        }
    }
}

/// When things happened to an operation, as far as known.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Times {
    /// It was submitted.
    pub enqueued: Instant,
    /// The backend began to work on it.
    pub started: Option<Instant>,
    /// When each peer was seen to have reached it, where the backend can tell.
    pub arrivals: Vec<(usize, Instant)>,
    /// It ended, well or not.
    pub done: Option<Instant>,
}

/// How an operation stands.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum State {
    /// Waiting for its turn.
    Enqueued,
    /// In progress.
    Started,
    /// Finished well.
    Succeeded,
    /// Finished with this error.
    Failed(Error),
}

/// What a backend provides for an operation that is not a host completion: a device event.
///
/// Host backends use [`completion`] instead. `Send`: waited for by whoever holds the work, one
/// thread at a time.
pub trait Pending: Send {
    /// Whether the host may use the result now.
    fn is_done(&self) -> bool;
    /// Makes the buffer's stream wait for the operation and hands the result over, without
    /// blocking the host longer than that takes.
    fn order(&mut self) -> Result<Done>;
    /// Blocks the host until the operation is complete; `None` if the limit came first.
    fn block(&mut self, limit: Duration) -> Option<Result<Done>>;
    /// Has `waker` called once the operation is done; called with the newest one.
    fn wake_by(&mut self, waker: &Waker);
    /// A handle to watch it by.
    fn status(&self) -> WorkStatus;
}

/// A handle to watch an operation by, after its [`Work`](crate::Work) has been waited for or
/// dropped.
///
/// `Send` and `Sync`: any thread may look at any time. Keeps no memory of the operation's.
#[derive(Clone)]
pub struct WorkStatus(Watched);

#[derive(Clone)]
enum Watched {
    Ready(State, Times),
    Host(Arc<Cell>),
    Custom(Arc<dyn Status>),
}

/// What a [`Pending`] operation tells a watcher, on any thread.
pub trait Status: Send + Sync {
    /// How it stands.
    fn state(&self) -> State;
    /// When things happened to it.
    fn times(&self) -> Times;
}

impl WorkStatus {
    /// For backends with a [`Pending`] of their own.
    pub fn custom(status: Arc<dyn Status>) -> Self {
        Self(Watched::Custom(status))
    }

    /// How the operation stands.
    pub fn state(&self) -> State {
        match &self.0 {
            Watched::Ready(state, _) => state.clone(),
            Watched::Host(cell) => cell.lock.lock().state.clone(),
            Watched::Custom(status) => status.state(),
        }
    }

    /// When things happened to it.
    pub fn times(&self) -> Times {
        match &self.0 {
            Watched::Ready(_, times) => times.clone(),
            Watched::Host(cell) => cell.lock.lock().times.clone(),
            Watched::Custom(status) => status.times(),
        }
    }

    /// Has `hook` called if the operation fails, or now if it has. Operations of a custom
    /// [`Status`] that are still in progress do not tell.
    pub(crate) fn on_failure(&self, hook: FailureHook) {
        if let Watched::Host(cell) = &self.0 {
            let mut progress = cell.lock.lock();
            if progress.times.done.is_none() {
                progress.hooks.push(hook);
                return;
            }
        }
        if let State::Failed(err) = self.state() {
            hook(&err);
        }
    }
}

impl fmt::Debug for WorkStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WorkStatus({:?})", self.state())
    }
}

/// An operation as a backend hands it out; [`Work`](crate::Work) is the typed form for callers.
///
/// Dropping it detaches the operation: the backend keeps the memory until it is finished.
///
/// `Send`: a work may be waited for on another thread.
pub struct RawWork(Inner);

enum Inner {
    /// Ended well, faster than a look at the clock, and worked in place. It is moved several times
    /// in its short life; so all of them are one pointer, and a work is handed on in registers.
    Quick(Option<Buffer>),
    Ready(Box<Ready>),
    Host(Handle),
    Custom(Box<Box<dyn Pending>>),
}

/// An operation that ended inside `submit`.
struct Ready {
    result: Option<Result<Done>>,
    /// Stays when the result has been handed out.
    failed: Option<Error>,
    times: Times,
}

/// The waiting end of a [`Cell`]: once it is gone nobody can ask for the result.
struct Handle(Arc<Cell>);

impl Drop for Handle {
    fn drop(&mut self) {
        let unclaimed = {
            let mut progress = self.0.lock.lock();
            progress.detached = true;
            progress.result.take()
        };
        // Outside the lock: freeing a buffer runs its owner's code.
        drop(unclaimed);
    }
}

/// An operation that a host thread completes.
struct Cell {
    lock: Mutex<Progress>,
    changed: Condvar,
}

struct Progress {
    state: State,
    /// Present from the end of the operation until it is handed over.
    result: Option<Result<Done>>,
    /// Nobody will ask for the result. Watchers may outlive it by far and must not keep memory.
    detached: bool,
    times: Times,
    waker: Option<Waker>,
    hooks: Vec<FailureHook>,
}

/// Told once that an operation failed, in the thread that found out.
///
/// Not public: with it, a callback could issue a collective whose order depends on timing.
pub(crate) type FailureHook = Arc<dyn Fn(&Error) + Send + Sync>;

impl Times {
    /// Submitted now.
    pub fn now() -> Self {
        Self {
            enqueued: Instant::now(),
            started: None,
            arrivals: Vec::new(),
            done: None,
        }
    }
}

/// The backend's end of an operation in progress. Dropping it without a result fails it.
///
/// `Send` and `Sync`: any thread may complete the operation.
pub struct Completer(Option<Arc<Cell>>);

/// An operation that some thread will complete.
pub fn completion() -> (Completer, RawWork) {
    let progress = Progress {
        state: State::Enqueued,
        result: None,
        detached: false,
        times: Times::now(),
        waker: None,
        hooks: Vec::new(),
    };
    let cell = Arc::new(Cell {
        lock: Mutex::new(progress),
        changed: Condvar::new(),
    });
    (
        Completer(Some(Arc::clone(&cell))),
        RawWork(Inner::Host(Handle(cell))),
    )
}

impl Completer {
    /// The backend begins to work on it.
    pub fn start(&self) {
        if let Some(cell) = &self.0 {
            let mut progress = cell.lock.lock();
            progress.state = State::Started;
            progress.times.started = Some(Instant::now());
        }
    }

    /// A peer was seen to have reached the operation.
    pub fn arrived(&self, peer: usize) {
        if let Some(cell) = &self.0 {
            cell.lock.lock().times.arrivals.push((peer, Instant::now()));
        }
    }

    /// When it was submitted.
    pub fn enqueued(&self) -> Instant {
        let cell = self.0.as_ref().expect("present until completed");
        cell.lock.lock().times.enqueued
    }

    /// Ends the operation.
    pub fn complete(mut self, result: Result<Done>) {
        if let Some(cell) = self.0.take() {
            cell.complete(result);
        }
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        if let Some(cell) = self.0.take() {
            let lost = Error::new(
                crate::ErrorKind::Backend,
                "the backend dropped the operation",
            );
            cell.complete(Err(lost));
        }
    }
}

impl Cell {
    fn complete(&self, result: Result<Done>) {
        let failure = result.as_ref().err().cloned();
        let mut progress = self.lock.lock();
        progress.state = outcome(&result);
        progress.times.done = Some(Instant::now());
        let unclaimed = match progress.detached {
            true => Some(result),
            false => {
                progress.result = Some(result);
                None
            }
        };
        let waker = progress.waker.take();
        let hooks = std::mem::take(&mut progress.hooks);
        drop(progress);
        drop(unclaimed);
        self.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
        if let Some(failure) = failure {
            hooks.iter().for_each(|hook| hook(&failure));
        }
    }
}

fn outcome(result: &Result<Done>) -> State {
    match result {
        Ok(_) => State::Succeeded,
        Err(err) => State::Failed(err.clone()),
    }
}

impl RawWork {
    /// An operation that ended inside `submit`.
    pub fn ready(result: Result<Done>, times: Times) -> Self {
        let times = Times {
            done: Some(times.done.unwrap_or_else(Instant::now)),
            ..times
        };
        Self(Inner::Ready(Box::new(Ready {
            failed: result.as_ref().err().cloned(),
            result: Some(result),
            times,
        })))
    }

    /// As [`ready`](RawWork::ready), for an operation in place that took so little that its times
    /// are those of whoever asks for them.
    #[inline]
    pub fn quick(buffer: Buffer) -> Self {
        Self(Inner::Quick(Some(buffer)))
    }

    /// The result of a [`quick`](RawWork::quick) one that has not been handed out.
    #[inline]
    pub(crate) fn take_quick(&mut self) -> Option<Done> {
        match &mut self.0 {
            Inner::Quick(buffer) => buffer.take().map(Done::from),
            _ => None,
        }
    }

    /// An operation of a backend that is not completed by a host thread.
    pub fn custom(pending: Box<dyn Pending>) -> Self {
        Self(Inner::Custom(Box::new(pending)))
    }

    /// Whether the host may use the result now.
    pub fn is_done(&self) -> bool {
        match &self.0 {
            Inner::Quick(_) | Inner::Ready(_) => true,
            Inner::Host(Handle(cell)) => cell.lock.lock().times.done.is_some(),
            Inner::Custom(pending) => pending.is_done(),
        }
    }

    /// A handle to watch it by.
    pub fn status(&self) -> WorkStatus {
        WorkStatus(match &self.0 {
            Inner::Quick(_) => {
                let now = Times::now();
                let times = Times {
                    started: Some(now.enqueued),
                    done: Some(now.enqueued),
                    ..now
                };
                Watched::Ready(State::Succeeded, times)
            }
            Inner::Ready(ready) => {
                let state = ready.failed.clone().map_or(State::Succeeded, State::Failed);
                Watched::Ready(state, ready.times.clone())
            }
            Inner::Host(Handle(cell)) => Watched::Host(Arc::clone(cell)),
            Inner::Custom(pending) => return pending.status(),
        })
    }

    /// The result, usable on the buffer's own stream (on the host: finished).
    pub fn wait(mut self) -> Result<Done> {
        match &mut self.0 {
            Inner::Custom(pending) => pending.order(),
            _ => self.block(Duration::MAX).expect("a host operation ends"),
        }
    }

    /// The result once the host may use it; `None` if the limit came first.
    ///
    /// After a result has been handed out, further calls panic.
    pub fn block(&mut self, limit: Duration) -> Option<Result<Done>> {
        match &mut self.0 {
            Inner::Quick(buffer) => Some(Ok(buffer.take().expect("result taken twice").into())),
            Inner::Ready(ready) => Some(ready.result.take().expect("result taken twice")),
            Inner::Host(Handle(cell)) => cell.block(limit),
            Inner::Custom(pending) => pending.block(limit),
        }
    }

    /// Has `waker` called once the operation is done, unless it is. For wrappers with a
    /// [`Pending`] of their own.
    pub fn wake_by(&mut self, waker: &Waker) {
        match &mut self.0 {
            Inner::Quick(_) | Inner::Ready(_) => {}
            Inner::Host(Handle(cell)) => {
                let mut progress = cell.lock.lock();
                if progress.times.done.is_none() {
                    progress.waker = Some(waker.clone());
                }
            }
            Inner::Custom(pending) => pending.wake_by(waker),
        }
    }

    pub(crate) fn poll(&mut self, waker: &Waker) -> Poll<Result<Done>> {
        // First the waker, then the question: what ends in between wakes.
        self.wake_by(waker);
        if !self.is_done() {
            return Poll::Pending;
        }
        match self.block(Duration::ZERO) {
            Some(result) => Poll::Ready(result),
            None => Poll::Pending,
        }
    }
}

impl Cell {
    fn block(&self, limit: Duration) -> Option<Result<Done>> {
        let end = Instant::now().checked_add(limit);
        let mut progress = self.lock.lock();
        while progress.times.done.is_none() {
            let timed_out = match end {
                Some(end) => self.changed.wait_until(&mut progress, end).timed_out(),
                None => {
                    self.changed.wait(&mut progress);
                    false
                }
            };
            if timed_out && progress.times.done.is_none() {
                return None;
            }
        }
        Some(progress.result.take().expect("result taken twice"))
    }
}

impl fmt::Debug for RawWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RawWork({:?})", self.status().state())
    }
}

impl fmt::Debug for Completer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Completer")
    }
}
