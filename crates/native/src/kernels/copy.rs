//! Copies of bytes.

use super::Kernels;

/// Copies of at least this many bytes go past the cache: what they write is larger than what the
/// cache could keep for the reader, and stores that need not fetch the line first are faster.
const PAST_THE_CACHE_BYTES: usize = 16 << 20;

/// Copies `bytes` bytes. When it returns, the bytes are visible to whoever sees a flag that the
/// caller sets afterwards with release ordering, as with any other store.
///
/// # Safety
///
/// `src` is readable and `dst` writable for `bytes` bytes, they do not overlap, and during the call
/// nobody else writes to the one or touches the other.
pub(crate) unsafe fn copy(kernels: Kernels, src: *const u8, dst: *mut u8, bytes: usize) {
    // SAFETY: passed on.
    unsafe { copy_with(kernels, bytes >= PAST_THE_CACHE_BYTES, src, dst, bytes) }
}

/// # Safety
///
/// As [`copy`].
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables))]
pub(super) unsafe fn copy_with(
    kernels: Kernels,
    past_the_cache: bool,
    src: *const u8,
    dst: *mut u8,
    bytes: usize,
) {
    // SAFETY: passed on; `Avx2` and `Avx512` exist only where the processor has them.
    unsafe {
        match kernels {
            #[cfg(target_arch = "x86_64")]
            Kernels::Avx2 | Kernels::Avx512(_) if past_the_cache => stream(src, dst, bytes),
            _ => dst.copy_from_nonoverlapping(src, bytes),
        }
    }
}

/// # Safety
///
/// As [`copy`], on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn stream(src: *const u8, dst: *mut u8, bytes: usize) {
    use std::arch::x86_64::*;

    const LINE: usize = 64;
    let head = dst.align_offset(LINE).min(bytes);
    let lines = (bytes - head) / LINE;
    // SAFETY: `head + lines * LINE <= bytes`; from `head` on the destination is aligned for
    // non-temporal stores.
    unsafe {
        dst.copy_from_nonoverlapping(src, head);
        for line in 0..lines {
            let at = head + line * LINE;
            let from = src.add(at).cast::<__m256i>();
            let to = dst.add(at).cast::<__m256i>();
            let (low, high) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
            _mm256_stream_si256(to, low);
            _mm256_stream_si256(to.add(1), high);
        }
        // Non-temporal stores are not ordered by later stores, a flag's included.
        _mm_sfence();
        let done = head + lines * LINE;
        dst.add(done)
            .copy_from_nonoverlapping(src.add(done), bytes - done);
    }
}
