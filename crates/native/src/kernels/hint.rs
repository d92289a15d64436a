//! Hints about which lines are needed soon. They change nothing but where the lines are.

/// Bytes that processors hand to each other at once.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Asks for memory that will be read.
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables))]
#[inline(always)]
pub(crate) fn fetch(from: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..bytes).step_by(LINE) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint, which does nothing where there is no memory.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at).cast()) }
    }
}

/// The same, into the cache behind the nearest.
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables))]
#[inline(always)]
pub(crate) fn fetch_behind(from: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..bytes).step_by(LINE) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint, which does nothing where there is no memory.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(at).cast()) }
    }
}

/// Asks for memory that will be written: takes it away from other processors that have read it.
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables))]
pub(crate) fn claim(at: *mut u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..bytes).step_by(LINE) {
        let line = at.wrapping_add(line);
        // By its name: the intrinsic becomes a read unless the whole program is compiled for
        // processors that have this one. Others take it for nothing.
        // SAFETY: a hint, which does nothing where there is no memory.
        unsafe {
            std::arch::asm!(
                "prefetchw [{line}]",
                line = in(reg) line,
                options(nostack, preserves_flags, readonly)
            );
        }
    }
}
