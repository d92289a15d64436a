//! Loops for processors with AVX-512.
//!
//! A vector is a cache line: each line of a peer is asked for once and written in one piece, which is
//! what counts where lines come from another processor.

use std::arch::x86_64::*;
use std::mem::transmute;

use half::f16;

use super::element::{Bf16, Element, Operator};
use super::lanes::{self, EvenOdd, LaneOperator, Lanes, Pair, Vector};
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

/// The loop for 16-bit floats.
///
/// # Safety
///
/// As [`run`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn run_lanes<I, O, P>(job: &Job<'_>)
where
    I: Lanes<__m512>,
    O: Lanes<__m512>,
    P: LaneOperator,
{
    // SAFETY: passed on.
    unsafe { lanes::run::<__m512, I, O, P>(job) }
}

lanes::vector! { __m512, 16;
    splat: |value: f32| _mm512_set1_ps(value);
    add: |a: Self, b: Self| _mm512_add_ps(a, b);
    mul: |a: Self, b: Self| _mm512_mul_ps(a, b);
    div: |a: Self, b: Self| _mm512_div_ps(a, b);
    lower: |a: Self, b: Self| first_if_nan_or(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b), a, b);
    higher: |a: Self, b: Self| first_if_nan_or(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(a, b), a, b);
}

lanes::lanes! { __m512;
    f32 as Pair<__m512> {
        load: |pair| pair;
        pack: |low, high| [low, high];
    }

    f16 as __m512i {
        load: |bits| [
            _mm512_cvtph_ps(_mm512_castsi512_si256(bits)),
            _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(bits)),
        ];
        pack: |low, high| {
            let low = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low);
            let high = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high);
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
        };
    }

    // Even elements, then odd ones, as in `avx2.rs`.
    Bf16 as __m512i {
        load: |bits| {
            let even = _mm512_slli_epi32::<16>(bits);
            let odd = _mm512_and_si512(bits, _mm512_set1_epi32(!0xffff));
            [_mm512_castsi512_ps(even), _mm512_castsi512_ps(odd)]
        };
        pack: |even, odd| {
            let [even, odd] = if _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(even, odd) != 0 {
                [round_or_quieten(even), round_or_quieten(odd)]
            } else {
                [round(even), round(odd)]
            };
            _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(even), odd)
        };
    }

    EvenOdd as Pair<__m512> {
        load: |pair| {
            let [even, odd] = transmute::<[[i32; 16]; 2], [__m512i; 2]>(APART);
            [
                _mm512_permutex2var_ps(pair[0], even, pair[1]),
                _mm512_permutex2var_ps(pair[0], odd, pair[1]),
            ]
        };
        pack: |even, odd| {
            let [low, high] = transmute::<[[i32; 16]; 2], [__m512i; 2]>(TOGETHER);
            [
                _mm512_permutex2var_ps(even, low, odd),
                _mm512_permutex2var_ps(even, high, odd),
            ]
        };
    }
}

/// Where in two vectors in a row the even elements are, and the odd ones.
const APART: [[i32; 16]; 2] = [
    [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30],
    [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31],
];

/// Where in the even elements with the odd ones behind them the first half of all is, and the second.
const TOGETHER: [[i32; 16]; 2] = [
    [0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23],
    [8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31],
];

/// `a` where it is a NaN or `mask` is set, otherwise `b`.
///
/// # Safety
///
/// The processor has AVX-512.
#[inline(always)]
unsafe fn first_if_nan_or(mask: __mmask16, a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller's.
    unsafe { _mm512_mask_blend_ps(mask | nans(a), b, a) }
}

/// Which elements are NaNs.
///
/// # Safety
///
/// The processor has AVX-512.
#[inline(always)]
unsafe fn nans(wide: __m512) -> __mmask16 {
    // SAFETY: the caller's.
    unsafe { _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(wide, wide) }
}

/// [`Bf16::narrow`] of sixteen elements, none a NaN, to the upper halves of their lanes.
///
/// # Safety
///
/// The processor has AVX-512.
#[inline(always)]
unsafe fn round(wide: __m512) -> __m512i {
    // SAFETY: the caller's.
    unsafe {
        let bits = _mm512_castps_si512(wide);
        let last = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)))
    }
}

/// [`round`] of elements some of which may be NaNs.
///
/// # Safety
///
/// The processor has AVX-512.
#[inline(always)]
unsafe fn round_or_quieten(wide: __m512) -> __m512i {
    // SAFETY: the caller's.
    unsafe {
        let quiet = _mm512_or_si512(_mm512_castps_si512(wide), _mm512_set1_epi32(0x0040_0000));
        _mm512_mask_blend_epi32(nans(wide), round(wide), quiet)
    }
}
