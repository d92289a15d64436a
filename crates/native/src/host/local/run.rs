//! Running operations: meeting, agreeing, finding inputs.

use super::*;

impl Local {
    /// Once all are done, copies a result out of shared memory.
    pub(super) fn bring_back(
        &self,
        current: &Current<'_>,
        done: &mut Done,
        mut original: Buffer,
    ) -> Result<()> {
        for rank in self.peers() {
            let end = current.op.wrapping_add(1);
            self.await_counter(current, rank, Counter::Done, end)?;
        }
        if let Some(shared) = done.buffer.take() {
            let bytes = original.as_bytes_mut()?;
            bytes.copy_from_slice(shared.as_bytes()?);
            self.keep(current, Some(shared.freeze()));
        }
        done.buffer = Some(original);
        Ok(())
    }

    /// Runs one call after the other, as `run` does each. `prepare` may replace memory before the
    /// call is announced, and says what to give back instead.
    pub(crate) fn run_each(
        &self,
        call: Call,
        turn: &Turn,
        mut prepare: impl FnMut(Call) -> Result<(Call, Option<Buffer>)>,
        mut run: impl FnMut(&Current<'_>, Call) -> Result<Done>,
    ) -> Result<Done> {
        let (first_op, posted, ran) = {
            let mut books = self.books.lock();
            let posted = self.numbers.posted();
            let entry = books.entry(turn.seq);
            (entry.first_op, posted, entry.ran)
        };
        let call = match call {
            Call::AllReduce { buf, .. } if ran => return Ok(buf.into()),
            other => other,
        };
        let ensure_posted = |current: &Current<'_>, calls: &[Call], batch: usize| match reached(
            posted,
            current.op.wrapping_add(1),
        ) {
            true => Ok(()),
            false => self.ensure_posted(current, calls, batch),
        };
        // Also after a mismatch: it is the same for all ranks, and they go on.
        let publish = |op: u32, err: Option<&Error>| {
            if err.is_none_or(Error::leaves_group_usable) {
                self.publish(Counter::Done, op.wrapping_add(1));
            }
        };
        let mut run_one = |op: u32, call: Call, batch: usize| {
            let kind = call.kind();
            let current = Current { op, kind, turn };
            let (call, original) = prepare(call)?;
            ensure_posted(&current, std::slice::from_ref(&call), batch)?;
            let mut done = run(&current, call);
            if let (Some(original), Ok(shared)) = (original, &mut done) {
                self.publish(Counter::Done, op.wrapping_add(1));
                self.bring_back(&current, shared, original)?;
            }
            publish(op, done.as_ref().err());
            done
        };
        let run_joined = |op: u32, calls: Vec<Call>, batch: usize| {
            let kind = CallKind::AllReduce;
            let current = Current { op, kind, turn };
            ensure_posted(&current, &calls, batch)?;
            let done = self.reduce_joined(&current, calls);
            publish(op, done.as_ref().err());
            done
        };
        let done = match call {
            Call::Batch(calls) => {
                let lens: Vec<usize> = self.operations(&calls).map(<[Call]>::len).collect();
                let ops = (0..).map(|i| first_op.wrapping_add(i));
                let batch = calls.len();
                let mut calls = calls.into_iter();
                let mut failed = None;
                // All of them, also after a mismatch: the numbers are taken.
                let mut parts = Vec::with_capacity(batch);
                for (len, op) in lens.into_iter().zip(ops) {
                    let mut next = calls.by_ref().take(len);
                    let part = match (len, next.next()) {
                        (1, Some(call)) => run_one(op, call, batch).map(|done| parts.push(done)),
                        (_, first) => {
                            let joined = first.into_iter().chain(next).collect();
                            run_joined(op, joined, batch).map(|all| parts.extend(all))
                        }
                    };
                    let over = part.as_ref().is_err_and(|err| !err.leaves_group_usable());
                    failed = failed.or(part.err());
                    if over {
                        break;
                    }
                }
                let done = Done {
                    parts,
                    ..Done::default()
                };
                failed.map_or(Ok(done), Err)
            }
            single => run_one(first_op, single, 1),
        };
        if done.as_ref().is_err_and(Error::leaves_group_usable) {
            // Peers for whom nothing is wrong may still read what this rank shares.
            self.settle(turn)?;
        }
        done
    }

    pub(super) fn ensure_posted(
        &self,
        current: &Current<'_>,
        calls: &[Call],
        batch: usize,
    ) -> Result<()> {
        let op = current.op;
        {
            let mut books = self.books.lock();
            if self.numbers.posted() != op {
                return Ok(());
            }
            self.check_unbroken()?;
            if self.slot_is_free(op) {
                self.post(&mut books, calls, current.turn.seq, op, batch);
                return Ok(());
            }
        }
        let needed = op.wrapping_sub(DEPTH as u32 - 1);
        for rank in self.peers() {
            self.await_counter(current, rank, Counter::Done, needed)?;
        }
        self.check_unbroken()?;
        let mut books = self.books.lock();
        self.numbers.set_all_done(needed);
        self.post(&mut books, calls, current.turn.seq, op, batch);
        Ok(())
    }

    /// Nothing is announced to a group that is broken, see `may_post`.
    fn check_unbroken(&self) -> Result<()> {
        match self.is_broken() {
            true => Err(self.cause()),
            false => Ok(()),
        }
    }

    /// Waits until everybody has announced the operation.
    pub(crate) fn await_all(&self, current: &Current<'_>) -> Result<()> {
        let announced = current.op.wrapping_add(1);
        for rank in self.peers() {
            let slot = self.control.slot(rank, current.op);
            self.await_peer(current, rank, "reach", || {
                slot.load(Ordering::Acquire) == announced
            })?;
        }
        Ok(())
    }

    /// Waits for that; what they said about it, by rank.
    pub(crate) fn meet(&self, current: &Current<'_>) -> Result<PerRank<Descriptor>> {
        self.await_all(current)?;
        let all: PerRank<_> = (0..self.ranks())
            .map(|rank| self.control.descriptor(rank, current.op))
            .collect();
        match all.iter().position(|other| !other.agrees_with(&all[0])) {
            None => Ok(all),
            Some(odd) => Err(self.mismatch(&all, odd)),
        }
    }

    /// Finds everybody's input, the own one being `buf`, where all are with their descriptors, or all
    /// in memory that is known here; says which. All have announced the operation; if they have
    /// called different things, there is nothing to find.
    ///
    /// `own` is what this rank has told: as its buffer, it is slow to be read back while it is still
    /// on its way to the memory.
    pub(crate) fn find_sources(
        &self,
        op: u32,
        own: &Descriptor,
        buf: &Buffer,
        sources: &mut PerRank<Source>,
    ) -> Option<Place> {
        let bytes = buf.byte_len();
        sources.clear();
        let place = own.place()?;
        if !matches!(place, Place::Inline | Place::Shared) {
            return None;
        }
        for rank in 0..self.ranks() {
            if rank == self.me() {
                let (ptr, factor) = (buf.as_ptr().as_ptr(), own.factor);
                let far = false;
                sources.push(Source { ptr, factor, far });
                continue;
            }
            let descriptor = self.control.descriptor(rank, op);
            if !descriptor.agrees_with(own) || descriptor.place() != Some(place) {
                return None;
            }
            let ptr = match place == Place::Inline {
                true => self.control.inline(rank, op, bytes),
                false => {
                    let world = self.seat.world[rank];
                    let segment = self.seat.maps.get(world, descriptor.segment)?;
                    segment.range(descriptor.offset as usize, bytes)?
                }
            };
            let (factor, far) = (descriptor.factor, true);
            sources.push(Source { ptr, factor, far });
        }
        Some(place)
    }

    /// Every rank sees the same descriptors and comes to the same error.
    pub(super) fn mismatch(&self, all: &[Descriptor], odd: usize) -> Error {
        let (first, second) = (self.seat.ranks[0], self.seat.ranks[odd]);
        let what = format!(
            "ranks call different things: rank {first} {}, rank {second} {}",
            all[0], all[odd]
        );
        // With batches, which may be different numbers of operations, or peers elsewhere, the numbers
        // are not the same any more.
        let single = all.iter().all(|descriptor| descriptor.batch == 1);
        let recoverable = single && self.ranks() == self.seat.size;
        let kind = match recoverable {
            true => ErrorKind::Mismatch,
            false => ErrorKind::Backend,
        };
        let other = if odd == self.me() { first } else { second };
        Error::new(kind, what).from_peer(other)
    }

    /// Where everybody's input of `bytes` is.
    pub(crate) fn inputs(
        &self,
        current: &Current<'_>,
        all: &[Descriptor],
        bytes: impl Fn(&Descriptor) -> usize,
    ) -> Result<PerRank<Input>> {
        let find = |(rank, descriptor): (usize, &Descriptor)| {
            let bytes = bytes(descriptor);
            match descriptor.place() {
                Some(Place::Nowhere) => Ok(Input::Nowhere),
                Some(Place::Inline) => {
                    let at = self.inline_input(rank, current.op, current.kind, bytes);
                    Ok(Input::At(at))
                }
                Some(Place::Shared) => self.shared_input(current, rank, descriptor, bytes),
                Some(Place::Staged) => Ok(Input::Staged),
                None => Err(self.nonsense(rank)),
            }
        };
        all.iter().enumerate().map(find).collect()
    }

    /// Waits for the memory of ranks that have announced where in it their input is; whether it is
    /// all known here. That of a rank that is gone may never be.
    pub(crate) fn knows_memory(&self, current: &Current<'_>, all: &[Descriptor]) -> Result<bool> {
        let mut known = true;
        for rank in self.peers() {
            let (world, segment) = (self.seat.world[rank], all[rank].segment);
            let here = || self.seat.maps.get(world, segment).is_some();
            let met = || here() || self.is_gone(rank);
            self.await_peer(current, rank, "share its memory for", met)?;
            known &= here();
        }
        Ok(known)
    }

    pub(super) fn shared_input(
        &self,
        current: &Current<'_>,
        rank: usize,
        descriptor: &Descriptor,
        bytes: usize,
    ) -> Result<Input> {
        let (world, segment) = (self.seat.world[rank], descriptor.segment);
        // It was sent before the descriptor, but on another way.
        let here = || self.seat.maps.get(world, segment).is_some();
        self.await_peer(current, rank, "share its memory for", here)?;
        let segment = self.seat.maps.get(world, segment);
        let ptr = segment.and_then(|segment| segment.range(descriptor.offset as usize, bytes));
        ptr.map(|ptr| Input::At(ptr.cast_const()))
            .ok_or_else(|| self.nonsense(rank))
    }

    pub(super) fn nonsense(&self, rank: usize) -> Error {
        let rank = self.seat.ranks[rank];
        let what = format!("rank {rank} describes memory that is not there");
        Error::new(ErrorKind::Backend, what).from_peer(rank)
    }

    /// Keeps an input until every peer's part is done, for peers read it directly.
    pub(crate) fn keep(&self, current: &Current<'_>, input: Option<Frozen>) {
        let mut books = self.books.lock();
        let entry = books.entry(current.turn.seq);
        entry.shared = true;
        entry.kept.extend(input);
    }

    /// Keeps the memory of a reduction until every peer's part is done, or all parts that it was cut
    /// into are finished.
    pub(crate) fn keep_until_finished(&self, current: &Current<'_>, parts: Option<Parts>) {
        let mut books = self.books.lock();
        let entry = books.entry(current.turn.seq);
        entry.shared = true;
        // Of several calls made as one, all have to be finished.
        entry.parts = parts.filter(|_| entry.calls == 1);
    }

    /// Takes the memory of the own staging ring.
    pub(crate) fn reserve_ring(&self) -> Result<()> {
        if self.ring.get().is_none() {
            self.control.reserve_ring(self.me())?;
            let _ = self.ring.set(());
        }
        Ok(())
    }
}
