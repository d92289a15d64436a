//! Copies of much memory, line by line, within the cache or past it.
//!
//! An ordinary store to memory that is not in the cache reads the line first and pushes another one
//! out. Where what is written is larger than the cache, neither is of use, and leaving it out saves
//! a third of the memory's work in a copy. And within the cache a loop over lines may be faster than
//! the C library's `memcpy`, which from a few kilobytes on leaves the copy to one instruction
//! (`rep movsb`) on processors that claim to be good at it.

use bytemuck::{Pod, Zeroable, cast_slice_mut, pod_align_to_mut, pod_read_unaligned};

const LINE: usize = 64;

/// How a copy writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stores {
    /// Into the cache, for who reads it next.
    Ordinary,
    /// Past the cache: somebody reads it when much else has been written.
    PastCache,
}

/// What a processor writes to memory in one piece.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

// SAFETY: bytes, all zeros included.
unsafe impl Zeroable for Line {}
// SAFETY: as many bytes as its alignment, so without padding; any bits are bytes.
unsafe impl Pod for Line {}

/// `dst = src`.
///
/// When it returns, the bytes are as visible to others as any that were written.
///
/// # Panics
///
/// If the lengths differ.
pub fn copy_lines(stores: Stores, dst: &mut [u8], src: &[u8]) {
    if stores == Stores::PastCache {
        return map_past_cache(dst, src, |byte: u8| byte);
    }
    let (lines, tail) = dst.as_chunks_mut();
    let (from, last) = src.as_chunks();
    assert_eq!(lines.len(), from.len(), "lengths differ");
    lines
        .iter_mut()
        .zip(from)
        .for_each(|(to, from)| copy_line(to, from));
    tail.copy_from_slice(last);
}

/// `dst[i] = f(src[i])`, past the cache. `src` are bytes of any alignment.
///
/// When it returns, the values are as visible to others as any that were written.
///
/// # Panics
///
/// If `src` has not as many elements as `dst`.
#[inline]
pub fn map_past_cache<D: Pod, S: Pod>(dst: &mut [D], src: &[u8], f: impl Fn(S) -> D) {
    assert_eq!(src.len(), dst.len() * size_of::<S>(), "lengths differ");
    let map = |dst: &mut [D], src: &[u8]| {
        let values = src.chunks_exact(size_of::<S>()).map(pod_read_unaligned);
        dst.iter_mut()
            .zip(values)
            .for_each(|(to, from)| *to = f(from));
    };
    let (head, lines, tail) = pod_align_to_mut::<D, Line>(dst);
    let (first, src) = src.split_at(head.len() * size_of::<S>());
    let (middle, last) = src.split_at(src.len() - tail.len() * size_of::<S>());
    map(head, first);
    let sources = middle.chunks_exact(LINE / size_of::<D>() * size_of::<S>());
    for (to, from) in lines.iter_mut().zip(sources) {
        let mut line = Line::zeroed();
        map(cast_slice_mut(&mut line.0), from);
        store_past_cache(to, line);
    }
    fence();
    map(tail, last);
}

/// In vectors: the compiler would make a `memcpy` of a loop that assigns arrays.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
fn copy_line(to: &mut [u8; LINE], from: &[u8; LINE]) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm_storeu_si128};

    let (to, from) = (to.as_mut_ptr(), from.as_ptr());
    // SAFETY: four vectors fill a line; every x86-64 has these instructions, for any alignment.
    unsafe {
        let vectors = [0, 16, 32, 48].map(|at| _mm_loadu_si128(from.add(at).cast()));
        _mm_storeu_si128(to.cast(), vectors[0]);
        _mm_storeu_si128(to.add(16).cast(), vectors[1]);
        _mm_storeu_si128(to.add(32).cast(), vectors[2]);
        _mm_storeu_si128(to.add(48).cast(), vectors[3]);
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
fn store_past_cache(to: &mut Line, line: Line) {
    use std::arch::x86_64::{__m128i, _mm_load_si128, _mm_stream_si128};

    let to = std::ptr::from_mut(to).cast::<__m128i>();
    let from = (&raw const line).cast::<__m128i>();
    for part in 0..LINE / size_of::<__m128i>() {
        // SAFETY: four vectors fill a line; lines are aligned; every x86-64 has these instructions.
        // Nobody looks at the line before the fence, since `map_past_cache` has it exclusively.
        unsafe { _mm_stream_si128(to.add(part), _mm_load_si128(from.add(part))) }
    }
}

/// Stores past the cache are not ordered by later ones, a flag's or a lock's included.
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn fence() {
    // SAFETY: every x86-64 has this instruction.
    unsafe { std::arch::x86_64::_mm_sfence() }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn copy_line(to: &mut [u8; LINE], from: &[u8; LINE]) {
    *to = *from;
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn store_past_cache(to: &mut Line, line: Line) {
    *to = line;
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn fence() {}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_byte_arrives_and_none_beside_it(
            src in prop::collection::vec(any::<u8>(), 0..2000),
            before in 0usize..130,
            shift in 0usize..8,
        ) {
            let src = &src[shift.min(src.len())..];
            for stores in [Stores::Ordinary, Stores::PastCache] {
                let mut dst = vec![0xa5u8; before + src.len() + 70];
                copy_lines(stores, &mut dst[before..before + src.len()], src);
                let mut expected = vec![0xa5u8; dst.len()];
                expected[before..before + src.len()].copy_from_slice(src);
                prop_assert_eq!(dst, expected);
            }
        }

        #[test]
        fn elements_are_mapped_in_order_from_any_alignment(
            values in prop::collection::vec(any::<i16>(), 0..500),
            skip in 0usize..40,
        ) {
            let skip = skip.min(values.len());
            let mut bytes = vec![0u8];
            bytes.extend_from_slice(bytemuck::cast_slice(&values[skip..]));
            let half = |value: i16| f64::from(value) * 0.5;
            let halves = values.iter().skip(skip).map(|&value| half(value));
            let expected: Vec<f64> = std::iter::repeat_n(-1.0, skip).chain(halves).collect();
            let mut dst = vec![-1.0f64; values.len()];
            map_past_cache(&mut dst[skip..], &bytes[1..], half);
            prop_assert_eq!(dst, expected);
        }
    }

    #[test]
    #[should_panic(expected = "lengths differ")]
    fn lengths_must_agree() {
        copy_lines(Stores::PastCache, &mut [0; 3], &[0; 2]);
    }

    #[test]
    #[should_panic(expected = "lengths differ")]
    fn whole_lines_must_agree_too() {
        copy_lines(Stores::Ordinary, &mut [0; 64], &[0; 128]);
    }
}
