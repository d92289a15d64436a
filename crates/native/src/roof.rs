//! What an all-reduce of shared memory cannot do without.

use phalanx_pg::{DType, ReduceOp};
use smallvec::SmallVec;

use crate::kernels::{self, Dests, Kernels, Source};

/// Makes every slice the sum of all: what an all-reduce does to elements, in one process and with
/// nothing to wait for. `phalanx bench allreduce` takes it for the roof of its figures.
///
/// # Panics
///
/// If there is no slice, or they have different lengths.
pub fn sum_into_all(slices: &mut [&mut [f32]]) {
    let len = slices.first().expect("there is a slice").len();
    let same = slices.iter().all(|slice| slice.len() == len);
    assert!(same, "slices of different lengths");
    let source = |slice: &mut &mut [f32]| Source {
        ptr: slice.as_mut_ptr().cast(),
        factor: 1.0,
        far: false,
    };
    let sources: SmallVec<[Source; 8]> = slices.iter_mut().map(source).collect();
    let loops = Kernels::detect().unwrap_or(Kernels::Portable);
    let (op, dtype) = (ReduceOp::Sum, DType::F32);
    // SAFETY: the slices are borrowed for the call, are of `f32`, have `len` elements each and do not
    // overlap; each is both a source and a destination.
    unsafe { kernels::reduce(loops, op, dtype, &sources, Dests::Sources, len, 1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slice_becomes_the_sum_of_all() {
        for len in [0, 1, 31, 32, 1000] {
            let slice = |rank: usize| -> Vec<f32> { (0..len).map(|i| (i * rank) as f32).collect() };
            let mut slices: Vec<_> = (1..=3).map(slice).collect();
            let mut all: Vec<_> = slices.iter_mut().map(Vec::as_mut_slice).collect();
            sum_into_all(&mut all);
            assert!(slices.iter().all(|sums| *sums == slice(6)), "{len}");
        }
    }
}
