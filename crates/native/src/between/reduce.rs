//! Reductions: every rank owns a range of the result.
//!
//! The ranks of a host reduce their host's part of every range that is owned elsewhere, each a
//! slice of it, and send it to the owner. The owner adds up the hosts in order and sends the result
//! to one rank on each other host, which passes it on. Everything goes in blocks, so that adding
//! and sending overlap.

use std::ops::Range;

use phalanx_pg::{Buffer, DType, Done, Frozen, ReduceOp, Result};

use super::wire::{Outgoing, Script};
use super::{Job, SMALL_ALONE};
use crate::host::{PerRank, SMALL_REDUCTION, slice_start};
use crate::kernels::{self, Source};
use crate::room::Room;

/// Elements of a block.
const BLOCK: usize = 64 << 10;

/// Marks pieces that are results; the others are partial sums.
const RESULT: u32 = 1 << 31;

/// Who gets the results.
#[derive(Debug, Clone, Copy)]
enum Target {
    /// All, in the memory that they reduce.
    Everybody,
    /// One rank, in the memory that it reduces.
    Root(usize),
    /// Each rank its own range, here.
    Owner(*mut u8),
}

/// One rank's part in a reduction.
struct Ranges<'a> {
    job: &'a Job<'a>,
    op: ReduceOp,
    dtype: DType,
    target: Target,
    /// What each rank owns, in elements of what is reduced.
    ranges: Vec<Range<usize>>,
    /// Partial sums of the own range, by host.
    theirs: Vec<Room>,
    /// How far they have come, by rank: elements from the start of its slice.
    progress: Vec<usize>,
    /// This host's partial sum of a block.
    ours: Room,
    /// Blocks of the own range whose results are there.
    finished: usize,
    /// Results on their way to a root elsewhere.
    results: Room,
    /// Partial sums that are to be sent: to whom, elements, where in `sums`.
    to_sum: Vec<(usize, u32, Range<usize>, usize)>,
    sums: Room,
}

impl Job<'_> {
    pub(super) fn reduce(&self, buf: Buffer, op: ReduceOp, root: Option<usize>) -> Result<Done> {
        let bytes = buf.byte_len();
        let alone = self.between.hosts.iter().all(|ranks| ranks.len() == 1);
        if bytes <= SMALL_REDUCTION || (alone && bytes <= SMALL_ALONE) {
            self.reduce_small(&buf, op, &self.sources(0))?;
            return Ok(buf.into());
        }
        let size = self.local.seat.size;
        let range =
            |rank| slice_start(buf.len(), rank, size)..slice_start(buf.len(), rank + 1, size);
        let target = root.map_or(Target::Everybody, Target::Root);
        let ranges = (0..size).map(range).collect();
        let mut script = Ranges::new(self, op, buf.dtype(), target, ranges);
        self.exchange(&mut script)?;
        Ok(buf.into())
    }

    pub(super) fn reduce_scatter(
        &self,
        input: Frozen,
        output: Buffer,
        op: ReduceOp,
    ) -> Result<Done> {
        let len = output.len();
        let ranges = (0..self.local.seat.size).map(|rank| rank * len..(rank + 1) * len);
        let target = Target::Owner(output.as_ptr().as_ptr());
        let mut script = Ranges::new(self, op, output.dtype(), target, ranges.collect());
        self.exchange(&mut script)?;
        self.local.keep(self.current, Some(input));
        Ok(output.into())
    }

    /// The inputs of this host from byte `offset` on, in rank order.
    fn sources(&self, offset: usize) -> PerRank<Source> {
        let sources = self.memory.iter().zip(&self.all);
        let source = |(memory, descriptor): (&*mut u8, &crate::host::Descriptor)| Source {
            ptr: memory.wrapping_add(offset).cast_const(),
            factor: descriptor.factor,
        };
        sources.map(source).collect()
    }
}

impl<'a> Ranges<'a> {
    fn new(
        job: &'a Job<'a>,
        op: ReduceOp,
        dtype: DType,
        target: Target,
        ranges: Vec<Range<usize>>,
    ) -> Self {
        let (between, wide) = (job.between, kernels::wide_size(dtype));
        let own = ranges[job.own()].clone();
        let room = |host: usize| match host == between.here {
            true => Room::new(0),
            false => Room::new(own.len() * wide),
        };
        let remote_root = match target {
            Target::Root(root) => job.local.local_rank(root).is_none(),
            _ => false,
        };
        let mut script = Self {
            op,
            dtype,
            target,
            theirs: (0..between.hosts.len()).map(room).collect(),
            progress: vec![0; ranges.len()],
            ours: Room::new(BLOCK.min(own.len()) * wide),
            finished: 0,
            results: Room::new(if remote_root {
                own.len() * dtype.size()
            } else {
                0
            }),
            to_sum: Vec::new(),
            sums: Room::new(0),
            ranges,
            job,
        };
        script.plan_sums();
        script
    }

    /// Lists what this rank sends to the owners elsewhere, the first blocks of all first.
    fn plan_sums(&mut self) {
        let (job, wide) = (self.job, kernels::wide_size(self.dtype));
        let (me, ranks) = (job.local.me(), job.local.ranks());
        let mut at = 0;
        for (owner, _) in job.between.remote() {
            let slice = slice_of(&self.ranges[owner], me, ranks);
            for (id, block) in (0..).zip(blocks(&slice)) {
                let len = block.len();
                self.to_sum.push((owner, id, block, at));
                at += len * wide;
            }
        }
        self.to_sum
            .sort_by_key(|(_, id, _, _)| std::cmp::Reverse(*id));
        if !self.is_as_it_is() {
            self.sums = Room::new(at);
        }
    }

    /// Whether this host's partial sum is its only rank's input.
    fn is_as_it_is(&self) -> bool {
        self.job.local.ranks() == 1
            && kernels::wide_size(self.dtype) == self.dtype.size()
            && !matches!(self.op, ReduceOp::PremulSum(_))
    }

    /// This host's partial sum of some elements, in `room` unless it is somewhere already.
    fn sum(&self, elements: &Range<usize>, room: *mut u8) -> *const u8 {
        let offset = elements.start * self.dtype.size();
        let job = self.job;
        if self.is_as_it_is() {
            return job.memory[job.local.me()].wrapping_add(offset);
        }
        let (kernels, len) = (job.local.seat.kernels, elements.len());
        let sources = job.sources(offset);
        // SAFETY: the memory of this host's ranks is theirs for this operation, and the elements
        // are this rank's to read: their owner writes results over them only when it has this
        // sum. The room is private and long enough.
        unsafe { kernels::partial(kernels, self.op, self.dtype, &sources, room, len) };
        room
    }

    /// The slice of the own range that a rank elsewhere sends, relative to the range.
    fn slice_from(&self, from: usize) -> Range<usize> {
        let between = self.job.between;
        let (host, place) = between.seat_of(from);
        let own = &self.ranges[self.job.own()];
        let slice = slice_of(own, place, between.hosts[host].len());
        slice.start - own.start..slice.end - own.start
    }

    /// Adds up all blocks of the own range that are there, and sends the results.
    fn finish(&mut self, out: &mut Outgoing) {
        let own = self.ranges[self.job.own()].clone();
        while self.finished * BLOCK < own.len() {
            let start = self.finished * BLOCK;
            let end = (start + BLOCK).min(own.len());
            let has_come = |&(from, _): &(usize, usize)| {
                let slice = self.slice_from(from);
                let needed = end.min(slice.end);
                slice.start >= needed || slice.start + self.progress[from] >= needed
            };
            if !self.job.between.remote().all(|from| has_come(&from)) {
                return;
            }
            self.finish_block(&own, start..end, out);
            self.finished += 1;
        }
    }

    fn finish_block(&mut self, own: &Range<usize>, block: Range<usize>, out: &mut Outgoing) {
        let (job, size) = (self.job, self.dtype.size());
        let wide = kernels::wide_size(self.dtype);
        let elements = own.start + block.start..own.start + block.end;
        let room = self.ours.as_mut_ptr();
        let ours = self.sum(&elements, room);
        let partials: PerRank<*const u8> = (0..job.between.hosts.len())
            .map(|host| match host == job.between.here {
                true => ours,
                false => self.theirs[host].as_ptr().wrapping_add(block.start * wide),
            })
            .collect();
        let offset = elements.start * size;
        let (to, send_from): (PerRank<*mut u8>, *const u8) = match self.target {
            Target::Everybody => {
                let to: PerRank<_> = job
                    .memory
                    .iter()
                    .map(|at| at.wrapping_add(offset))
                    .collect();
                let own = to[job.local.me()];
                (to, own)
            }
            Target::Root(root) => match job.local.local_rank(root) {
                Some(place) => {
                    let to = job.memory[place].wrapping_add(offset);
                    (PerRank::from_slice(&[to]), to)
                }
                None => {
                    let to = self.results.as_mut_ptr().wrapping_add(block.start * size);
                    (PerRank::from_slice(&[to]), to)
                }
            },
            Target::Owner(to) => {
                let to = to.wrapping_add(block.start * size);
                (PerRank::from_slice(&[to]), to)
            }
        };
        let (kernels, ranks) = (job.local.seat.kernels, job.local.seat.size);
        // SAFETY: partial sums of the block from every host, each as long as the block; the
        // destinations are the owner's to write, in memory that its ranks gave to this operation.
        unsafe {
            kernels::finish(
                kernels,
                self.op,
                self.dtype,
                &partials,
                &to,
                block.len(),
                ranks,
            )
        };
        let id = RESULT | (block.start / BLOCK) as u32;
        self.receivers(|to| out.push(to, id, send_from, block.len() * size));
    }

    /// Tells of every rank elsewhere that gets this rank's results.
    fn receivers(&self, mut tell: impl FnMut(usize)) {
        let (between, own) = (self.job.between, self.job.own());
        match self.target {
            Target::Everybody => (0..between.hosts.len())
                .filter(|&host| host != between.here)
                .for_each(|host| tell(between.relay(host, own))),
            Target::Root(root) if self.job.local.local_rank(root).is_none() => tell(root),
            _ => {}
        }
    }

    /// Whether this rank takes the results of an owner elsewhere.
    fn takes_results(&self, owner: usize) -> bool {
        let (between, own) = (self.job.between, self.job.own());
        match self.target {
            Target::Everybody => between.relay(between.here, owner) == own,
            Target::Root(root) => root == own,
            Target::Owner(_) => false,
        }
    }

    /// The elements of a result.
    fn result_block(&self, owner: usize, id: u32) -> Range<usize> {
        let range = &self.ranges[owner];
        let start = range.start + (id & !RESULT) as usize * BLOCK;
        start.min(range.end)..(start + BLOCK).min(range.end)
    }
}

impl Script for Ranges<'_> {
    fn expected(&self, from: usize) -> usize {
        let sums = self.slice_from(from).len().div_ceil(BLOCK);
        let results = match self.takes_results(from) {
            true => self.ranges[from].len().div_ceil(BLOCK),
            false => 0,
        };
        sums + results
    }

    fn place(&mut self, from: usize, id: u32, len: usize) -> Option<*mut u8> {
        if id & RESULT != 0 {
            let block = self.result_block(from, id);
            let size = self.dtype.size();
            let memory = self.job.memory[self.job.local.me()];
            let fits = self.takes_results(from) && block.len() * size == len;
            return fits.then(|| memory.wrapping_add(block.start * size));
        }
        let slice = self.slice_from(from);
        let block = blocks(&slice).nth(id as usize)?;
        let wide = kernels::wide_size(self.dtype);
        let (host, _) = self.job.between.seat_of(from);
        let room = self.theirs[host].as_mut_ptr();
        (block.len() * wide == len).then(|| room.wrapping_add(block.start * wide))
    }

    fn arrived(&mut self, from: usize, id: u32, out: &mut Outgoing) {
        if id & RESULT != 0 {
            if let Target::Everybody = self.target {
                let (block, size) = (self.result_block(from, id), self.dtype.size());
                self.job.spread(block.start * size, block.len() * size);
            }
            return;
        }
        let slice = self.slice_from(from);
        let block = blocks(&slice).nth(id as usize);
        self.progress[from] = block.map_or(0, |block| block.end - slice.start);
        self.finish(out);
    }

    fn work(&mut self, out: &mut Outgoing) -> bool {
        let Some((owner, id, elements, at)) = self.to_sum.pop() else {
            return false;
        };
        let room = self.sums.as_mut_ptr().wrapping_add(at);
        let sum = self.sum(&elements, room);
        out.push(
            owner,
            id,
            sum,
            elements.len() * kernels::wide_size(self.dtype),
        );
        true
    }
}

/// The slice of a range that rank `place` of `ranks` on a host reduces for its owner.
fn slice_of(range: &Range<usize>, place: usize, ranks: usize) -> Range<usize> {
    let at = |place| range.start + slice_start(range.len(), place, ranks);
    at(place)..at(place + 1)
}

/// Cuts a range into blocks.
fn blocks(range: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = range.end;
    range
        .clone()
        .step_by(BLOCK)
        .map(move |start| start..(start + BLOCK).min(end))
}
