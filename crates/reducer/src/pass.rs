//! One backward: gradients in, averages out.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use phalanx_pg::{
    Buffer, Device, Frozen, ProcessGroup, ProcessGroupExt, ReduceOp, Work, WorkStatus,
};

use crate::accumulate::Accumulator;
use crate::arrivals::Arrivals;
use crate::bucket::{Filling, Sources};
use crate::door::Door;
use crate::error::{Error, ParamName, Result, Unfinished, Why};
use crate::grad::GradView;
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
    pub(crate) spare: Vec<Option<Frozen>>,
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
    /// Takes a gradient: copies it, and starts the reduction of its bucket if it was the last one
    /// missing and all earlier buckets are on their way. Never waits for the network.
    ///
    /// An error is returned here and once more by [`Pass::finish`], for hooks that cannot fail.
    pub fn grad_ready(&self, slot: Slot, grad: GradView<'_>) -> Result<()> {
        let result = self.0.accept(slot, &grad);
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
            Mutex::new(Filling::new(bucket.slots.len(), spare.next().flatten()))
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

    fn accept(&self, slot: Slot, grad: &GradView<'_>) -> Result<()> {
        let Some(_inside) = self.door.enter() else {
            let param = ParamName::of(slot, &self.core.params);
            return Err(Error::invalid(format!(
                "the gradient of parameter {param} came after its pass had ended: backward ran \
                 twice for one forward, or hooks were kept from an earlier one"
            )));
        };
        grad.check(slot, &self.core.params)?;
        let param = &self.core.params[slot];
        if let GradView::Device(buffer) = grad
            && !self.goes_straight(slot)
        {
            // What has to be added up goes by way of the host: that would take a kernel.
            let mut host = Buffer::zeroed(param.dtype, param.len());
            self.group.copy(buffer, 0..buffer.len(), &mut host, 0)?;
            let (dtype, bytes) = (param.dtype, host.as_bytes()?);
            return self.take(slot, param, &GradView::Host { dtype, bytes });
        }
        self.take(slot, param, grad)
    }

    /// Whether a slot's gradient is all that goes into its place in the bucket.
    fn goes_straight(&self, slot: Slot) -> bool {
        self.goal == Goal::Reduce && self.partial.is_none() && !self.accumulated.has(slot)
    }

    fn take(&self, slot: Slot, param: &ParamSpec, grad: &GradView<'_>) -> Result<()> {
        match (self.goal, &self.partial) {
            (Goal::Accumulate, _) => self.accumulated.add(slot, param, grad),
            (Goal::Learn, Some(partial)) => {
                self.counts[slot].fetch_add(1, Ordering::AcqRel);
                self.note(slot);
                partial.add(slot, param, grad);
            }
            _ => return self.reduce(slot, param, grad),
        }
        Ok(())
    }

    fn reduce(&self, slot: Slot, param: &ParamSpec, grad: &GradView<'_>) -> Result<()> {
        let take = |left: u32| left.checked_sub(1);
        let left = self.counts[slot].fetch_update(Ordering::AcqRel, Ordering::Acquire, take);
        let Ok(left) = left else {
            return Err(self.one_too_many(slot));
        };
        let filled = self.unused_filled.load(Ordering::Acquire);
        if !filled && !self.unused_filled.swap(true, Ordering::AcqRel) {
            self.fill_unused()?;
        }
        match &self.partial {
            Some(partial) if left > 1 => {
                partial.add(slot, param, grad);
                Ok(())
            }
            _ => {
                self.note(slot);
                self.put(slot, Some(grad))
            }
        }
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
    fn put(&self, slot: Slot, grad: Option<&GradView<'_>>) -> Result<()> {
        let place = self.layout.places[slot];
        let bucket = &self.layout.buckets[place.bucket];
        let param = &self.core.params[slot];
        let sources = Sources {
            accumulated: &self.accumulated,
            partial: self.partial.as_ref(),
            factor: match bucket.device {
                Device::Cpu => self.factor,
                // Applied by the reduction.
                _ => 1.0,
            },
            stores: self.layout.stores,
        };
        let full = {
            let mut filling = self.buckets[place.bucket].lock();
            match bucket.sparse {
                true => filling.put_sparse(slot, param, grad, &sources),
                false => {
                    let memory = filling.memory(&*self.group, bucket)?;
                    self.fill(memory, place, slot, grad, &sources)?;
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

    /// What turns a bucket into the average. In host memory gradients are divided on their way in;
    /// in device memory by the reduction, since dividing there takes a kernel. Not an average,
    /// which NCCL computes in the same way: ranks without inputs do not know the divisor, and all
    /// have to call the same.
    pub(crate) fn operator(&self, device: Device) -> ReduceOp {
        match device {
            Device::Cpu => ReduceOp::Sum,
            _ => ReduceOp::PremulSum(self.factor),
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

    fn complete(&self) -> Result<Reduced> {
        let nobody_inside = self.door.close();
        *self.ended.lock() = Some(Instant::now());
        if let Some(err) = self.error.lock().clone() {
            return Err(err);
        }
        if !nobody_inside {
            let what = "the pass was finished while a gradient was being handed over on another \
                        thread: wait for backward to end first";
            return Err(Error::invalid(what));
        }
        if self.goal == Goal::Accumulate {
            return Ok(self.reduced(Vec::new(), None));
        }
        self.check_missing()?;
        let early = match &self.control {
            Some(control) => Some(read_used(self.share_used(&***control)?)?),
            None => None,
        };
        self.fill_in(early.as_deref())?;
        let finds = self.goal == Goal::Learn || self.core.config.finds_unused();
        // After the last bucket, on all ranks.
        let late = match finds && early.is_none() {
            true => Some(self.share_used(&*self.group)?),
            false => None,
        };
        let landed = self.launcher.lock().land()?;
        let used = match (early, late) {
            (Some(used), _) => Some(used),
            (None, Some(work)) => Some(read_used(work)?),
            (None, None) => self.learnt.as_ref().map(|learnt| Arc::clone(&learnt.used)),
        };
        Ok(self.reduced(landed, used))
    }

    fn reduced(&self, buckets: Vec<Landed>, used: Option<Arc<[bool]>>) -> Reduced {
        Reduced {
            target: self.target,
            layout: Arc::clone(&self.layout),
            buckets,
            used,
        }
    }

    /// Whether every gradient that must be there is there.
    fn check_missing(&self) -> Result<()> {
        if self.shadow || self.goal == Goal::Learn || self.core.config.finds_unused() {
            return Ok(());
        }
        let (expected, why) = match &self.learnt {
            Some(learnt) => (Some(&learnt.expected), Why::GraphChanged),
            None => (None, Why::UnusedNotAllowed),
        };
        let mut missing = self.not_arrived();
        missing.retain(|&slot| expected.is_none_or(|expected| expected[slot] > 0));
        // An accumulated gradient is a gradient, though not one of a static graph's.
        missing.retain(|&slot| expected.is_some() || !self.accumulated.has(slot));
        match missing.is_empty() {
            true => Ok(()),
            false => Err(self.unfinished(missing, why)),
        }
    }

    fn unfinished(&self, missing: Vec<Slot>, why: Why) -> Error {
        let name = |slot: Slot| ParamName::of(slot, &self.core.params);
        Error::Unfinished(Arc::new(Unfinished {
            rank: self.group.rank(),
            missing: missing.into_iter().map(name).collect(),
            why,
        }))
    }

    /// Fills in what has not come, and leaves out buckets that nobody uses.
    fn fill_in(&self, used: Option<&[bool]>) -> Result<()> {
        let prefilled = self.unused_filled.swap(true, Ordering::AcqRel);
        let is_there = |slot: Slot| match (&self.learnt, self.goal) {
            (_, Goal::Learn) => false,
            (Some(learnt), _) if prefilled && learnt.expected[slot] == 0 => true,
            _ => self.arrivals.has(slot),
        };
        for (index, bucket) in self.layout.buckets.iter().enumerate() {
            let unused = |slot: &Slot| used.is_some_and(|used| !used[*slot]);
            if bucket.slots.iter().all(unused) {
                self.launcher.lock().skip(index, &self.buckets, self)?;
                continue;
            }
            for &slot in &bucket.slots {
                if !is_there(slot) {
                    self.put(slot, None)?;
                }
            }
        }
        Ok(())
    }

    fn share_used(&self, group: &dyn ProcessGroup) -> Result<Work<Buffer>> {
        let used: Vec<i32> = self.locally_used().into_iter().map(i32::from).collect();
        Ok(group.allreduce(Buffer::from_vec(used), ReduceOp::Sum)?)
    }

    /// Which slots have a gradient here, from this pass or accumulated.
    pub(crate) fn locally_used(&self) -> Vec<bool> {
        let used = |slot| self.arrivals.has(slot) || self.accumulated.has(slot);
        (0..self.counts.len()).map(used).collect()
    }

    /// Whether any gradient has come.
    fn has_gradients(&self) -> bool {
        let part = |partial: &Accumulator| (0..self.counts.len()).any(|slot| partial.has(slot));
        self.arrivals.any() || self.partial.as_ref().is_some_and(part)
    }

    pub(crate) fn not_arrived(&self) -> Vec<Slot> {
        self.arrivals.missing()
    }

    /// How many gradients each slot had. A rank that only stood by takes it that those which others
    /// use have one.
    pub(crate) fn learnt_counts(&self, used: &[bool]) -> Arc<[u32]> {
        if self.shadow {
            return used.iter().map(|&used| used.into()).collect();
        }
        let counts = self
            .counts
            .iter()
            .map(|count| count.load(Ordering::Acquire));
        counts.collect()
    }

    /// What may still turn out to have failed.
    pub(crate) fn handed_over(&self) -> Vec<WorkStatus> {
        self.launcher.lock().handed_over()
    }

    /// Enters this pass's figures.
    pub(crate) fn describe(&self, stats: &mut ReducerStats) {
        let clock = self.clock.lock().clone();
        let ended = self.ended.lock().unwrap_or(clock.begun);
        let launcher = self.launcher.lock();
        let sizes = self.layout.sizes();
        let ready = self
            .buckets
            .iter()
            .map(|bucket| bucket.lock().ready.unwrap_or(ended));
        let ready: Vec<Instant> = ready.collect();
        stats.timeline = launcher.timeline(&clock, &sizes, &ready);
        stats.num_buckets_reduced = stats
            .timeline
            .iter()
            .filter(|b| b.done_ns.is_some())
            .count();
        let last_grad = ready
            .into_iter()
            .max()
            .map_or(ended, |last| last.min(ended));
        stats.last = clock.times(last_grad, &stats.timeline);
        stats.average = stats.average.with(stats.last, stats.iteration);
        let unused = self.not_arrived().into_iter();
        let bytes = unused.map(|slot| self.core.params[slot].byte_len());
        stats.unused_parameter_size = bytes.sum();
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

fn read_used(work: Work<Buffer>) -> Result<Arc<[bool]>> {
    let used = work.wait()?;
    Ok(used
        .as_slice::<i32>()?
        .iter()
        .map(|&count| count > 0)
        .collect())
}
