//! Calls in which each rank reads what it needs from the others' inputs.
//!
//! An input that is shared, or travels with its descriptor, is read where it is. An input in
//! private memory goes through its rank's staging ring, chunk by chunk: in round `c` the rank puts
//! piece `c` of each part into a chunk, and everybody who reads it says so afterwards. A part is
//! what one rank reads, or what all read alike.

use std::sync::atomic::Ordering;

use phalanx_pg::{Buffer, Call, Done, Error, ErrorKind, Frozen, ReduceOp, Result, explicit_counts};

use super::books::reached;
use super::control::{Counter, RING};
use super::descriptor::Descriptor;
use super::local::{Current, Input, Local, PerRank, payload_buffer};
use crate::kernels::{self, Dests, Source};

/// Pieces start at multiples of this: whole elements, whole cache lines.
const PIECE_ALIGN: usize = 128;

/// Which parts inputs have.
struct Parts {
    /// One that all read, or one for each rank.
    count: usize,
    /// Which of them this rank reads.
    mine: usize,
    /// Where the parts of the own input are, in bytes: start and length.
    own: PerRank<(usize, usize)>,
    /// Length of the longest part of any rank.
    longest: usize,
}

/// What a rank reads in one round.
struct Round<'a> {
    local: &'a Local,
    inputs: &'a [Input],
    /// Where a rank's part for this one starts in its input.
    start: &'a dyn Fn(usize) -> usize,
    own: *const u8,
    /// Where the round starts in each part, and how many bytes of it there are at most.
    at: usize,
    most: usize,
    /// In staged chunks: the chunk's number, and where in it.
    chunk: u32,
    within: usize,
}

impl Round<'_> {
    /// Where the bytes of `rank`'s part in this round are, for reading.
    fn piece(&self, rank: usize) -> *const u8 {
        match self.inputs[rank] {
            _ if rank == self.local.me() => self.own.wrapping_add((self.start)(rank) + self.at),
            Input::At(ptr) => ptr.wrapping_add((self.start)(rank) + self.at),
            Input::Staged => {
                let chunk = self.local.control.stage(rank, self.chunk);
                chunk.wrapping_add(self.within).cast_const()
            }
            Input::Nowhere => unreachable!("nobody reads what is not there"),
        }
    }

    /// How many bytes of a part of `len` are in this round.
    fn bytes(&self, len: usize) -> usize {
        len.saturating_sub(self.at).min(self.most)
    }
}

impl Local {
    /// Runs a call that is none of all-reduce and reduce, whose ranks are all on this host.
    pub(crate) fn run_pull(&self, current: &Current<'_>, call: Call) -> Result<Done> {
        let all = self.meet(current)?;
        match call {
            Call::Barrier => Ok(Done::default()),
            Call::Broadcast { data, root } => {
                let from = data.buffer().as_ptr().as_ptr().cast_const();
                let (len, to) = (data.buffer().byte_len(), data.buffer().as_ptr().as_ptr());
                let read = self.me() != root;
                self.pull_whole(current, &all, from, len, |round| {
                    if read {
                        self.copy(
                            round.piece(root),
                            to.wrapping_add(round.at),
                            round.bytes(len),
                        );
                    }
                })?;
                if let phalanx_pg::Payload::ReadOnly(frozen) = data {
                    self.keep_if_shared(current, &all, Some(frozen));
                    return Ok(Done::default());
                }
                self.keep_if_shared(current, &all, None);
                Ok(payload_buffer(data).map(Done::from).unwrap_or_default())
            }
            Call::AllGather { input, output } => self.gather(current, &all, input, Some(output)),
            Call::Gather { input, output, .. } => self.gather(current, &all, input, output),
            Call::Scatter {
                input,
                output,
                root,
            } => self.scatter(current, &all, input, output, root),
            Call::ReduceScatter { input, output, op } => {
                self.reduce_scatter(current, &all, input, output, op)
            }
            Call::AllToAll {
                input,
                output,
                recv_counts,
                ..
            } => self.all_to_all(current, &all, input, output, &recv_counts),
            other => {
                let what = format!("native has no collective {}", other.kind());
                Err(Error::unsupported(what))
            }
        }
    }

    fn gather(
        &self,
        current: &Current<'_>,
        all: &[Descriptor],
        input: Frozen,
        output: Option<Buffer>,
    ) -> Result<Done> {
        let len = input.byte_len();
        let to = output.as_ref().map(|output| output.as_ptr().as_ptr());
        self.pull_whole(current, all, input.as_ptr().as_ptr(), len, |round| {
            let Some(to) = to else { return };
            for rank in 0..self.ranks() {
                let to = to.wrapping_add(rank * len + round.at);
                self.copy(round.piece(rank), to, round.bytes(len));
            }
        })?;
        self.keep_if_shared(current, all, Some(input));
        Ok(output.map(Done::from).unwrap_or_default())
    }

    fn scatter(
        &self,
        current: &Current<'_>,
        all: &[Descriptor],
        input: Option<Frozen>,
        output: Buffer,
        root: usize,
    ) -> Result<Done> {
        let (len, to) = (output.byte_len(), output.as_ptr().as_ptr());
        let from = input
            .as_ref()
            .map_or(std::ptr::null(), |input| input.as_ptr().as_ptr());
        self.pull_equal(current, all, from, len, |round| {
            self.copy(
                round.piece(root),
                to.wrapping_add(round.at),
                round.bytes(len),
            );
        })?;
        self.keep_if_shared(current, all, input);
        Ok(output.into())
    }

    fn reduce_scatter(
        &self,
        current: &Current<'_>,
        all: &[Descriptor],
        input: Frozen,
        output: Buffer,
        op: ReduceOp,
    ) -> Result<Done> {
        let (len, to) = (output.byte_len(), output.as_ptr().as_ptr());
        let dtype = output.dtype();
        self.pull_equal(current, all, input.as_ptr().as_ptr(), len, |round| {
            let source = |(rank, descriptor): (usize, &Descriptor)| Source {
                ptr: round.piece(rank),
                factor: descriptor.factor,
                far: rank != self.me(),
            };
            let sources: PerRank<Source> = all.iter().enumerate().map(source).collect();
            let to = [to.wrapping_add(round.at)];
            let count = round.bytes(len) / dtype.size();
            // SAFETY: every piece is readable for the round's bytes until this rank says that it
            // has worked on the chunk or is done with the operation; the output is owned by it.
            unsafe {
                kernels::reduce(
                    self.seat.kernels,
                    op,
                    dtype,
                    &sources,
                    Dests::At(&to),
                    count,
                    self.seat.size,
                )
            }
        })?;
        self.keep_if_shared(current, all, Some(input));
        Ok(output.into())
    }

    fn all_to_all(
        &self,
        current: &Current<'_>,
        all: &[Descriptor],
        input: Frozen,
        output: Buffer,
        recv_counts: &[usize],
    ) -> Result<Done> {
        let (me, op, size) = (self.me(), current.op, input.dtype().size());
        let ranks = 0..self.ranks();
        let bytes_between = |from, to| self.count(from, op, to) * size;
        // A peer's counts must be within what it says its input is.
        for rank in ranks.clone() {
            let counts = ranks.clone().map(|to| self.count(rank, op, to));
            let sum = counts.fold(0usize, usize::saturating_add);
            if sum as u64 > all[rank].len {
                return Err(
                    Error::new(ErrorKind::Backend, "a peer's counts exceed its input")
                        .from_peer(self.seat.ranks[rank]),
                );
            }
        }
        let mut own = PerRank::new();
        let mut start = 0;
        for to in ranks.clone() {
            own.push((start, bytes_between(me, to)));
            start += bytes_between(me, to);
        }
        let pairs = ranks
            .clone()
            .flat_map(|from| ranks.clone().map(move |to| (from, to)));
        let parts = Parts {
            count: self.ranks(),
            mine: me,
            own,
            longest: pairs
                .map(|(from, to)| bytes_between(from, to))
                .max()
                .unwrap_or(0),
        };
        let expected = explicit_counts(recv_counts, output.len(), self.ranks());
        let wrong = ranks
            .clone()
            .find(|&from| self.count(from, op, me) != expected[from]);
        let to = output.as_ptr().as_ptr();
        let starts = |from: usize| (0..me).map(|to| bytes_between(from, to)).sum();
        let inputs = self.inputs(current, all, |descriptor| descriptor.len as usize * size)?;
        self.pull(
            current,
            &inputs,
            input.as_ptr().as_ptr(),
            &starts,
            &parts,
            |round| {
                // The others go on, and need this rank's rounds.
                if wrong.is_some() {
                    return;
                }
                let mut at = 0;
                for from in ranks.clone() {
                    let len = bytes_between(from, me);
                    self.copy(
                        round.piece(from),
                        to.wrapping_add(at + round.at),
                        round.bytes(len),
                    );
                    at += len;
                }
            },
        )?;
        self.keep_if_shared(current, all, Some(input));
        match wrong {
            None => Ok(output.into()),
            Some(from) => {
                let (sent, room) = (self.count(from, op, me), expected[from]);
                let what = format!("rank {from} sends {sent} elements, there is room for {room}");
                Err(Error::new(ErrorKind::Mismatch, what).from_peer(from))
            }
        }
    }

    /// Everybody reads all of the inputs, which are `len` bytes each.
    fn pull_whole(
        &self,
        current: &Current<'_>,
        all: &[Descriptor],
        own: *const u8,
        len: usize,
        work: impl FnMut(&Round<'_>),
    ) -> Result<()> {
        let parts = Parts {
            count: 1,
            mine: 0,
            own: PerRank::from_slice(&[(0, len)]),
            longest: len,
        };
        let inputs = self.inputs(current, all, |_| len)?;
        self.pull(current, &inputs, own, &|_| 0, &parts, work)
    }

    /// Rank `i` reads part `i` of the inputs, whose parts are `len` bytes each.
    fn pull_equal(
        &self,
        current: &Current<'_>,
        all: &[Descriptor],
        own: *const u8,
        len: usize,
        work: impl FnMut(&Round<'_>),
    ) -> Result<()> {
        let parts = Parts {
            count: self.ranks(),
            mine: self.me(),
            own: (0..self.ranks()).map(|rank| (rank * len, len)).collect(),
            longest: len,
        };
        let inputs = self.inputs(current, all, |_| len * self.ranks())?;
        self.pull(current, &inputs, own, &|_| self.me() * len, &parts, work)
    }

    /// Has `work` done on everything that this rank reads, in one round or many.
    fn pull(
        &self,
        current: &Current<'_>,
        inputs: &[Input],
        own: *const u8,
        start: &dyn Fn(usize) -> usize,
        parts: &Parts,
        mut work: impl FnMut(&Round<'_>),
    ) -> Result<()> {
        let staged = |rank: &usize| matches!(inputs[*rank], Input::Staged);
        let mut round = Round {
            local: self,
            inputs,
            start,
            own,
            at: 0,
            most: usize::MAX,
            chunk: 0,
            within: 0,
        };
        if !(0..self.ranks()).any(|rank| staged(&rank)) {
            work(&round);
            return Ok(());
        }
        round.most = self.control.chunk() / parts.count / PIECE_ALIGN * PIECE_ALIGN;
        round.within = parts.mine * round.most;
        let rounds = parts.longest.div_ceil(round.most).max(1) as u32;
        let base = self.rounds.load(Ordering::Acquire);
        let mut next = 0;
        for number in 0..rounds {
            if staged(&self.me()) {
                while next < rounds && next < number + RING as u32 {
                    let chunk = base.wrapping_add(next);
                    if next > number && !self.chunk_is_free(chunk) {
                        break;
                    }
                    self.fill_chunk(
                        current,
                        chunk,
                        own,
                        parts,
                        next as usize * round.most,
                        round.most,
                    )?;
                    next += 1;
                }
            }
            round.chunk = base.wrapping_add(number);
            round.at = number as usize * round.most;
            let there = round.chunk.wrapping_add(1);
            for rank in self.peers().filter(staged) {
                self.await_counter(current, rank, Counter::Staged, there)?;
            }
            work(&round);
            self.publish(Counter::Worked, there);
        }
        let end = base.wrapping_add(rounds);
        self.publish(Counter::Staged, end);
        self.rounds.store(end, Ordering::Release);
        Ok(())
    }

    /// Whether nobody will read again what was in the place of chunk `number` before.
    pub(crate) fn chunk_is_free(&self, number: u32) -> bool {
        let needed = number.wrapping_sub(RING as u32 - 1);
        let worked = |rank| {
            self.control
                .counter(rank, Counter::Worked)
                .load(Ordering::Acquire)
        };
        self.peers().all(|rank| reached(worked(rank), needed))
    }

    /// Puts the bytes from `at` of every part into a chunk, `most` at most of each.
    fn fill_chunk(
        &self,
        current: &Current<'_>,
        number: u32,
        own: *const u8,
        parts: &Parts,
        at: usize,
        most: usize,
    ) -> Result<()> {
        self.reserve_ring()?;
        self.await_free_chunk(current, number)?;
        let chunk = self.control.stage(self.me(), number);
        for (index, &(start, len)) in parts.own.iter().enumerate() {
            let bytes = len.saturating_sub(at).min(most);
            self.copy(
                own.wrapping_add(start + at),
                chunk.wrapping_add(index * most),
                bytes,
            );
        }
        self.publish(Counter::Staged, number.wrapping_add(1));
        Ok(())
    }

    /// Waits until an own chunk may be written.
    pub(crate) fn await_free_chunk(&self, current: &Current<'_>, number: u32) -> Result<()> {
        let needed = number.wrapping_sub(RING as u32 - 1);
        for rank in self.peers() {
            self.await_counter(current, rank, Counter::Worked, needed)?;
        }
        Ok(())
    }

    /// Copies between memory of this rank and memory that peers can reach.
    pub(crate) fn copy(&self, from: *const u8, to: *mut u8, bytes: usize) {
        if bytes > 0 {
            // SAFETY: callers name ranges that they have checked to be inside of buffers or
            // segments: what is read has been announced and is left alone until this rank says
            // that it is done with it, what is written is this rank's, and the two are apart.
            unsafe { kernels::copy(self.seat.kernels, from, to, bytes) }
        }
    }

    /// If peers read shared memory in this operation, it is finished when all are done.
    fn keep_if_shared(&self, current: &Current<'_>, all: &[Descriptor], input: Option<Frozen>) {
        if all[self.me()].place() == Some(super::descriptor::Place::Shared) {
            self.keep(current, input);
        }
    }
}
