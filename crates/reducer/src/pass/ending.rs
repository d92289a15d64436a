//! The end of a pass: what is missing, what nobody uses, what it all came to.

use super::*;

impl Running {
    pub(super) fn complete(&self) -> Result<Reduced> {
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

    pub(super) fn unfinished(&self, missing: Vec<Slot>, why: Why) -> Error {
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
    pub(super) fn has_gradients(&self) -> bool {
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
}

fn read_used(work: Work<Buffer>) -> Result<Arc<[bool]>> {
    let used = work.wait()?;
    Ok(used
        .as_slice::<i32>()?
        .iter()
        .map(|&count| count > 0)
        .collect())
}
