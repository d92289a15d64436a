//! A group that misbehaves on purpose, for tests.

use std::fmt;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use phalanx_store::Deadline;

use crate::call::{Call, CallKind, CallOptions};
use crate::delegate_description;
use crate::error::{Error, ErrorKind, Place, Result};
use crate::ext::refused;
use crate::group::ProcessGroup;
use crate::work::{Completer, RawWork, completion};

/// What happens to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The caller is held up before the call is submitted: a slow rank.
    DelaySubmit(Duration),
    /// The call is submitted at once and its work completes this much later: a slow network.
    DelayCompletion(Duration),
    /// The call is lost: peers wait for it in vain, and here it fails at its timeout, which breaks
    /// the group. Later collectives of this rank wait behind it and share its fate.
    Drop,
    /// The call fails with this kind of error. Kinds that break a group do so.
    Fail(ErrorKind),
    /// This rank aborts the group instead of submitting the call.
    Abort,
}

/// Which calls of a [`Faulty`] group suffer what. The same plan does the same each time.
///
/// ```
/// use std::time::Duration;
/// use phalanx_pg::{CallKind, ErrorKind, Fault, FaultPlan};
///
/// let plan = FaultPlan::new()
///     .jitter(42, Duration::from_millis(2)) // every completion is late by up to 2 ms
///     .at(10, Fault::DelaySubmit(Duration::from_millis(50)))
///     .at_kind(CallKind::AllReduce, 3, Fault::Fail(ErrorKind::PeerLost));
/// ```
///
/// Plain data: `Send` and `Sync`.
#[derive(Debug, Clone, Default)]
pub struct FaultPlan {
    rules: Vec<Rule>,
    jitter: Option<(u64, Duration)>,
}

#[derive(Debug, Clone)]
struct Rule {
    kind: Option<CallKind>,
    index: u64,
    fault: Fault,
}

impl FaultPlan {
    /// No faults.
    pub fn new() -> Self {
        Self::default()
    }

    /// The call with this index, counted from zero over all calls of the group.
    #[must_use]
    pub fn at(self, index: u64, fault: Fault) -> Self {
        self.with(None, index, fault)
    }

    /// The call with this index among those of its kind.
    #[must_use]
    pub fn at_kind(self, kind: CallKind, index: u64, fault: Fault) -> Self {
        self.with(Some(kind), index, fault)
    }

    fn with(mut self, kind: Option<CallKind>, index: u64, fault: Fault) -> Self {
        self.rules.push(Rule { kind, index, fault });
        self
    }

    /// Every completion without another fault is late by a pseudo-random time up to `most`.
    #[must_use]
    pub fn jitter(mut self, seed: u64, most: Duration) -> Self {
        self.jitter = Some((seed, most));
        self
    }

    /// The first rule that fits goes before the others.
    fn fault(&self, kind: CallKind, index: u64, of_kind: u64) -> Option<Fault> {
        let fits = |rule: &&Rule| match rule.kind {
            None => rule.index == index,
            Some(wanted) => wanted == kind && rule.index == of_kind,
        };
        let planned = self.rules.iter().find(fits).map(|rule| rule.fault);
        planned.or_else(|| {
            let (seed, most) = self.jitter?;
            let share = scramble(seed ^ scramble(index)) as f64 / u64::MAX as f64;
            Some(Fault::DelayCompletion(most.mul_f64(share)))
        })
    }
}

/// SplitMix64's finalizer: every bit of the input changes half of the output's.
fn scramble(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A group whose calls suffer the faults of a [`FaultPlan`], for tests of what is built on groups.
///
/// Each rank has a plan of its own. Groups split from this one are free of faults. Delays of
/// completions and lost calls take a thread each.
///
/// # Threads
///
/// May be used from many threads; a plan is deterministic only if they submit in a known order.
pub struct Faulty {
    inner: Arc<dyn ProcessGroup>,
    plan: FaultPlan,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    progress: Mutex<Progress>,
    broken: Condvar,
}

#[derive(Default)]
struct Progress {
    calls: u64,
    calls_of_kind: [u64; CallKind::ALL.len()],
    /// Collectives that the inner group never saw.
    lost: u64,
    /// Point-to-point operations that it never saw.
    lost_p2p: u64,
    /// A fault that broke the group.
    cause: Option<Error>,
    /// Shut down, after which nothing breaks it.
    closed: bool,
}

impl State {
    /// The first cause stays.
    fn fail(&self, cause: Error) {
        let mut progress = self.progress.lock();
        if !progress.closed {
            progress.cause.get_or_insert(cause);
        }
        drop(progress);
        self.broken.notify_all();
    }

    /// What breaks the group before the deadline.
    fn broken_before(&self, deadline: Deadline) -> Option<Error> {
        let mut progress = self.progress.lock();
        while progress.cause.is_none() {
            let end = deadline.instant();
            if self.broken.wait_until(&mut progress, end).timed_out() {
                break;
            }
        }
        progress.cause.clone()
    }
}

impl Faulty {
    /// `group` with the faults of `plan`.
    pub fn new(group: Arc<dyn ProcessGroup>, plan: FaultPlan) -> Arc<Self> {
        Arc::new(Self {
            inner: group,
            plan,
            state: Arc::default(),
        })
    }

    /// Counts a call and looks up its fault.
    fn next_fault(&self, call: &Call) -> Result<Option<Fault>> {
        let mut progress = self.state.progress.lock();
        if let Some(cause) = &progress.cause {
            return Err(Error::broken_by(cause));
        }
        let of_kind = &mut progress.calls_of_kind[call.kind() as usize];
        let kind_index = *of_kind;
        *of_kind += 1;
        let index = progress.calls;
        progress.calls += 1;
        let collective = !call.is_point_to_point();
        let fault = match progress.lost > 0 && collective {
            true => Some(Fault::Drop),
            false => self.plan.fault(call.kind(), index, kind_index),
        };
        match (fault, collective) {
            (Some(Fault::Drop), true) => progress.lost += 1,
            (Some(Fault::Drop), false) => progress.lost_p2p += 1,
            _ => {}
        }
        Ok(fault)
    }

    fn fail(&self, kind: ErrorKind, place: Place) -> Result<RawWork> {
        let err = Error::new(kind, "injected fault").at(place);
        if !err.leaves_group_usable() {
            self.state.fail(err.clone());
            self.inner.abort(&err.to_string());
        }
        Err(err)
    }

    fn lose(&self, call: Call, options: &CallOptions, place: Place) -> Result<RawWork> {
        let deadline = Deadline::after(options.timeout.unwrap_or_else(|| self.timeout()));
        let (state, inner) = (Arc::clone(&self.state), Arc::downgrade(&self.inner));
        later(move |completer| {
            let err = match state.broken_before(deadline) {
                Some(cause) => Error::broken_by(&cause),
                None => Error::new(ErrorKind::Timeout, "injected fault: the call is lost"),
            };
            let err = err.at(Place {
                elapsed: Some(deadline.elapsed()),
                ..place
            });
            state.fail(err.clone());
            if let Some(inner) = Weak::upgrade(&inner) {
                inner.abort(&err.to_string());
            }
            // The operation owned the memory as long as it was in progress.
            drop(call);
            completer.complete(Err(err));
        })
    }
}

/// A work that another thread completes.
fn later(run: impl FnOnce(Completer) + Send + 'static) -> Result<RawWork> {
    let (completer, work) = completion();
    completer.start();
    let named = thread::Builder::new().name("phalanx-faulty".into());
    match named.spawn(move || run(completer)) {
        Ok(_) => Ok(work),
        Err(err) => Err(Error::new(
            ErrorKind::Backend,
            format!("starting a thread: {err}"),
        )),
    }
}

impl ProcessGroup for Faulty {
    delegate_description!(inner);

    fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        let place = refused(self, &call);
        let fault = self
            .next_fault(&call)
            .map_err(|err| err.at(place.clone()))?;
        match fault {
            None => self.inner.submit(call, options),
            Some(Fault::DelaySubmit(delay)) => {
                thread::sleep(delay);
                self.inner.submit(call, options)
            }
            Some(Fault::DelayCompletion(delay)) => {
                let work = self.inner.submit(call, options)?;
                later(move |completer| {
                    let result = work.wait();
                    thread::sleep(delay);
                    completer.complete(result);
                })
            }
            Some(Fault::Drop) => self.lose(call, options, place),
            Some(Fault::Fail(kind)) => self.fail(kind, place),
            Some(Fault::Abort) => {
                self.abort("injected fault: this rank aborts");
                self.fail(ErrorKind::Aborted, place)
            }
        }
    }

    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
        self.inner.split(ranks, name)
    }

    fn abort(&self, reason: &str) {
        self.state.fail(Error::new(ErrorKind::Aborted, reason));
        self.inner.abort(reason);
    }

    fn shutdown(&self) -> Result<()> {
        if let Some(cause) = &self.state.progress.lock().cause {
            return Err(Error::broken_by(cause));
        }
        self.inner.shutdown()?;
        self.state.progress.lock().closed = true;
        Ok(())
    }

    fn sequence(&self) -> u64 {
        self.inner.sequence() + self.state.progress.lock().lost
    }

    fn p2p_sequence(&self) -> u64 {
        self.inner.p2p_sequence() + self.state.progress.lock().lost_p2p
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        // Lets the threads of lost calls go.
        self.state.progress.lock().closed = false;
        let dropped = Error::new(ErrorKind::Aborted, "the group was dropped");
        self.state.fail(dropped);
    }
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Faulty({:?})", self.inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_depends_on_the_seed_and_the_index_alone() {
        let most = Duration::from_secs(1);
        let delays = |seed: u64| -> Vec<Duration> {
            let plan = FaultPlan::new().jitter(seed, most);
            let delay = |index| match plan.fault(CallKind::Barrier, index, 0) {
                Some(Fault::DelayCompletion(delay)) => delay,
                other => panic!("{other:?}"),
            };
            (0..100).map(delay).collect()
        };
        assert_eq!(delays(1), delays(1));
        assert_ne!(delays(1), delays(2));
        let sorted = {
            let mut delays = delays(1);
            delays.sort();
            delays
        };
        assert!(sorted[0] < most / 5 && sorted[99] > most / 5 * 4 && sorted[99] <= most);
    }

    #[test]
    fn explicit_faults_go_before_jitter() {
        let plan = FaultPlan::new().jitter(1, Duration::from_secs(1)).at_kind(
            CallKind::Send,
            2,
            Fault::Drop,
        );
        assert_eq!(plan.fault(CallKind::Send, 9, 2), Some(Fault::Drop));
        assert_ne!(plan.fault(CallKind::Recv, 9, 2), Some(Fault::Drop));
    }
}
