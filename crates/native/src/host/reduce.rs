//! Calls in which each rank reduces a slice of everybody's memory.
//!
//! | input | how |
//! |---|---|
//! | small | it is with the descriptors: everybody reduces everything |
//! | shared on all ranks | everybody reduces its slice of all buffers and writes the result to all; if ranks share processors, whoever runs does parts (`parts.rs`) |
//! | otherwise | the same, chunk by chunk; who has private memory copies what others reduce out and back |
//! | joined calls of a batch | as private memory, one buffer after the other |
//!
//! The order of the ranks in the sum is the same in all of them, so the bits are.

use std::sync::atomic::Ordering;

use phalanx_pg::{Buffer, Call, DType, Done, ReduceOp, Result};

use super::control::{Counter, RING};
use super::descriptor::{Descriptor, Place, factor};
use super::joined::Row;
use super::local::{Current, Input, Local, PerRank};
use super::parts::Parts;
use crate::kernels::{self, Dests, Source};

/// Slices start at multiples of this many elements: at least a cache line for every type.
const SLICE_ALIGN: usize = 128;

/// How much of its own slice a rank asks for while it waits for others: some of what the nearest
/// cache holds.
const FETCHED_BYTES: usize = 8 << 10;

impl Local {
    /// All-reduce, or with a root (a rank on this host) reduce.
    pub(crate) fn run_reduce(
        &self,
        current: &Current<'_>,
        buf: Buffer,
        op: ReduceOp,
        root: Option<usize>,
    ) -> Result<Done> {
        self.await_all(current)?;
        let (bytes, mut sources) = (buf.byte_len(), PerRank::new());
        let own = self.control.descriptor(self.me(), current.op);
        let mut found = self.find_sources(current.op, &own, &buf, &mut sources);
        if found.is_none() {
            let all = self.meet(current)?;
            let all_shared = all.iter().all(|other| other.place() == Some(Place::Shared));
            let parts = self.parts(&buf).filter(|_| all_shared);
            if parts.is_some() && !self.knows_memory(current, &all)? {
                // Others may know the memory of who is gone, and finish without this rank.
                self.keep_until_finished(current, parts);
                return Ok(buf.into());
            }
            // Waits for memory that is not known here yet.
            let inputs = self.inputs(current, &all, |_| bytes)?;
            found = self.find_sources(current.op, &own, &buf, &mut sources);
            if found.is_none() {
                let row = Row::new(std::slice::from_ref(&buf));
                self.reduce_in_chunks(current, (&all, &inputs), (&row, op, root))?;
            }
        }
        match found {
            Some(Place::Inline) if root.is_none_or(|root| root == self.me()) => {
                self.reduce_inline(&buf, op, &sources);
            }
            Some(Place::Shared) => {
                let parts = self.parts(&buf);
                self.keep_until_finished(current, parts);
                self.reduce_shared(current.op, parts, &buf, op, (&mut sources, root));
            }
            _ => {}
        }
        Ok(buf.into())
    }

    /// The whole reduction of inputs that travel with their descriptors, into the own buffer.
    pub(crate) fn reduce_inline(&self, buf: &Buffer, op: ReduceOp, sources: &[Source]) {
        let to = [buf.as_ptr().as_ptr()];
        let (kernels, size) = (self.seat.kernels, self.seat.size);
        // SAFETY: the sources are announced inputs of this length, which their ranks leave alone
        // until this one is done, and in place of the own one the buffer itself, which is the
        // operation's: a block of it is read before it is written.
        unsafe {
            kernels::reduce(
                kernels,
                op,
                buf.dtype(),
                sources,
                Dests::At(&to),
                buf.len(),
                size,
            )
        }
    }

    /// Asks for the beginning of the own slice of the own buffer, which may have been pushed out of the
    /// nearest cache while the rest was written: there is nothing else to do before the others come.
    pub(crate) fn fetch_slice(&self, buf: &Buffer) {
        let (start, end) = self.slice(self.me(), buf.len());
        let size = buf.dtype().size();
        let from = buf.as_ptr().as_ptr().wrapping_add(start * size);
        kernels::hint::fetch(from, FETCHED_BYTES.min((end - start) * size));
    }

    /// The own share of a reduction of shared memory, into the memory of all who take the result: the
    /// root, or everybody. All sources have the length and the type of `buf`.
    pub(crate) fn reduce_shared(
        &self,
        op: u32,
        parts: Option<Parts>,
        buf: &Buffer,
        reduce: ReduceOp,
        (sources, root): (&mut [Source], Option<usize>),
    ) {
        match parts {
            Some(parts) => self.reduce_parts(op, parts, buf, reduce, (sources, root)),
            None => {
                let (start, end) = self.slice(self.me(), buf.len());
                let offset = start * buf.dtype().size();
                for source in &mut *sources {
                    source.ptr = source.ptr.wrapping_add(offset);
                }
                self.reduce_at(buf.dtype(), end - start, reduce, sources, root);
            }
        }
    }

    /// The elements from `start` to `end` of each source, likewise.
    pub(crate) fn reduce_range(
        &self,
        dtype: DType,
        (start, end): (usize, usize),
        op: ReduceOp,
        sources: &[Source],
        root: Option<usize>,
    ) {
        let offset = start * dtype.size();
        let moved = |source: &Source| Source {
            ptr: source.ptr.wrapping_add(offset),
            ..*source
        };
        let sources: PerRank<Source> = sources.iter().map(moved).collect();
        self.reduce_at(dtype, end - start, op, &sources, root);
    }

    /// The `len` elements at each source into the memory of all who take the result: the root, or
    /// everybody.
    fn reduce_at(
        &self,
        dtype: DType,
        len: usize,
        op: ReduceOp,
        sources: &[Source],
        root: Option<usize>,
    ) {
        let only = root.map(|root| [sources[root].ptr.cast_mut()]);
        let to = only.as_ref().map_or(Dests::Sources, |root| Dests::At(root));
        let (kernels, size) = (self.seat.kernels, self.seat.size);
        self.asking.reduce(kernels, len * dtype.size(), |kernels| {
            // SAFETY: the addresses are of buffers and chunks that their ranks have announced for
            // this operation and leave alone until all have done their parts, or of the own
            // buffer; each is valid for the elements named, since lengths agree. Slices of different
            // ranks do not overlap, nor do parts, and each part is taken by one.
            unsafe { kernels::reduce(kernels, op, dtype, sources, to, len, size) }
        });
    }

    /// Where the slice of a rank of `len` elements starts and ends.
    fn slice(&self, rank: usize, len: usize) -> (usize, usize) {
        let ranks = self.ranks();
        (
            slice_start(len, rank, ranks),
            slice_start(len, rank + 1, ranks),
        )
    }

    /// Where somebody's memory is private, or several buffers are one operation.
    fn reduce_in_chunks(
        &self,
        current: &Current<'_>,
        (all, inputs): (&[Descriptor], &[Input]),
        (row, op, root): (&Row<'_>, ReduceOp, Option<usize>),
    ) -> Result<()> {
        if all[self.me()].place() == Some(Place::Shared) {
            self.keep(current, None);
        }
        let reduction = Reduction {
            local: self,
            current,
            all,
            op,
            row,
            root,
        };
        reduction.in_chunks(inputs)
    }

    /// Neighbouring all-reduces of a batch, as one.
    pub(crate) fn reduce_joined(
        &self,
        current: &Current<'_>,
        calls: Vec<Call>,
    ) -> Result<Vec<Done>> {
        let all = self.meet(current)?;
        let inputs = self.inputs(current, &all, |_| 0)?;
        let own = all[self.me()].factor;
        let mut operator = ReduceOp::Sum;
        let mut buffers = Vec::with_capacity(calls.len());
        for call in calls {
            let Call::AllReduce { buf, op } = call else {
                unreachable!("only all-reduces are joined");
            };
            if factor(op).to_bits() != own.to_bits() {
                // The factors of this rank differ, so all were said to be one.
                self.multiply(&buf, op);
            }
            operator = op;
            buffers.push(buf);
        }
        let row = Row::new(&buffers);
        self.reduce_in_chunks(current, (&all, &inputs), (&row, operator, None))?;
        Ok(buffers.into_iter().map(Done::from).collect())
    }

    /// Multiplies the elements of an own buffer as `op` would.
    fn multiply(&self, buf: &Buffer, op: ReduceOp) {
        let ptr = buf.as_ptr().as_ptr();
        let source = Source {
            ptr,
            factor: factor(op),
            far: false,
        };
        // SAFETY: the buffer is the operation's, and nobody else works on it: of joined calls peers
        // see only what is staged. A block of it is read before it is written.
        unsafe {
            kernels::reduce(
                self.seat.kernels,
                op,
                buf.dtype(),
                &[source],
                Dests::Sources,
                buf.len(),
                1,
            )
        }
    }
}

struct Reduction<'a> {
    local: &'a Local,
    current: &'a Current<'a>,
    all: &'a [Descriptor],
    op: ReduceOp,
    row: &'a Row<'a>,
    root: Option<usize>,
}

impl Reduction<'_> {
    /// Whether the rank gets the result.
    fn takes(&self, rank: usize) -> bool {
        self.root.is_none_or(|root| root == rank)
    }

    /// Chunk by chunk: put out what others reduce, reduce a slice, take the others' back.
    fn in_chunks(&self, inputs: &[Input]) -> Result<()> {
        let local = self.local;
        let chunks = Chunks {
            reduction: self,
            inputs,
            base: local.rounds.load(Ordering::Acquire),
            per_chunk: local.control.chunk() / self.row.dtype().size(),
        };
        let count = self.row.len().div_ceil(chunks.per_chunk) as u32;
        let end = chunks.base.wrapping_add(count);
        match chunks.is_private(local.me()) {
            true => local.reserve_ring()?,
            false => local.publish(Counter::Staged, end),
        }
        chunks.run(count)?;
        local.rounds.store(end, Ordering::Release);
        Ok(())
    }
}

/// A reduction through the staging rings.
///
/// A chunk is cut into slices, one for each rank. Who has private memory puts the others' slices
/// into its ring, where they reduce them in place. Its own slice it reduces in its own memory:
/// nobody else needs it. Whoever writes to a line of a ring has read it before, which matters:
/// lines that one rank only writes and another only reads cost several times as much to hand over.
struct Chunks<'a> {
    reduction: &'a Reduction<'a>,
    inputs: &'a [Input],
    /// The number of the first chunk.
    base: u32,
    /// Elements.
    per_chunk: usize,
}

impl Chunks<'_> {
    fn run(&self, count: u32) -> Result<()> {
        let private = self.is_private(self.reduction.local.me());
        let (mut staged, mut taken) = (0, 0);
        for chunk in 0..count {
            while private && staged < count.min(taken + RING as u32) {
                self.put_out(staged)?;
                staged += 1;
            }
            self.reduce(chunk)?;
            // One behind, so that peers have time for theirs.
            if private && chunk > 0 {
                self.take_back(chunk - 1)?;
                taken = chunk;
            }
        }
        match private && count > 0 {
            true => self.take_back(count - 1),
            false => Ok(()),
        }
    }

    fn is_private(&self, rank: usize) -> bool {
        matches!(self.inputs[rank], Input::Staged)
    }

    fn number(&self, chunk: u32) -> u32 {
        self.base.wrapping_add(chunk)
    }

    /// Where a chunk begins, and how many elements it has.
    fn elements(&self, chunk: u32) -> (usize, usize) {
        let start = chunk as usize * self.per_chunk;
        (start, self.per_chunk.min(self.reduction.row.len() - start))
    }

    /// Where this rank finds a chunk of a peer.
    fn chunk_of(&self, peer: usize, chunk: u32) -> *mut u8 {
        let local = self.reduction.local;
        match &self.inputs[peer] {
            Input::Staged => local.control.stage(peer, self.number(chunk)),
            at => {
                let offset = self.elements(chunk).0 * self.reduction.row.dtype().size();
                shared(at).wrapping_add(offset).cast_mut()
            }
        }
    }

    /// Calls `copy` for each piece of the others' slices of a chunk: where it is, where its place in
    /// the ring is, bytes.
    fn with_others(&self, chunk: u32, copy: impl Fn(*mut u8, *mut u8, usize)) {
        let (row, local) = (self.reduction.row, self.reduction.local);
        let (first, len) = self.elements(chunk);
        let (start, end) = local.slice(local.me(), len);
        let ring = local.control.stage(local.me(), self.number(chunk));
        let size = row.dtype().size();
        for (start, end) in [(0, start), (end, len)] {
            for piece in row.pieces(first + start, first + end) {
                let staged = ring.wrapping_add((piece.start - first) * size);
                copy(piece.ptr, staged, piece.len * size);
            }
        }
    }

    /// Puts what others reduce of a chunk into the own ring.
    fn put_out(&self, chunk: u32) -> Result<()> {
        let (reduction, local) = (self.reduction, self.reduction.local);
        let number = self.number(chunk);
        local.await_free_chunk(reduction.current, number)?;
        self.with_others(chunk, |own, staged, bytes| local.copy(own, staged, bytes));
        local.publish(Counter::Staged, number.wrapping_add(1));
        Ok(())
    }

    /// Reduces the own slice of a chunk, once everybody has put it out.
    fn reduce(&self, chunk: u32) -> Result<()> {
        let (reduction, local) = (self.reduction, self.reduction.local);
        let there = self.number(chunk + 1);
        for rank in local.peers() {
            local.await_counter(reduction.current, rank, Counter::Staged, there)?;
        }
        let (first, len) = self.elements(chunk);
        let (start, end) = local.slice(local.me(), len);
        let chunks: PerRank<*mut u8> = (0..local.ranks())
            .map(|rank| match rank == local.me() {
                true => std::ptr::null_mut(),
                false => self.chunk_of(rank, chunk),
            })
            .collect();
        for piece in reduction.row.pieces(first + start, first + end) {
            let offset = (piece.start - first) * reduction.row.dtype().size();
            let source = |(rank, descriptor): (usize, &Descriptor)| Source {
                ptr: match rank == local.me() {
                    true => piece.ptr,
                    false => chunks[rank].wrapping_add(offset),
                },
                factor: descriptor.factor,
                far: rank != local.me(),
            };
            let sources: PerRank<Source> = reduction.all.iter().enumerate().map(source).collect();
            let (dtype, op) = (reduction.row.dtype(), reduction.op);
            local.reduce_at(dtype, piece.len, op, &sources, reduction.root);
        }
        local.publish(Counter::Worked, there);
        Ok(())
    }

    /// Takes what others reduced of a chunk out of the own ring, once they have.
    fn take_back(&self, chunk: u32) -> Result<()> {
        let (reduction, local) = (self.reduction, self.reduction.local);
        let number = self.number(chunk);
        for rank in local.peers() {
            let there = number.wrapping_add(1);
            local.await_counter(reduction.current, rank, Counter::Worked, there)?;
        }
        if reduction.takes(local.me()) {
            self.with_others(chunk, |own, staged, bytes| local.copy(staged, own, bytes));
        }
        Ok(())
    }
}

fn shared(input: &Input) -> *const u8 {
    match input {
        Input::At(ptr) => *ptr,
        _ => unreachable!("asked for where it is shared"),
    }
}

/// Where the slice of `rank` of `ranks` starts in `len` elements.
pub(crate) fn slice_start(len: usize, rank: usize, ranks: usize) -> usize {
    match rank == ranks {
        true => len,
        false => (len / ranks * rank) / SLICE_ALIGN * SLICE_ALIGN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slices_cover_everything_once(len in 0usize..100_000, ranks in 1usize..20) {
            prop_assert_eq!(slice_start(len, 0, ranks), 0);
            prop_assert_eq!(slice_start(len, ranks, ranks), len);
            for rank in 0..ranks {
                prop_assert!(slice_start(len, rank, ranks) <= slice_start(len, rank + 1, ranks));
            }
        }
    }
}
