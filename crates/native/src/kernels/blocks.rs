//! The one loop: a block of every source into local memory, combined there, written to every
//! destination.
//!
//! The local accumulator is what makes this fast: nothing that is written can alias what is still
//! to be read, so compilers vectorise without checks, and each source and destination is touched
//! once.

use super::element::{Element, Operator};
use super::hint::fetch;
use super::{Job, Source};

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
    unsafe { run_from::<0, I, O, P>(job, 0) }
}

/// Does the elements from `start` on. If the job wants it, asks for sources `AHEAD` bytes before they
/// are read.
///
/// # Safety
///
/// As [`run`].
#[inline(always)]
pub(super) unsafe fn run_from<const AHEAD: usize, I, O, P>(job: &Job<'_>, start: usize)
where
    I: Element,
    O: Element<Wide = I::Wide>,
    P: Operator<I::Wide>,
{
    // SAFETY: passed on.
    unsafe {
        let done = known::<2, AHEAD, I, O, P>(job, start) || known::<4, AHEAD, I, O, P>(job, start);
        if !done {
            all_blocks::<AHEAD, I, O, P>(job, start);
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
unsafe fn known<const N: usize, const AHEAD: usize, I, O, P>(job: &Job<'_>, start: usize) -> bool
where
    I: Element,
    O: Element<Wide = I::Wide>,
    P: Operator<I::Wide>,
{
    let (Ok(&sources), Ok(&dests)) = (
        <&[Source; N]>::try_from(job.sources),
        <&[*mut u8; N]>::try_from(job.dests),
    ) else {
        return false;
    };
    let (sources, dests) = (&sources, &dests);
    // SAFETY: passed on.
    unsafe {
        all_blocks::<AHEAD, I, O, P>(
            &Job {
                sources,
                dests,
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
unsafe fn all_blocks<const AHEAD: usize, I, O, P>(job: &Job<'_>, start: usize)
where
    I: Element,
    O: Element<Wide = I::Wide>,
    P: Operator<I::Wide>,
{
    // Not beyond the end: what follows may be another rank's share, which it is working on.
    let ahead = job.len.saturating_sub(AHEAD / size_of::<I>());
    // SAFETY: passed on; no call goes beyond `job.len`.
    unsafe {
        let at = match AHEAD > 0 && job.ask_ahead {
            true => blocks::<BLOCK, AHEAD, I, O, P>(job, start, ahead),
            false => start,
        };
        let at = blocks::<BLOCK, 0, I, O, P>(job, at, job.len);
        let at = blocks::<SMALL_BLOCK, 0, I, O, P>(job, at, job.len);
        blocks::<1, 0, I, O, P>(job, at, job.len);
    }
}

/// As many whole blocks as there are from `at` to `end`; returns where the next one would begin.
#[expect(
    clippy::needless_range_loop,
    reason = "iterators are not always vectorised"
)]
#[inline(always)]
unsafe fn blocks<const B: usize, const AHEAD: usize, I, O, P>(
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
        if AHEAD > 0 {
            for source in job.sources {
                let ahead = source.ptr.wrapping_add(at * size_of::<I>() + AHEAD);
                fetch(ahead, B * size_of::<I>());
            }
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
            for dest in job.dests {
                let dest = dest.cast::<O>().add(at);
                for j in 0..B {
                    dest.add(j).write(out[j]);
                }
            }
        }
        at += B;
    }
    at
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
