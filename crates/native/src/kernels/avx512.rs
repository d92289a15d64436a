//! Loops for processors with AVX-512.
//!
//! A vector is a cache line: each line of a peer is asked for once and written in one piece, which is
//! what counts where lines come from another processor. Sixteen-bit floats are converted as with
//! AVX2.

use super::element::{Element, Operator};
use super::{Job, avx2, blocks};

/// How far ahead sources are asked for, if at all. Processors do so by themselves within a page, but
/// may be slow to begin. In a trial with two processes on an Intel Xeon 1 and 2 KiB were about the same
/// from 64 KiB to 16 MiB and a little better than none; 4 KiB was worse at 64 KiB.
const AHEAD_BYTES: usize = 1024;

/// The plain loop, vectorised by the compiler.
///
/// # Safety
///
/// As [`blocks::run`], on a processor with AVX-512 (its foundation, and bytes and words).
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn run<I, O, P>(job: &Job<'_>)
where
    I: Element,
    O: Element<Wide = I::Wide>,
    P: Operator<I::Wide>,
{
    // SAFETY: passed on; a processor with AVX-512 has AVX2 and F16C.
    unsafe {
        match size_of::<I>() < 4 {
            // A block is less than a line.
            true => avx2::run::<I, O, P>(job),
            false => blocks::run_from::<AHEAD_BYTES, I, O, P>(job, 0),
        }
    }
}
