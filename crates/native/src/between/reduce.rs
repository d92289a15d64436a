//! Reductions: every rank owns a range of the result, which is cut into blocks.
//!
//! The ranks of a host take turns in reducing their host's part of every block that is owned
//! elsewhere, and send it to the owner. The owner adds up the hosts in order and sends the result
//! to one rank on each other host, which passes it on. Block by block, so that adding and sending
//! overlap.

use std::ops::Range;

use phalanx_pg::{Buffer, DType, Done, Frozen, ReduceOp, Result};

use super::wire::{Outgoing, Script};
use super::{Job, SMALL_ALONE};
use crate::host::{Descriptor, PerRank, SMALL_REDUCTION, slice_start};
use crate::kernels::{self, Source};
use crate::room::Room;

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
    /// Elements of a block.
    block: usize,
    /// The own blocks that are not finished.
    partials: Vec<Partials>,
    /// Blocks that are to be sent: owner and number, the last one first.
    to_sum: Vec<(usize, u32)>,
}

/// What has come of a block from other hosts.
struct Partials {
    /// By host.
    rooms: PerRank<Option<Room>>,
    missing: usize,
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
        let sources = self.memory.iter().zip(&self.all).enumerate();
        let source = |(rank, (memory, descriptor)): (usize, (&*mut u8, &Descriptor))| Source {
            ptr: memory.wrapping_add(offset).cast_const(),
            factor: descriptor.factor,
            far: rank != self.local.me(),
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
        let hosts = job.between.hosts.len();
        let mut script = Self {
            job,
            op,
            dtype,
            target,
            ranges,
            block: job.between.cut.elements(kernels::wide_size(dtype)),
            partials: Vec::new(),
            to_sum: Vec::new(),
        };
        let partials = |_| Partials {
            rooms: (0..hosts).map(|_| None).collect(),
            missing: hosts - 1,
        };
        script.partials = (0..script.blocks(job.own())).map(partials).collect();
        script.to_sum = script.plan_sums();
        script
    }

    /// What this rank sends to owners elsewhere, the first blocks of all last.
    fn plan_sums(&self) -> Vec<(usize, u32)> {
        let (between, own) = (self.job.between, self.job.own());
        let mut plan = Vec::new();
        for (owner, _) in between.remote() {
            let all = 0..self.blocks(owner) as u32;
            let ours = all.filter(|&id| self.sender(between.here, owner, id) == own);
            plan.extend(ours.map(|id| (owner, id)));
        }
        plan.sort_by_key(|&(_, id)| std::cmp::Reverse(id));
        plan
    }

    /// How many blocks a rank owns.
    fn blocks(&self, owner: usize) -> usize {
        self.ranges[owner].len().div_ceil(self.block)
    }

    /// The elements of a block; none if its owner has no such block.
    fn elements(&self, owner: usize, id: u32) -> Range<usize> {
        let range = &self.ranges[owner];
        let at = |id: usize| (range.start + id.saturating_mul(self.block)).min(range.end);
        at(id as usize)..at(id as usize + 1)
    }

    /// Who on a host sends its part of a block to the owner elsewhere.
    fn sender(&self, host: usize, owner: usize, id: u32) -> usize {
        self.job.between.relay(host, owner + id as usize)
    }

    /// Whether this host's partial sum is its only rank's input.
    fn is_as_it_is(&self) -> bool {
        self.job.local.ranks() == 1
            && kernels::wide_size(self.dtype) == self.dtype.size()
            && !matches!(self.op, ReduceOp::PremulSum(_))
    }

    /// This host's partial sum of some elements, in a room unless it is somewhere already.
    fn sum(&self, elements: &Range<usize>, out: &mut Outgoing) -> (*const u8, Option<Room>) {
        let offset = elements.start * self.dtype.size();
        let job = self.job;
        if self.is_as_it_is() {
            return (job.memory[job.local.me()].wrapping_add(offset), None);
        }
        let mut room = out.room();
        let (kernels, len) = (job.local.seat.kernels, elements.len());
        let (to, sources) = (room.as_mut_ptr(), job.sources(offset));
        // SAFETY: the memory of this host's ranks is theirs for this operation, and the elements
        // are this rank's to read: their owner writes results over them only when it has this
        // sum. The room is private and as long as a block.
        unsafe { kernels::partial(kernels, self.op, self.dtype, &sources, to, len) };
        (to, Some(room))
    }

    /// Adds up a block whose parts are all there, and sends the result.
    fn finish(&mut self, id: u32, out: &mut Outgoing) {
        let (job, size) = (self.job, self.dtype.size());
        let elements = self.elements(job.own(), id);
        let (ours, our_room) = self.sum(&elements, out);
        let theirs = std::mem::take(&mut self.partials[id as usize].rooms);
        let from = |room: &Option<Room>| room.as_ref().map_or(ours, Room::as_ptr);
        let partials: PerRank<*const u8> = theirs.iter().map(from).collect();
        let offset = elements.start * size;
        let at = |memory: &*mut u8| memory.wrapping_add(offset);
        let mut result = None;
        let to: PerRank<*mut u8> = match self.target {
            Target::Everybody => job.memory.iter().map(at).collect(),
            Target::Root(root) => match job.local.local_rank(root) {
                Some(place) => PerRank::from_slice(&[at(&job.memory[place])]),
                None => PerRank::from_slice(&[result.insert(out.room()).as_mut_ptr()]),
            },
            Target::Owner(to) => {
                let start = elements.start - self.ranges[job.own()].start;
                PerRank::from_slice(&[to.wrapping_add(start * size)])
            }
        };
        let (kernels, ranks) = (job.local.seat.kernels, job.local.seat.size);
        let len = elements.len();
        // SAFETY: partial sums of the block from every host, each as long as the block; the
        // destinations are the owner's to write, in memory that its ranks gave to this operation,
        // or a room that is as long as a block.
        unsafe { kernels::finish(kernels, self.op, self.dtype, &partials, &to, len, ranks) };
        theirs
            .into_iter()
            .chain([our_room])
            .flatten()
            .for_each(|room| out.give_back(room));
        let (id, bytes) = (RESULT | id, len * size);
        match (self.target, result) {
            (Target::Root(root), Some(room)) => out.push_room(root, id, room, bytes),
            (Target::Everybody, _) => {
                let from = to[job.local.me()];
                let between = job.between;
                for host in (0..between.hosts.len()).filter(|&host| host != between.here) {
                    out.push(between.relay(host, job.own()), id, from, bytes);
                }
            }
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
}

impl Script for Ranges<'_> {
    fn expected(&self, from: usize) -> usize {
        let own = self.job.own();
        let (host, _) = self.job.between.seat_of(from);
        let blocks = 0..self.blocks(own) as u32;
        let sums = blocks.filter(|&id| self.sender(host, own, id) == from);
        let results = match self.takes_results(from) {
            true => self.blocks(from),
            false => 0,
        };
        sums.count() + results
    }

    fn place(&mut self, from: usize, id: u32, len: usize, out: &mut Outgoing) -> Option<*mut u8> {
        let size = self.dtype.size();
        if id & RESULT != 0 {
            let elements = self.elements(from, id & !RESULT);
            let memory = self.job.memory[self.job.local.me()];
            let fits = self.takes_results(from) && elements.len() * size == len;
            return fits.then(|| memory.wrapping_add(elements.start * size));
        }
        let own = self.job.own();
        let (host, _) = self.job.between.seat_of(from);
        let wide = kernels::wide_size(self.dtype);
        let fits = self.elements(own, id).len() * wide == len && len > 0;
        if !fits || self.sender(host, own, id) != from {
            return None;
        }
        match self.partials[id as usize].rooms.get_mut(host) {
            Some(room @ None) => Some(room.insert(out.room()).as_mut_ptr()),
            // It has come before.
            _ => None,
        }
    }

    fn arrived(&mut self, from: usize, id: u32, out: &mut Outgoing) {
        if id & RESULT == 0 {
            let partials = &mut self.partials[id as usize];
            partials.missing -= 1;
            if partials.missing == 0 {
                self.finish(id, out);
            }
        } else if let Target::Everybody = self.target {
            let (block, size) = (self.elements(from, id & !RESULT), self.dtype.size());
            self.job.spread(block.start * size, block.len() * size);
        }
    }

    fn work(&mut self, out: &mut Outgoing) -> bool {
        let Some((owner, id)) = self.to_sum.pop() else {
            return false;
        };
        let elements = self.elements(owner, id);
        let bytes = elements.len() * kernels::wide_size(self.dtype);
        match self.sum(&elements, out) {
            (_, Some(room)) => out.push_room(owner, id, room, bytes),
            (input, None) => out.push(owner, id, input, bytes),
        }
        true
    }
}
