//! Loops for processors with AVX-512.
//!
//! A vector is a cache line: each line of a peer is asked for once and written in one piece, which is
//! what counts where lines come from another processor. Sixteen-bit floats are converted as with
//! AVX2.

use super::element::{Element, Operator};
use super::{Job, avx2, blocks};

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
            false => blocks::run_from::<true, I, O, P>(job, 0),
        }
    }
}
