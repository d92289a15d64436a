//! A group whose operations a flight recorder writes down.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::call::{Call, CallOptions};
use crate::delegate_description;
use crate::error::{Error, ErrorKind, Result};
use crate::group::ProcessGroup;
use crate::recorder::{Issued, Recorder};
use crate::work::{FailureHook, RawWork};

/// A group whose operations a [`Recorder`] writes down.
///
/// One recorder may serve all groups of a process; groups split from this one are recorded by the
/// same. If the recorder has a dump directory, the first error that breaks a group is written
/// there when it happens; failures of device operations, which no host thread completes, when the
/// next call meets them or the group is dropped.
///
/// ```
/// use std::sync::Arc;
/// use phalanx_pg::{FakeGroup, ProcessGroupExt, Recorded, Recorder, RecorderOptions};
///
/// let recorder = Arc::new(Recorder::new(RecorderOptions::default()));
/// let group = Recorded::new(Arc::new(FakeGroup::new(0, 4)), &recorder);
/// group.barrier()?;
/// assert_eq!(recorder.trace().entries[0].profiling_name, "fake:barrier");
/// # Ok::<(), phalanx_pg::Error>(())
/// ```
///
/// # Threads
///
/// May be used from many threads and blocks none of them. Two threads that submit at the same
/// moment may be recorded under the same sequence number.
pub struct Recorded {
    inner: Arc<dyn ProcessGroup>,
    recorder: Arc<Recorder>,
    id: usize,
    ops: AtomicU64,
    /// Present if the recorder wants to hear of failures.
    on_failure: Option<FailureHook>,
}

impl Recorded {
    /// Records the operations of `group` from now on.
    pub fn new(group: Arc<dyn ProcessGroup>, recorder: &Arc<Recorder>) -> Arc<Self> {
        let id = recorder.add_group(&*group);
        let weak = Arc::downgrade(recorder);
        let on_failure = recorder.dumps_on_failure().then(|| {
            let hook: FailureHook = Arc::new(move |err: &Error| {
                if let Some(recorder) = weak.upgrade() {
                    recorder.failed(id, err);
                }
            });
            hook
        });
        Arc::new(Self {
            inner: group,
            recorder: Arc::clone(recorder),
            id,
            ops: AtomicU64::new(0),
            on_failure,
        })
    }

    /// The recorder, for dumps on demand.
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    fn number(&self, call: &Call) -> Issued {
        Issued {
            seq: self.inner.sequence(),
            p2p_seq: self.inner.p2p_sequence(),
            op_id: self.ops.fetch_add(1, Ordering::Relaxed) + 1,
            is_p2p: call.is_point_to_point(),
        }
    }
}

impl ProcessGroup for Recorded {
    delegate_description!(inner);

    fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        let timeout = options.timeout.unwrap_or_else(|| self.timeout());
        let issued = self.number(&call);
        let ticket = self
            .recorder
            .enter(self.id, &call, options, timeout, issued);
        let submitted = self.inner.submit(call, options);
        match &submitted {
            Ok(work) => {
                let status = work.status();
                self.recorder.submitted(ticket, status.clone());
                if let Some(hook) = &self.on_failure {
                    status.on_failure(Arc::clone(hook));
                }
            }
            Err(err) => {
                self.recorder.refused(ticket, err);
                self.recorder.failed(self.id, err);
            }
        }
        submitted
    }

    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
        let group = self.inner.split(ranks, name)?;
        Ok(group.map(|group| Self::new(group, &self.recorder) as _))
    }

    fn abort(&self, reason: &str) {
        let cause = Error::new(ErrorKind::Aborted, reason);
        // First: what the abort fails makes the dump, and it is to say why.
        self.recorder.broken(self.id, &cause);
        self.inner.abort(reason);
        self.recorder.failed(self.id, &cause);
    }

    fn shutdown(&self) -> Result<()> {
        self.inner
            .shutdown()
            .inspect_err(|err| self.recorder.failed(self.id, err))
    }

    fn sequence(&self) -> u64 {
        self.inner.sequence()
    }

    fn p2p_sequence(&self) -> u64 {
        self.inner.p2p_sequence()
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if self.on_failure.is_some() {
            self.recorder.look_for_failures(self.id);
        }
    }
}

impl fmt::Debug for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recorded({:?})", self.inner)
    }
}
