//! The one loop: a block of every source into local memory, combined there, written to every
//! destination.
//!
//! The local accumulator is what makes this fast: nothing that is written can alias what is still
//! to be read, so compilers vectorise without checks, and each source and destination is touched
//! once.

use super::element::{Element, Operator};
use super::hint::{fetch, fetch_behind};
use super::{Ahead, Dests, Job, Source};

/// Elements per block: four vectors of `f32`, enough independent additions to fill the pipeline.
const BLOCK: usize = 32;

/// Elements per block behind the last full one. Small messages are all tail.
const SMALL_BLOCK: usize = 8;

/// Does the whole job.
///
/// # Safety
///
/// As [`super::reduce`], with `I` the type of the sources' elements and `O` that of the
/// destinations'.
#[inline(always)]
pub(super) unsafe fn run<I, O, P>(job: &Job<'_>)
where
    I: Element,
    O: Element<Wide = I::Wide>,
    P: Operator<I::Wide>,
{
    // SAFETY: passed on.
    unsafe { run_from::<false, I, O, P>(job, 0) }
}

/// Does the elements from `start` on. Asks for sources before they are read if it can (`ASKS`) and the
/// job says how.
///
/// # Safety
///
/// As [`run`].
#[inline(always)]
pub(super) unsafe fn run_from<const ASKS: bool, I, O, P>(job: &Job<'_>, start: usize)
where
    I: Element,
    O: Element<Wide = I::Wide>,
    P: Operator<I::Wide>,
{
    // SAFETY: passed on.
    unsafe {
        let done = known::<2, ASKS, I, O, P>(job, start) || known::<4, ASKS, I, O, P>(job, start);
        if !done {
            all_blocks::<ASKS, I, O, P>(job, start);
        }
    }
}

/// [`run_from`] if there are `N` ranks and all take the result: with the addresses in registers there
/// is less to do for each line, so that more lines are under way at a time. Says whether it was so.
///
/// # Safety
///
/// As [`run`].
#[inline(always)]
unsafe fn known<const N: usize, const ASKS: bool, I, O, P>(job: &Job<'_>, start: usize) -> bool
where
    I: Element,
    O: Element<Wide = I::Wide>,
    P: Operator<I::Wide>,
{
    let (Ok(&sources), Dests::Sources) = (<&[Source; N]>::try_from(job.sources), job.dests) else {
        return false;
    };
    // SAFETY: passed on.
    unsafe {
        all_blocks::<ASKS, I, O, P>(
            &Job {
                sources: &sources,
                dests: Dests::Sources,
                ..*job
            },
            start,
        )
    };
    true
}

/// [`run_from`] for a number of ranks that the compiler may know.
///
/// # Safety
///
/// As [`run`].
#[inline(always)]
unsafe fn all_blocks<const ASKS: bool, I, O, P>(job: &Job<'_>, start: usize)
where
    I: Element,
    O: Element<Wide = I::Wide>,
    P: Operator<I::Wide>,
{
    let mut at = start;
    if let Some(ahead) = job.ahead
        && ASKS
    {
        let first = ahead.bytes.min((job.len - start) * size_of::<I>());
        ask(job, start * size_of::<I>(), first, ahead);
        // Not beyond the end: what follows may be another rank's share, which it is working on.
        let end = job.len.saturating_sub(ahead.bytes / size_of::<I>());
        // SAFETY: passed on; `end` is not beyond `job.len`.
        at = unsafe { blocks::<BLOCK, true, I, O, P>(job, start, end) };
    }
    // SAFETY: passed on; no call goes beyond `job.len`.
    unsafe {
        at = blocks::<BLOCK, false, I, O, P>(job, at, job.len);
        at = blocks::<SMALL_BLOCK, false, I, O, P>(job, at, job.len);
        blocks::<1, false, I, O, P>(job, at, job.len);
    }
}

/// As many whole blocks as there are from `at` to `end`; returns where the next one would begin.
#[expect(
    clippy::needless_range_loop,
    reason = "iterators are not always vectorised"
)]
#[inline(always)]
unsafe fn blocks<const B: usize, const ASKS: bool, I, O, P>(
    job: &Job<'_>,
    mut at: usize,
    end: usize,
) -> usize
where
    I: Element,
    O: Element<Wide = I::Wide>,
    P: Operator<I::Wide>,
{
    let (first, others) = job.sources.split_first().expect("there is a source");
    while end.saturating_sub(at) >= B {
        if let Some(ahead) = job.ahead
            && ASKS
        {
            let from = at * size_of::<I>() + ahead.bytes;
            ask(job, from, B * size_of::<I>(), ahead);
        }
        // SAFETY: elements `at..at + B` are within each source and destination, aligned for their
        // types, and nobody else touches them now. Where a destination is a source, all sources
        // were read before it is written.
        unsafe {
            let mut all = [load::<I, P>(first, at); B];
            for j in 1..B {
                all[j] = load::<I, P>(first, at + j);
            }
            for source in others {
                for j in 0..B {
                    all[j] = P::combine(all[j], load::<I, P>(source, at + j));
                }
            }
            let mut out = [O::narrow(P::leave(all[0], job.ranks)); B];
            for j in 1..B {
                out[j] = O::narrow(P::leave(all[j], job.ranks));
            }
            job.dests.each(job.sources, |dest| {
                let dest = dest.cast::<O>().add(at);
                for j in 0..B {
                    dest.add(j).write(out[j]);
                }
            });
        }
        at += B;
    }
    at
}

/// Asks for `bytes` of every far source.
#[inline(always)]
pub(super) fn ask(job: &Job<'_>, from: usize, bytes: usize, ahead: Ahead) {
    for source in job.sources.iter().filter(|source| source.far) {
        let from = source.ptr.wrapping_add(from);
        match ahead.nearest {
            true => fetch(from, bytes),
            false => fetch_behind(from, bytes),
        }
    }
}

/// An element as it enters the reduction.
///
/// # Safety
///
/// The source has the element, and nobody writes to it now.
#[inline(always)]
unsafe fn load<I: Element, P: Operator<I::Wide>>(source: &Source, at: usize) -> I::Wide {
    // SAFETY: the caller's.
    let element = unsafe { source.ptr.cast::<I>().add(at).read() };
    P::enter(element.widen(), source.factor)
}
