//! Loops for processors with AVX2 and F16C.
//!
//! The plain loop, compiled for these instructions, is as good as hand-written code for types that
//! are combined as they are. Sixteen-bit floats are not: widening and rounding are written out.

use std::arch::x86_64::*;
use std::mem::transmute;

use half::f16;

use super::element::{Avg, Bf16, Element, Max, Min, Operator, PremulSum, Product, Sum};
use super::{Job, Source, blocks};

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

/// Elements that are loaded, combined and stored together.
const LANES: usize = 16;

/// That many, widened, in the order in which the element type is fastest.
type Pair = [__m256; 2];

/// An element that is combined as `f32`, sixteen at a time.
///
/// # Safety
///
/// Of all functions: sixteen elements can be read or written at the pointer, and the processor has
/// AVX2 and F16C. They are inlined into functions that are compiled for these.
pub(super) trait Lanes: Element<Wide = f32> {
    /// Sixteen elements ready to be stored.
    type Packed: Copy;
    unsafe fn load(ptr: *const Self) -> Pair;
    unsafe fn pack(pair: Pair) -> Self::Packed;
    unsafe fn store(ptr: *mut Self, packed: Self::Packed);
}

/// Implements [`Lanes`] by two expressions on vectors. An array of elements is read and written
/// where intrinsics for unaligned memory would be called, because these check their arguments in
/// builds with debug assertions, at half the speed.
macro_rules! lanes {
    ($($type:ty as $raw:ty {
        load: |$in:ident| $load:expr;
        pack: |$low:ident, $high:ident| $pack:expr;
    })*) => {$(
        impl Lanes for $type {
            type Packed = $raw;

            #[inline(always)]
            unsafe fn load(from: *const Self) -> Pair {
                // SAFETY: the caller's; all bits are vectors.
                unsafe {
                    let $in = transmute::<[Self; LANES], $raw>(from.cast::<[Self; LANES]>().read());
                    $load
                }
            }

            #[allow(unused_unsafe, reason = "wide elements are stored as they are")]
            #[inline(always)]
            unsafe fn pack([$low, $high]: Pair) -> $raw {
                // SAFETY: the caller's.
                unsafe { $pack }
            }

            #[inline(always)]
            unsafe fn store(to: *mut Self, packed: $raw) {
                // SAFETY: the caller's; all bits are elements.
                unsafe { to.cast::<[Self; LANES]>().write(transmute::<$raw, [Self; LANES]>(packed)) }
            }
        }
    )*};
}

lanes! {
    f32 as Pair {
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

    EvenOdd as Pair {
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

/// A wide element that is loaded and stored in the order of [`Bf16`]'s pairs.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct EvenOdd(f32);

impl Element for EvenOdd {
    type Wide = f32;

    #[inline(always)]
    fn widen(self) -> f32 {
        self.0
    }

    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        Self(wide)
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

/// An operator on eight elements at once. See [`Operator`].
///
/// # Safety
///
/// Of all functions: the processor has AVX2.
pub(super) trait LaneOperator: Operator<f32> {
    #[inline(always)]
    unsafe fn enter_lanes(elements: __m256, _factor: f64) -> __m256 {
        elements
    }

    unsafe fn combine_lanes(a: __m256, b: __m256) -> __m256;

    #[inline(always)]
    unsafe fn leave_lanes(all: __m256, _ranks: usize) -> __m256 {
        all
    }
}

macro_rules! lane_operators {
    ($($operator:ident {
        $($function:ident: |$a:ident, $b:ident: $type:ty| $body:expr;)*
    })*) => {$(
        impl LaneOperator for $operator {
            $(
                #[inline(always)]
                unsafe fn $function($a: __m256, $b: $type) -> __m256 {
                    // SAFETY: the caller's.
                    unsafe { $body }
                }
            )*
        }
    )*};
}

lane_operators! {
    Sum {
        combine_lanes: |a, b: __m256| _mm256_add_ps(a, b);
    }
    PremulSum {
        enter_lanes: |elements, factor: f64| _mm256_mul_ps(elements, _mm256_set1_ps(factor as f32));
        combine_lanes: |a, b: __m256| _mm256_add_ps(a, b);
    }
    Avg {
        combine_lanes: |a, b: __m256| _mm256_add_ps(a, b);
        leave_lanes: |all, ranks: usize| _mm256_div_ps(all, _mm256_set1_ps(ranks as f32));
    }
    Product {
        combine_lanes: |a, b: __m256| _mm256_mul_ps(a, b);
    }
    Min {
        combine_lanes: |a, b: __m256| first_if_nan_or(_mm256_cmp_ps::<_CMP_LE_OQ>(a, b), a, b);
    }
    Max {
        combine_lanes: |a, b: __m256| first_if_nan_or(_mm256_cmp_ps::<_CMP_GE_OQ>(a, b), a, b);
    }
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

/// Pairs per block: enough additions that do not wait for each other to fill the pipeline.
const PAIRS: usize = 2;

/// The plain loop with pairs of vectors for elements.
///
/// # Safety
///
/// As [`blocks::run`], on a processor with AVX2 and F16C.
#[expect(
    clippy::needless_range_loop,
    reason = "iterators are not always vectorised"
)]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn run_lanes<I, O, P>(job: &Job<'_>)
where
    I: Lanes,
    O: Lanes,
    P: LaneOperator,
{
    let (first, others) = job.sources.split_first().expect("there is a source");
    let mut at = 0;
    while job.len - at >= PAIRS * LANES {
        // SAFETY: elements `at..at + PAIRS * LANES` are within each source and destination, and
        // nobody else touches them now. Where a destination is a source, all sources were read
        // before it is written. The processor has the instructions.
        unsafe {
            let mut all = [load::<I, P>(first, at); PAIRS];
            for j in 1..PAIRS {
                all[j] = load::<I, P>(first, at + j * LANES);
            }
            for source in others {
                for (j, a) in all.iter_mut().enumerate() {
                    let b = load::<I, P>(source, at + j * LANES);
                    *a = [P::combine_lanes(a[0], b[0]), P::combine_lanes(a[1], b[1])];
                }
            }
            let mut out = [pack::<O, P>(all[0], job.ranks); PAIRS];
            for j in 1..PAIRS {
                out[j] = pack::<O, P>(all[j], job.ranks);
            }
            for dest in job.dests {
                for (j, packed) in out.iter().enumerate() {
                    O::store(dest.cast::<O>().add(at + j * LANES), *packed);
                }
            }
        }
        at += PAIRS * LANES;
    }
    // SAFETY: passed on.
    unsafe { blocks::run_from::<false, I, O, P>(job, at) }
}

/// Sixteen elements as they enter the reduction.
///
/// # Safety
///
/// As [`Lanes`].
#[inline(always)]
unsafe fn load<I: Lanes, P: LaneOperator>(source: &Source, at: usize) -> Pair {
    // SAFETY: the caller's.
    unsafe {
        let [a, b] = I::load(source.ptr.cast::<I>().add(at));
        [
            P::enter_lanes(a, source.factor),
            P::enter_lanes(b, source.factor),
        ]
    }
}

/// Sixteen elements as they leave the reduction.
///
/// # Safety
///
/// As [`Lanes`].
#[inline(always)]
unsafe fn pack<O: Lanes, P: LaneOperator>([a, b]: Pair, ranks: usize) -> O::Packed {
    // SAFETY: the caller's.
    unsafe { O::pack([P::leave_lanes(a, ranks), P::leave_lanes(b, ranks)]) }
}
