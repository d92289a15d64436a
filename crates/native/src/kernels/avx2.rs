//! Loops for processors with AVX2 and F16C.

use std::arch::x86_64::*;
use std::mem::transmute;

use half::f16;

use super::element::{Bf16, Element, Operator};
use super::lanes::{self, EvenOdd, LaneOperator, Lanes, Pair, Vector};
use super::{Job, blocks};

/// The plain loop, vectorised by the compiler.
///
/// # Safety
///
/// As [`blocks::run`], on a processor with AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn run<I, O, P>(job: &Job<'_>)
where
    I: Element,
    O: Element<Wide = I::Wide>,
    P: Operator<I::Wide>,
{
    // SAFETY: passed on.
    unsafe { blocks::run::<I, O, P>(job) }
}

/// The loop for elements that are combined as `f32`.
///
/// # Safety
///
/// As [`run`].
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn run_lanes<I, O, P>(job: &Job<'_>)
where
    I: Lanes<__m256>,
    O: Lanes<__m256>,
    P: LaneOperator,
{
    // SAFETY: passed on.
    unsafe { lanes::run::<__m256, I, O, P>(job) }
}

lanes::vector! { __m256, 8;
    splat: |value: f32| _mm256_set1_ps(value);
    add: |a: Self, b: Self| _mm256_add_ps(a, b);
    mul: |a: Self, b: Self| _mm256_mul_ps(a, b);
    div: |a: Self, b: Self| _mm256_div_ps(a, b);
    lower: |a: Self, b: Self| first_if_nan_or(_mm256_cmp_ps::<_CMP_LE_OQ>(a, b), a, b);
    higher: |a: Self, b: Self| first_if_nan_or(_mm256_cmp_ps::<_CMP_GE_OQ>(a, b), a, b);
}

/// `a` where it is a NaN or `mask` is set, otherwise `b`.
///
/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
unsafe fn first_if_nan_or(mask: __m256, a: __m256, b: __m256) -> __m256 {
    // SAFETY: the caller's.
    unsafe {
        let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(a, a);
        _mm256_blendv_ps(b, a, _mm256_or_ps(mask, nan))
    }
}

lanes::lanes! { __m256;
    f32 as Pair<__m256> {
        load: |pair| pair;
        pack: |low, high| [low, high];
    }

    f16 as [__m128i; 2] {
        load: |bits| [_mm256_cvtph_ps(bits[0]), _mm256_cvtph_ps(bits[1])];
        pack: |low, high| [
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low),
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high),
        ];
    }

    // Even elements, then odd ones: no shuffle is needed to get them apart and together again.
    Bf16 as __m256i {
        load: |bits| {
            let even = _mm256_slli_epi32::<16>(bits);
            let odd = _mm256_and_si256(bits, _mm256_set1_epi32(!0xffff));
            [_mm256_castsi256_ps(even), _mm256_castsi256_ps(odd)]
        };
        pack: |even, odd| {
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(even, odd);
            let [even, odd] = if _mm256_testz_ps(nan, nan) == 0 {
                [round_or_quieten(even), round_or_quieten(odd)]
            } else {
                [round(even), round(odd)]
            };
            _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(even), odd)
        };
    }

    EvenOdd as Pair<__m256> {
        load: |pair| {
            let even = _mm256_castps_pd(_mm256_shuffle_ps::<0b10_00_10_00>(pair[0], pair[1]));
            let odd = _mm256_castps_pd(_mm256_shuffle_ps::<0b11_01_11_01>(pair[0], pair[1]));
            [
                _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(even)),
                _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(odd)),
            ]
        };
        pack: |even, odd| {
            let (a, b) = (_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
            [_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b)]
        };
    }
}

/// [`Bf16::narrow`] of eight elements, none a NaN, to the upper halves of their lanes.
///
/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
unsafe fn round(wide: __m256) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let bits = _mm256_castps_si256(wide);
        let last = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)))
    }
}

/// [`round`] of elements some of which may be NaNs.
///
/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
unsafe fn round_or_quieten(wide: __m256) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let quiet = _mm256_or_si256(_mm256_castps_si256(wide), _mm256_set1_epi32(0x0040_0000));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(wide, wide));
        _mm256_blendv_epi8(round(wide), quiet, nan)
    }
}
