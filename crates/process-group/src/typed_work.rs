//! Operations in progress, as callers see them.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::error::Result;
use crate::work::{Done, RawWork, WorkStatus};

/// An operation in progress whose result is a `T`.
///
/// [`wait`](Work::wait) it, poll it, `await` it, or drop it: dropping detaches the operation, the
/// backend keeps the memory until it is finished, and an error stays in the group's state. On
/// error buffers are not handed back, for a peer may still write to them.
///
/// `Send`: a work may be waited for on another thread.
#[must_use = "dropping a Work detaches it; its result is lost and its error shows later"]
pub struct Work<T> {
    raw: RawWork,
    finish: Option<Finish<T>>,
}

enum Finish<T> {
    Plain(fn(Done) -> Result<T>),
    Boxed(Box<dyn FnOnce(Done) -> Result<T> + Send>),
}

impl<T> Finish<T> {
    fn apply(self, done: Done) -> Result<T> {
        match self {
            Self::Plain(finish) => finish(done),
            Self::Boxed(finish) => finish(done),
        }
    }
}

impl<T> Work<T> {
    /// A typed view of `raw`; `finish` picks the result out of what comes back.
    pub fn new(raw: RawWork, finish: fn(Done) -> Result<T>) -> Self {
        Self {
            raw,
            finish: Some(Finish::Plain(finish)),
        }
    }

    /// As [`new`](Work::new), with a closure.
    pub fn with(raw: RawWork, finish: impl FnOnce(Done) -> Result<T> + Send + 'static) -> Self {
        Self {
            raw,
            finish: Some(Finish::Boxed(Box::new(finish))),
        }
    }

    /// The result, usable on the buffer's own stream. For host memory the operation is finished.
    #[inline]
    pub fn wait(mut self) -> Result<T> {
        let finish = self.finish.take().expect("present until handed over");
        // Apart, so that what is quick is not slowed down by room for what is not.
        if let Some(done) = self.raw.take_quick() {
            return finish.apply(done);
        }
        finish.apply(self.raw.wait()?)
    }

    /// The result, complete for the host too.
    pub fn synchronize(mut self) -> Result<T> {
        let result = self
            .raw
            .block(Duration::MAX)
            .expect("an unlimited wait has a result");
        let finish = self.finish.take().expect("present until handed over");
        finish.apply(result?)
    }

    /// The result if it is there within `limit`. Running out of time fails nothing: call again,
    /// or [`wait`](Work::wait).
    ///
    /// # Panics
    ///
    /// If a result has been handed out before.
    pub fn wait_for(&mut self, limit: Duration) -> Result<Option<T>> {
        assert!(self.finish.is_some(), "the result has been handed out");
        let Some(result) = self.raw.block(limit) else {
            return Ok(None);
        };
        let finish = self.finish.take().expect("asserted above");
        finish.apply(result?).map(Some)
    }

    /// Whether the host may use the result now.
    pub fn is_done(&self) -> bool {
        self.raw.is_done()
    }

    /// A handle to watch it by.
    pub fn status(&self) -> WorkStatus {
        self.raw.status()
    }
}

impl<T: 'static> Work<T> {
    /// Changes the result when it is handed over.
    ///
    /// `f` runs in the thread that waits and gets no group, so it cannot issue a collective whose
    /// order would depend on who waits first.
    pub fn map<U: 'static>(mut self, f: impl FnOnce(T) -> U + Send + 'static) -> Work<U> {
        let finish = self.finish.take().expect("present until handed over");
        Work::with(self.raw, move |done| finish.apply(done).map(f))
    }
}

// Pinning means nothing to it: no part of a Work refers to another.
impl<T> Unpin for Work<T> {}

impl<T> Future for Work<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        let Poll::Ready(result) = self.raw.poll(context.waker()) else {
            return Poll::Pending;
        };
        let finish = self.finish.take().expect("polled after completion");
        Poll::Ready(result.and_then(|done| finish.apply(done)))
    }
}

impl<T> fmt::Debug for Work<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Work({:?})", self.status().state())
    }
}
