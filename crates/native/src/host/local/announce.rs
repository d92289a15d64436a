//! Announcing operations to the peers on this host.

use super::*;

impl Local {
    /// Numbers a call and tells the peers of it, as far as there is room.
    pub(crate) fn announce(&self, call: &Call, seq: u64) {
        let calls = match call {
            Call::Batch(calls) => calls.as_slice(),
            single => std::slice::from_ref(single),
        };
        let count = self.operations(calls).count();
        let mut books = self.books.lock();
        let first_op = self.numbers.take(count);
        books.open(seq, first_op, count);
        if self.spans_hosts() {
            // Its memory has to be made ready first.
            return;
        }
        let ops = (0..).map(|i| first_op.wrapping_add(i));
        for (joined, op) in self.operations(calls).zip(ops) {
            if self.numbers.posted() != op || !self.may_post(op) {
                return;
            }
            self.post(&mut books, joined, seq, op, calls.len());
        }
    }

    /// The calls of a batch, or the one call, by operation.
    pub(super) fn operations<'a>(&self, calls: &'a [Call]) -> impl Iterator<Item = &'a [Call]> {
        // Between hosts every call is an operation.
        let (alone, joined) = match self.spans_hosts() {
            true => (calls, [].as_slice()),
            false => ([].as_slice(), calls),
        };
        alone.chunks(1).chain(joined::operations(joined))
    }

    /// Tries to run an all-reduce that is over in microseconds without anything that a longer wait
    /// needs: no account, no lock, no clock. If a peer is not there soon, the call has been announced,
    /// maybe this rank's part done too, and it says no.
    ///
    /// Where peers have come before, they are woken when this rank's part is over, if they sleep. The
    /// fence that comes before waits for the line of the slot, and would keep the sum waiting too;
    /// who sleeps takes longer to wake than a sum does.
    pub(crate) fn quick(&self, call: &Call, seq: u64) -> bool {
        let Call::AllReduce { buf, op: reduce } = call else {
            self.announce(call, seq);
            return false;
        };
        let (op, bytes) = (self.numbers.next(), buf.byte_len());
        let block = match bytes > SMALL_REDUCTION && bytes <= QUICK_REDUCTION {
            true => Block::of(buf, &self.seat.arenas),
            false => None,
        };
        let fits = bytes <= SMALL_REDUCTION || block.is_some();
        let is_next = self.numbers.posted() == op && !self.spans_hosts();
        if !fits || !is_next || !self.may_post(op) {
            self.announce(call, seq);
            return false;
        }
        self.numbers.take(1);
        let (own, lent) = self.show_quick(call, op, block);
        if lent.is_none() && bytes > IN_SLOT {
            // The next one is likely to be like this one, and peers have read that room last.
            let next = self.control.area(self.me(), op.wrapping_add(1));
            kernels::hint::claim(next, bytes);
        }
        let all_are_there = self.peers().all(|rank| self.has_announced(rank, op));
        if !all_are_there {
            self.control.ring(self.me());
            if lent.is_some() {
                self.fetch_slice(buf);
            }
        }
        let mut sources = PerRank::new();
        let found = match all_are_there || self.all_announced_soon(op) {
            true => self.find_sources(op, &own, buf, &mut sources),
            false => None,
        };
        let parts = self.parts(buf);
        match found {
            None => {}
            Some(Place::Inline) => self.reduce_inline(buf, *reduce, &sources),
            Some(_) => self.reduce_shared(op, parts, buf, *reduce, (&mut sources, None)),
        }
        let ran = found.is_some();
        if ran {
            self.control
                .counter(self.me(), Counter::Done)
                .store(op.wrapping_add(1), Ordering::Release);
        }
        let over = ran && (lent.is_none() || self.is_over(op, parts));
        // Who waits for the end of what travelled with the descriptors wants to announce an
        // operation that cannot end before this rank announces it too, and that wakes everybody.
        if all_are_there || (ran && lent.is_some()) {
            self.control.ring(self.me());
        }
        if over || (ran && self.is_over_soon(op, parts)) {
            lent.into_iter().for_each(Lent::give_back);
            return true;
        }
        let mut books = self.books.lock();
        let entry = books.open(seq, op, 1);
        (entry.ran, entry.shared) = (ran, ran);
        entry.parts = parts.filter(|_| ran);
        entry.marks.extend(lent.map(Lent::mark));
        false
    }

    /// Tells the peers of an all-reduce whose input is small or in a block of shared memory, which
    /// they may access from now on; what it told them.
    #[inline(always)]
    fn show_quick<'a>(
        &self,
        call: &Call,
        op: u32,
        block: Option<&'a Block>,
    ) -> (Descriptor, Option<Lent<'a>>) {
        let buf = call.input().expect("an all-reduce has an input");
        let Some(block) = block else {
            let descriptor = Descriptor::new(call, Place::Inline, 1);
            self.show(&descriptor, op, Some((buf, call.kind())));
            return (descriptor, None);
        };
        let (segment, offset) = block.location();
        let descriptor = Descriptor::new(call, Place::Shared, 1);
        let descriptor = descriptor.shared_at(segment, offset + buf.offset());
        let lent = block.lend();
        self.show(&descriptor, op, None);
        (descriptor, Some(lent))
    }

    /// Whether everybody has done its part of an operation, or all parts are finished.
    fn is_over(&self, op: u32, parts: Option<Parts>) -> bool {
        self.parts_finished(op, parts) || self.peers().all(|rank| self.has_done(rank, op))
    }

    /// Whether that is so within microseconds.
    fn is_over_soon(&self, op: u32, parts: Option<Parts>) -> bool {
        let over = |rank| self.has_done(rank, op) || self.parts_finished(op, parts);
        let mut peers = self.peers();
        peers.all(|rank| self.patience.quickly(|| over(rank)))
    }

    fn has_announced(&self, rank: usize, op: u32) -> bool {
        self.control.slot(rank, op).load(Ordering::Acquire) == op.wrapping_add(1)
    }

    /// Whether everybody has announced an operation, or does within microseconds.
    pub(super) fn all_announced_soon(&self, op: u32) -> bool {
        let mut peers = self.peers();
        peers.all(|rank| self.patience.quickly(|| self.has_announced(rank, op)))
    }

    /// Whether the peers may be told of an operation now. Never when the group is broken: they may have
    /// announced it, given it up and failed, and it must not succeed here alone, with nothing but what
    /// they announced.
    fn may_post(&self, op: u32) -> bool {
        !self.is_broken() && self.slot_is_free(op)
    }

    pub(super) fn slot_is_free(&self, op: u32) -> bool {
        let needed = op.wrapping_sub(DEPTH as u32 - 1);
        if !reached(self.numbers.all_done(), needed) {
            let done = |rank| {
                self.control
                    .counter(rank, Counter::Done)
                    .load(Ordering::Acquire)
            };
            // The lowest, as seen from the one that is needed: they are close together.
            let lowest = (0..self.ranks()).map(done);
            let lowest = lowest.min_by_key(|done| done.wrapping_sub(needed).cast_signed());
            self.numbers.set_all_done(lowest.unwrap_or(needed));
        }
        reached(self.numbers.all_done(), needed)
    }

    /// Tells the peers of an operation: one call, or several that are joined.
    pub(super) fn post(&self, books: &mut Books, calls: &[Call], seq: u64, op: u32, batch: usize) {
        let [call] = calls else {
            self.show(&Descriptor::joined(calls, batch), op, None);
            self.control.ring(self.me());
            return;
        };
        let input = self.exposed(call);
        let place = self.place(call, input);
        let mut descriptor = Descriptor::new(call, place, batch);
        if let Some(block) = input.and_then(|input| Block::of(input, &self.seat.arenas))
            && place == Place::Shared
        {
            let (segment, offset) = block.location();
            let within = input.map_or(0, |input| input.offset());
            descriptor = descriptor.shared_at(segment, offset + within);
            books.entry(seq).marks.push(block.mark());
        }
        if let Call::AllToAll { send_counts, .. } = call {
            self.write_counts(
                op,
                &explicit_counts(send_counts, descriptor.len as usize, self.seat.size),
            );
        }
        let inline = input.filter(|_| place == Place::Inline);
        self.show(&descriptor, op, inline.map(|input| (input, call.kind())));
        self.control.ring(self.me());
    }

    /// Writes a descriptor, and the input that travels with it. Who sleeps is not woken.
    // Like what makes the descriptor, so that it is made in its place and not copied there.
    #[inline(always)]
    fn show(&self, descriptor: &Descriptor, op: u32, inline: Option<(&Buffer, CallKind)>) {
        if let Some((input, kind)) = inline {
            let to = self.inline_input(self.me(), op, kind, input.byte_len());
            // SAFETY: the room holds what `place` lets in, is this rank's, and nobody reads it
            // until the slot's word is set.
            unsafe { copy_few(input.as_ptr().as_ptr(), to, input.byte_len()) }
        }
        if descriptor.place() == Some(Place::Shared) && self.me() == 0 {
            self.control.shares(op).reset();
        }
        self.control.describe(self.me(), op, descriptor);
        let posted = op.wrapping_add(1);
        self.numbers.set_posted(posted);
        self.control
            .slot(self.me(), op)
            .store(posted, Ordering::Release);
    }

    /// The memory of this rank that others on this host work on.
    pub(crate) fn exposed<'a>(&self, call: &'a Call) -> Option<&'a Buffer> {
        let own = self.seat.ranks[self.me()];
        match call {
            // Where others put what comes from elsewhere.
            Call::AllGather { output, .. } if self.spans_hosts() => Some(output),
            Call::Broadcast { data, .. } if self.spans_hosts() => Some(data.buffer()),
            Call::Broadcast { root, .. } if *root != own => None,
            Call::Gather { root, .. } if *root == own => None,
            other => other.input(),
        }
    }

    pub(super) fn place(&self, call: &Call, input: Option<&Buffer>) -> Place {
        let Some(input) = input else {
            return Place::Nowhere;
        };
        let limit = match call {
            Call::AllReduce { .. } | Call::Reduce { .. } => SMALL_REDUCTION,
            _ if self.spans_hosts() => 0,
            Call::AllToAll { .. } => INLINE - 8 * self.seat.size,
            _ => INLINE,
        };
        match Block::of(input, &self.seat.arenas) {
            _ if input.byte_len() <= limit => Place::Inline,
            Some(_) => Place::Shared,
            None => Place::Staged,
        }
    }

    /// Where the input of `rank` is if it travels with the descriptor.
    pub(super) fn inline_input(
        &self,
        rank: usize,
        op: u32,
        kind: CallKind,
        bytes: usize,
    ) -> *mut u8 {
        match kind {
            // Behind the counts.
            CallKind::AllToAll => self.control.area(rank, op).wrapping_add(8 * self.seat.size),
            _ => self.control.inline(rank, op, bytes),
        }
    }

    pub(super) fn write_counts(&self, op: u32, counts: &[usize]) {
        let to = self.control.area(self.me(), op).cast::<u64>();
        for (at, &count) in counts.iter().enumerate() {
            // SAFETY: the area is aligned and holds a count for each rank of the group, which
            // `check_size` keeps small enough; it is this rank's until the slot's word is set.
            unsafe { to.add(at).write(count as u64) }
        }
    }

    /// How many elements `rank` sends to rank `to` of the group in this all-to-all.
    pub(crate) fn count(&self, rank: usize, op: u32, to: usize) -> usize {
        debug_assert!(to < self.seat.size);
        let from = self.control.area(rank, op).cast::<u64>();
        // SAFETY: as in `write_counts`; the rank has announced the operation.
        unsafe { from.add(to).read() as usize }
    }

    /// Whether groups of `size` ranks work: every rank's counts must fit beside its slot.
    pub(crate) fn check_size(size: usize) -> Result<()> {
        match 8 * size <= INLINE / 2 {
            true => Ok(()),
            false => Err(Error::unsupported(format!(
                "groups of {size} ranks; {} is the most",
                INLINE / 16
            ))),
        }
    }
}

/// Copies what is likely to be one number: a call of the library's copy would cost more than the
/// copy.
///
/// # Safety
///
/// `src` is readable and `dst` writable for `bytes` bytes, they do not overlap, and nobody else
/// touches the one or writes to the other meanwhile.
#[inline]
unsafe fn copy_few(src: *const u8, dst: *mut u8, bytes: usize) {
    // SAFETY: the caller's; whatever the alignment.
    unsafe {
        match bytes {
            4 => dst
                .cast::<u32>()
                .write_unaligned(src.cast::<u32>().read_unaligned()),
            8 => dst
                .cast::<u64>()
                .write_unaligned(src.cast::<u64>().read_unaligned()),
            _ => dst.copy_from_nonoverlapping(src, bytes),
        }
    }
}
