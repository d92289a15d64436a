//! Calls in which each rank reduces a slice of everybody's memory, in place.
//!
//! | input | how |
//! |---|---|
//! | small | it is with the descriptors: everybody reduces everything |
//! | shared on all ranks | everybody reduces its slice of all buffers and writes the result to all |
//! | otherwise | the same, chunk by chunk; who has private memory copies chunks in and out |
//!
//! The order of the ranks in the sum is the same in all three, so the bits are.

use std::sync::atomic::Ordering;

use phalanx_pg::{Buffer, Done, ReduceOp, Result};

use super::control::{Counter, RING};
use super::descriptor::{Descriptor, Place};
use super::local::{Current, Input, Local, PerRank, SMALL_REDUCTION};
use crate::kernels::{self, Source};

/// Slices start at multiples of this many elements: at least a cache line for every type.
const SLICE_ALIGN: usize = 128;

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
        if buf.byte_len() <= SMALL_REDUCTION
            && let Some(sources) = self.inline_sources(current.op, buf.byte_len())
        {
            if root.is_none_or(|root| root == self.me()) {
                self.reduce_inline(&buf, op, &sources);
            }
            return Ok(buf.into());
        }
        let all = self.meet(current)?;
        let inputs = self.inputs(current, &all, |_| buf.byte_len())?;
        let reduction = Reduction {
            local: self,
            current,
            all: &all,
            op,
            buf: &buf,
            root,
        };
        let places = |place| move |descriptor: &Descriptor| descriptor.place() == Some(place);
        if all.iter().all(places(Place::Shared)) {
            self.keep(current, None);
            reduction.own_slice(&inputs, 0, buf.len());
        } else {
            if all[self.me()].place() == Some(Place::Shared) {
                self.keep(current, None);
            }
            reduction.in_chunks(&inputs)?;
        }
        Ok(buf.into())
    }

    /// The whole reduction of inputs that travel with their descriptors, into the own buffer.
    pub(crate) fn reduce_inline(&self, buf: &Buffer, op: ReduceOp, sources: &[Source]) {
        let to = [buf.as_ptr().as_ptr()];
        let (kernels, size) = (self.seat.kernels, self.seat.size);
        // SAFETY: the sources are announced inputs of this length, which their ranks leave alone
        // until this one is done; the buffer is the operation's.
        unsafe { kernels::reduce(kernels, op, buf.dtype(), sources, &to, buf.len(), size) }
    }
}

struct Reduction<'a> {
    local: &'a Local,
    current: &'a Current<'a>,
    all: &'a [Descriptor],
    op: ReduceOp,
    buf: &'a Buffer,
    root: Option<usize>,
}

impl Reduction<'_> {
    /// Whether the rank gets the result.
    fn takes(&self, rank: usize) -> bool {
        self.root.is_none_or(|root| root == rank)
    }

    /// The own slice of `len` elements at the given addresses, into everybody's memory.
    fn own_slice(&self, inputs: &[Input], from: usize, len: usize) {
        let (me, ranks) = (self.local.me(), self.local.ranks());
        let start = slice_start(len, me, ranks);
        let end = slice_start(len, me + 1, ranks);
        let offset = (from + start) * self.buf.dtype().size();
        let sources = self.pointers(inputs, offset);
        let takers = sources
            .iter()
            .enumerate()
            .filter(|(rank, _)| self.takes(*rank));
        let to: PerRank<*mut u8> = takers.map(|(_, source)| source.ptr.cast_mut()).collect();
        self.reduce(&sources, &to, end - start);
    }

    fn pointers(&self, inputs: &[Input], offset: usize) -> PerRank<Source> {
        let source = |(input, descriptor): (&Input, &Descriptor)| match input {
            Input::At(ptr) => Source {
                ptr: ptr.wrapping_add(offset),
                factor: descriptor.factor,
            },
            _ => unreachable!("asked for where all is"),
        };
        inputs.iter().zip(self.all).map(source).collect()
    }

    fn reduce(&self, sources: &[Source], to: &[*mut u8], len: usize) {
        let (local, dtype) = (self.local, self.buf.dtype());
        let size = local.seat.size;
        // SAFETY: the addresses are of buffers and chunks that their ranks have announced for
        // this operation and leave alone until all have done their parts, or of the slots' inputs
        // and the own buffer; each is valid for the elements named, since lengths agree. Slices
        // of different ranks do not overlap.
        unsafe { kernels::reduce(local.seat.kernels, self.op, dtype, sources, to, len, size) }
    }

    /// Chunk by chunk: put own elements in, reduce a slice, take results out.
    fn in_chunks(&self, inputs: &[Input]) -> Result<()> {
        let (local, size) = (self.local, self.buf.dtype().size());
        let me = local.me();
        let private = matches!(inputs[me], Input::Staged);
        let per_chunk = local.control.chunk() / size;
        let chunks = self.buf.len().div_ceil(per_chunk) as u32;
        let base = local.rounds.load(Ordering::Acquire);
        if private {
            local.reserve_ring()?;
        } else {
            local.publish(Counter::Staged, base.wrapping_add(chunks));
        }
        let elements = |chunk: u32| {
            let start = chunk as usize * per_chunk;
            (start, per_chunk.min(self.buf.len() - start))
        };
        let mut staged = 0;
        let mut taken = 0;
        for chunk in 0..chunks {
            while private && staged < chunks.min(taken + RING as u32) {
                let number = base.wrapping_add(staged);
                local.await_free_chunk(self.current, number)?;
                let (start, len) = elements(staged);
                let from = self.buf.as_ptr().as_ptr().wrapping_add(start * size);
                local.copy(from, local.control.stage(me, number), len * size);
                local.publish(Counter::Staged, number.wrapping_add(1));
                staged += 1;
            }
            let number = base.wrapping_add(chunk);
            for rank in local.peers() {
                local.await_counter(self.current, rank, Counter::Staged, number.wrapping_add(1))?;
            }
            let (start, len) = elements(chunk);
            let here: PerRank<Input> = inputs
                .iter()
                .enumerate()
                .map(|(rank, input)| match input {
                    Input::At(ptr) => Input::At(ptr.wrapping_add(start * size)),
                    _ => Input::At(local.control.stage(rank, number)),
                })
                .collect();
            self.own_slice(&here, 0, len);
            local.publish(Counter::Worked, number.wrapping_add(1));
            // One behind, so that peers have time for theirs.
            if chunk > 0 {
                self.take_out(base, chunk - 1, private, elements(chunk - 1))?;
                taken = chunk;
            }
        }
        if chunks > 0 {
            self.take_out(base, chunks - 1, private, elements(chunks - 1))?;
        }
        local
            .rounds
            .store(base.wrapping_add(chunks), Ordering::Release);
        Ok(())
    }

    /// Waits until a chunk is reduced, and copies it out of the own ring.
    fn take_out(
        &self,
        base: u32,
        chunk: u32,
        private: bool,
        (start, len): (usize, usize),
    ) -> Result<()> {
        let (local, size) = (self.local, self.buf.dtype().size());
        if !private {
            return Ok(());
        }
        let number = base.wrapping_add(chunk);
        for rank in local.peers() {
            local.await_counter(self.current, rank, Counter::Worked, number.wrapping_add(1))?;
        }
        if self.takes(local.me()) {
            let to = self.buf.as_ptr().as_ptr().wrapping_add(start * size);
            local.copy(local.control.stage(local.me(), number), to, len * size);
        }
        Ok(())
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
