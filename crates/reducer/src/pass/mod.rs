//! One backward: gradients in, averages out.

mod ending;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use phalanx_pg::{Buffer, Device, ProcessGroup, ProcessGroupExt, ReduceOp, Work, WorkStatus};

use crate::accumulate::Accumulator;
use crate::arrivals::Arrivals;
use crate::bucket::{Filling, Sources, Spare};
use crate::door::Door;
use crate::error::{Error, ParamName, Result, Unfinished, Why};
use crate::grad::{GradView, NewGrad};
use crate::lane::{Lane, OwnGroup};
use crate::launch::Launcher;
use crate::layout::{Layout, Place};
use crate::params::{ParamSpec, Slot};
use crate::reduced::{Landed, Reduced};
use crate::reducer::GradTarget;
use crate::state::{Core, Learnt, Phase};
use crate::stats::{Clock, ReducerStats};

/// One backward, from [`Reducer::begin`](crate::Reducer::begin) to [`finish`](Pass::finish).
///
/// Dropping it before any gradient came undoes it. Dropping it later leaves the reducer stuck, for
/// other ranks wait for buckets that will not come; unless it only accumulates: what came stays
/// part of the sum.
#[must_use = "a pass has to be finished, or other ranks wait"]
pub struct Pass {
    running: Arc<Running>,
    finished: bool,
}

/// Where gradients go in, during backward.
///
/// `Send`, `Sync` and cheap to clone: made to sit in a framework's hooks. Useless once its pass has
/// ended.
#[derive(Clone)]
pub struct Sink(Arc<Running>);

/// What a pass is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Goal {
    /// Sums are kept here.
    Accumulate,
    /// The first pass of a static graph: gradients are counted, and reduced at the end.
    Learn,
    /// Buckets are reduced as they fill.
    Reduce,
}

/// What a pass starts from.
pub(crate) struct Start {
    pub(crate) layout: Arc<Layout>,
    pub(crate) group: Arc<dyn ProcessGroup>,
    pub(crate) control: Option<Arc<OwnGroup>>,
    pub(crate) lane: Option<Arc<Lane>>,
    pub(crate) hooked: bool,
    pub(crate) learnt: Option<Learnt>,
    pub(crate) goal: Goal,
    pub(crate) target: GradTarget,
    /// What gradients are multiplied by on their way into a bucket.
    pub(crate) factor: f64,
    pub(crate) accumulated: Arc<Accumulator>,
    pub(crate) spare: Vec<Spare>,
    /// Takes the place of a rank that has no inputs left: no gradients, and none missing.
    pub(crate) shadow: bool,
}

/// A pass in progress, shared by its [`Pass`] and its [`Sink`]s.
///
/// Locks: the launcher's may be held while a bucket's is taken, never the other way round.
pub(crate) struct Running {
    core: Arc<Core>,
    layout: Arc<Layout>,
    group: Arc<dyn ProcessGroup>,
    control: Option<Arc<OwnGroup>>,
    learnt: Option<Learnt>,
    pub(crate) goal: Goal,
    target: GradTarget,
    factor: f64,
    shadow: bool,
    pub(crate) accumulated: Arc<Accumulator>,
    /// Gradients of this pass of slots that have several.
    partial: Option<Accumulator>,
    /// Gradients that are still to come, by slot; when learning, those that came.
    counts: Vec<AtomicU32>,
    pub(crate) arrivals: Arc<Arrivals>,
    /// Whether parameters known to be unused have been filled in.
    unused_filled: AtomicBool,
    buckets: Vec<Mutex<Filling>>,
    launcher: Mutex<Launcher>,
    /// The first error of a hook, where nobody may have looked at it.
    error: Mutex<Option<Error>>,
    door: Door,
    clock: Mutex<Clock>,
    ended: Mutex<Option<Instant>>,
}

impl Pass {
    pub(crate) fn new(running: Running) -> Self {
        Self {
            running: Arc::new(running),
            finished: false,
        }
    }

    /// A handle for the hooks of a framework.
    pub fn sink(&self) -> Sink {
        Sink(Arc::clone(&self.running))
    }

    /// Whether any gradient has come.
    pub fn has_gradients(&self) -> bool {
        self.running.has_gradients()
    }

    /// Takes the time at which forward ends and backward starts. Without it the first gradient
    /// counts as the start.
    pub fn backward_starts(&self) {
        self.running.clock.lock().backward = Some(Instant::now());
    }

    /// Ends the backward: waits for all buckets and hands out the averages.
    ///
    /// Parameters without a gradient are an error, unless the options say that there may be some.
    /// The first error of a [`Sink`] comes out here too. It is an error to call this while a
    /// gradient is still being handed over on another thread.
    pub fn finish(mut self) -> Result<Reduced> {
        self.finished = true;
        let running = &self.running;
        let result = running.complete();
        if result.is_err() {
            running.launcher.lock().give_up();
        }
        let mut state = running.core.state.lock();
        match &result {
            Ok(reduced) => state.finished(&running.core.config, running, reduced),
            // Nothing was sent and nothing is expected; what came before the error stays.
            Err(_) if running.goal == Goal::Accumulate => state.phase = Phase::Idle,
            Err(err) => state.fail(err.clone()),
        }
        result
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        let running = &self.running;
        let nobody_inside = running.door.close();
        let sent = running.launcher.lock().give_up();
        let mut state = running.core.state.lock();
        let counted_on = sent || running.has_gradients() || !nobody_inside;
        match counted_on && running.goal != Goal::Accumulate {
            true => state.fail(running.unfinished(running.not_arrived(), Why::Dropped)),
            false => state.phase = Phase::Idle,
        }
    }
}

impl fmt::Debug for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pass({:?})", self.running.goal)
    }
}

impl Sink {
    /// Takes a gradient, lent (a [`GradView`]) or given with its memory (a
    /// [`Buffer`]): puts it into its bucket, and starts the reduction of that if it was the last one
    /// missing and all earlier buckets are on their way. Never waits for the network.
    ///
    /// An error is returned here and once more by [`Pass::finish`], for hooks that cannot fail.
    pub fn grad_ready<'a>(&self, slot: Slot, grad: impl Into<NewGrad<'a>>) -> Result<()> {
        let result = self.0.accept(slot, grad.into());
        if let Err(err) = &result {
            self.0.error.lock().get_or_insert_with(|| err.clone());
        }
        result
    }
}

impl fmt::Debug for Sink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sink({:?})", self.0.goal)
    }
}

impl Running {
    pub(crate) fn new(core: Arc<Core>, start: Start) -> Self {
        let slots = core.params.len();
        let expected = start.learnt.as_ref().map(|learnt| &learnt.expected);
        let count = |slot: Slot| match (start.goal, expected) {
            (Goal::Reduce, None) => 1,
            (Goal::Reduce, Some(expected)) => expected[slot],
            _ => 0,
        };
        let counts: Vec<AtomicU32> = (0..slots).map(|slot| AtomicU32::new(count(slot))).collect();
        let several = (0..slots).any(|slot| count(slot) > 1) || start.goal == Goal::Learn;
        let mut spare = start.spare.into_iter();
        let fill = |bucket: &crate::layout::BucketLayout| {
            Mutex::new(Filling::new(bucket, spare.next().unwrap_or_default()))
        };
        let buckets = start.layout.buckets.iter().map(fill).collect();
        let launcher = Launcher::new(&start.layout, start.lane, start.hooked);
        Self {
            partial: several.then(|| Accumulator::new(slots)),
            counts,
            arrivals: Arc::new(Arrivals::new(slots)),
            unused_filled: AtomicBool::new(start.learnt.is_none()),
            buckets,
            launcher: Mutex::new(launcher),
            error: Mutex::default(),
            door: Door::default(),
            clock: Mutex::new(Clock {
                begun: Instant::now(),
                backward: None,
            }),
            ended: Mutex::default(),
            core,
            layout: start.layout,
            group: start.group,
            control: start.control,
            learnt: start.learnt,
            goal: start.goal,
            target: start.target,
            factor: start.factor,
            shadow: start.shadow,
            accumulated: start.accumulated,
        }
    }

    fn accept(&self, slot: Slot, grad: NewGrad<'_>) -> Result<()> {
        let Some(_inside) = self.door.enter() else {
            let param = ParamName::of(slot, &self.core.params);
            return Err(Error::invalid(format!(
                "the gradient of parameter {param} came after its pass had ended: backward ran \
                 twice for one forward, or hooks were kept from an earlier one"
            )));
        };
        grad.view().check(slot, &self.core.params)?;
        let param = &self.core.params[slot];
        let straight = self.goes_straight(slot);
        if let GradView::Device(buffer) = grad.view()
            && !straight
        {
            // What has to be added up goes by way of the host: that would take a kernel.
            let mut host = Buffer::zeroed(param.dtype, param.len());
            self.group.copy(buffer, 0..buffer.len(), &mut host, 0)?;
            let (dtype, bytes) = (param.dtype, host.as_bytes()?);
            return self.take(slot, param, GradView::Host { dtype, bytes }.into());
        }
        match grad {
            // To be copied.
            NewGrad::Given(buffer) if !straight || !self.layout.places[slot].alone => {
                self.take(slot, param, NewGrad::Given(buffer).view().into())
            }
            other => self.take(slot, param, other),
        }
    }

    /// Whether a slot's gradient is all that goes into its place in the bucket.
    fn goes_straight(&self, slot: Slot) -> bool {
        self.goal == Goal::Reduce && !self.has_several(slot) && !self.accumulated.has(slot)
    }

    /// Whether a slot has several gradients in a backward.
    fn has_several(&self, slot: Slot) -> bool {
        let several = |learnt: &Learnt| learnt.expected[slot] > 1;
        self.learnt.as_ref().is_some_and(several)
    }

    fn take(&self, slot: Slot, param: &ParamSpec, grad: NewGrad<'_>) -> Result<()> {
        match (self.goal, &self.partial) {
            (Goal::Accumulate, _) => self.accumulated.add(slot, param, &grad.view()),
            (Goal::Learn, Some(partial)) => {
                self.counts[slot].fetch_add(1, Ordering::AcqRel);
                self.note(slot);
                partial.add(slot, param, &grad.view());
            }
            _ => return self.reduce(slot, param, grad),
        }
        Ok(())
    }

    fn reduce(&self, slot: Slot, param: &ParamSpec, grad: NewGrad<'_>) -> Result<()> {
        let several = self.partial.as_ref().filter(|_| self.has_several(slot));
        if let Some(partial) = several {
            // Before it is counted: another thread may bring the last one.
            partial.add(slot, param, &grad.view());
        }
        let take = |left: u32| left.checked_sub(1);
        let left = self.counts[slot].fetch_update(Ordering::AcqRel, Ordering::Acquire, take);
        let Ok(left) = left else {
            return Err(self.one_too_many(slot));
        };
        let filled = self.unused_filled.load(Ordering::Acquire);
        if !filled && !self.unused_filled.swap(true, Ordering::AcqRel) {
            self.fill_unused()?;
        }
        if left > 1 {
            return Ok(());
        }
        self.note(slot);
        self.put(slot, several.is_none().then_some(grad))
    }

    fn note(&self, slot: Slot) {
        if self.arrivals.note(slot) {
            self.clock.lock().backward.get_or_insert_with(Instant::now);
        }
    }

    fn one_too_many(&self, slot: Slot) -> Error {
        let param = ParamName::of(slot, &self.core.params);
        let rank = self.group.rank();
        match &self.learnt {
            Some(learnt) => Error::GraphChanged {
                rank,
                param,
                expected: learnt.expected[slot],
            },
            None => Error::MarkedTwice { rank, param },
        }
    }

    /// Puts a slot's gradient into its bucket, or zeros for none, with what was accumulated; and
    /// launches what is complete.
    fn put(&self, slot: Slot, grad: Option<NewGrad<'_>>) -> Result<()> {
        let place = self.layout.places[slot];
        let bucket = &self.layout.buckets[place.bucket];
        let sources = Sources {
            accumulated: &self.accumulated,
            partial: self.partial.as_ref(),
            factor: match bucket.premultiplied {
                true => 1.0,
                false => self.factor,
            },
            stores: self.layout.stores,
        };
        let full = {
            let mut filling = self.buckets[place.bucket].lock();
            match grad {
                Some(NewGrad::Given(buffer)) => filling.put_given(place.piece, buffer),
                lent => {
                    let view = lent.as_ref().map(NewGrad::view);
                    self.copy_in(&mut filling, slot, view.as_ref(), &sources)?;
                }
            }
            filling.is_full_now()
        };
        if full {
            self.launcher
                .lock()
                .ready(place.bucket, &self.buckets, self)?;
        }
        Ok(())
    }

    fn copy_in(
        &self,
        filling: &mut Filling,
        slot: Slot,
        grad: Option<&GradView<'_>>,
        sources: &Sources<'_>,
    ) -> Result<()> {
        let place = self.layout.places[slot];
        let bucket = &self.layout.buckets[place.bucket];
        if bucket.sparse {
            filling.put_sparse(slot, &self.core.params[slot], grad, sources);
            return Ok(());
        }
        let memory = filling.memory(&*self.group, bucket, place.piece)?;
        self.fill(memory, place, slot, grad, sources)
    }

    /// Writes a slot's share of a bucket.
    fn fill(
        &self,
        memory: &mut Buffer,
        place: Place,
        slot: Slot,
        grad: Option<&GradView<'_>>,
        sources: &Sources<'_>,
    ) -> Result<()> {
        let param = &self.core.params[slot];
        match (memory.device(), grad) {
            (Device::Cpu, _) => {
                sources.fill(slot, param, grad, place.bytes_of(memory, param.dtype)?);
            }
            (_, Some(GradView::Device(buffer))) => {
                let all = 0..buffer.len();
                self.group.copy(buffer, all, memory, place.offset)?;
            }
            _ => {
                let mut host = Buffer::zeroed(param.dtype, param.len());
                sources.fill(slot, param, grad, host.as_bytes_mut()?);
                self.group
                    .copy(&host, 0..param.len(), memory, place.offset)?;
            }
        }
        Ok(())
    }

    /// What turns a bucket into the average. Gradients are divided on their way in, or by the
    /// reduction. Not an average, which NCCL computes in the same way: ranks without inputs do
    /// not know the divisor, and all have to call the same.
    pub(crate) fn operator(&self, bucket: usize) -> ReduceOp {
        match self.layout.buckets[bucket].premultiplied {
            true => ReduceOp::PremulSum(self.factor),
            false => ReduceOp::Sum,
        }
    }

    /// Parameters that a static graph does not use count as ready from the first gradient on.
    fn fill_unused(&self) -> Result<()> {
        let Some(learnt) = &self.learnt else {
            return Ok(());
        };
        let unused = (0..self.counts.len()).filter(|&slot| learnt.expected[slot] == 0);
        unused.into_iter().try_for_each(|slot| self.put(slot, None))
    }

    pub(crate) fn params(&self) -> &Arc<[ParamSpec]> {
        &self.core.params
    }

    pub(crate) fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    pub(crate) fn group(&self) -> &dyn ProcessGroup {
        &*self.group
    }
}
