//! The loop for elements that are combined as `f32`: vectors of them at a time.
//!
//! Compilers do well with elements that are combined as they are. Sixteen-bit floats have to be widened
//! and rounded, which they do one by one; here that is written out. What is the same for vectors of all
//! sizes is here, what is not is in `avx2.rs` and `avx512.rs`.

use super::element::{Avg, Element, Max, Min, Operator, PremulSum, Product, Sum};
use super::{Job, Source, blocks};

/// A vector of `f32`.
///
/// # Safety
///
/// Of all functions: the processor has its instructions. They are inlined into functions that are
/// compiled for these.
pub(super) trait Vector: Copy {
    /// How many.
    const LEN: usize;
    unsafe fn splat(value: f32) -> Self;
    unsafe fn add(a: Self, b: Self) -> Self;
    unsafe fn mul(a: Self, b: Self) -> Self;
    unsafe fn div(a: Self, b: Self) -> Self;
    /// The first where it is a NaN or not above the second, otherwise the second.
    unsafe fn lower(a: Self, b: Self) -> Self;
    /// The first where it is a NaN or not below the second, otherwise the second.
    unsafe fn higher(a: Self, b: Self) -> Self;
}

/// Implements [`Vector`] by expressions.
macro_rules! vector {
    ($vector:ty, $len:literal; $($function:ident: |$($arg:ident: $type:ty),*| $body:expr;)*) => {
        impl Vector for $vector {
            const LEN: usize = $len;

            $(
                #[inline(always)]
                unsafe fn $function($($arg: $type),*) -> Self {
                    // SAFETY: the caller's.
                    unsafe { $body }
                }
            )*
        }
    };
}

pub(super) use vector;

/// Two vectors, widened, in the order in which the element type is fastest.
pub(super) type Pair<V> = [V; 2];

/// An element that is combined as `f32`, a pair of vectors at a time.
///
/// # Safety
///
/// Of all functions: as many elements can be read or written at the pointer, and as [`Vector`].
pub(super) trait Lanes<V: Vector>: Element<Wide = f32> {
    /// A pair ready to be stored.
    type Packed: Copy;
    unsafe fn load(ptr: *const Self) -> Pair<V>;
    unsafe fn pack(pair: Pair<V>) -> Self::Packed;
    unsafe fn store(ptr: *mut Self, packed: Self::Packed);
}

/// Implements [`Lanes`] by two expressions on vectors. An array of elements is read and written
/// where intrinsics for unaligned memory would be called, because these check their arguments in
/// builds with debug assertions, at half the speed.
macro_rules! lanes {
    ($vector:ty; $($type:ty as $raw:ty {
        load: |$in:ident| $load:expr;
        pack: |$low:ident, $high:ident| $pack:expr;
    })*) => {$(
        impl Lanes<$vector> for $type {
            type Packed = $raw;

            #[inline(always)]
            unsafe fn load(from: *const Self) -> Pair<$vector> {
                const LEN: usize = 2 * <$vector as Vector>::LEN;
                // SAFETY: the caller's; all bits are vectors.
                unsafe {
                    let $in = transmute::<[Self; LEN], $raw>(from.cast::<[Self; LEN]>().read());
                    $load
                }
            }

            #[allow(unused_unsafe, reason = "wide elements are stored as they are")]
            #[inline(always)]
            unsafe fn pack([$low, $high]: Pair<$vector>) -> $raw {
                // SAFETY: the caller's.
                unsafe { $pack }
            }

            #[inline(always)]
            unsafe fn store(to: *mut Self, packed: $raw) {
                const LEN: usize = 2 * <$vector as Vector>::LEN;
                // SAFETY: the caller's; all bits are elements.
                unsafe { to.cast::<[Self; LEN]>().write(transmute::<$raw, [Self; LEN]>(packed)) }
            }
        }
    )*};
}

pub(super) use lanes;

/// A wide element that is loaded and stored in the order of [`Bf16`](super::element::Bf16)'s pairs: even
/// elements, then odd ones.
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

/// An operator on a vector at once. See [`Operator`].
///
/// # Safety
///
/// Of all functions: as [`Vector`].
pub(super) trait LaneOperator: Operator<f32> {
    #[inline(always)]
    unsafe fn enter_lanes<V: Vector>(elements: V, _factor: f64) -> V {
        elements
    }

    unsafe fn combine_lanes<V: Vector>(a: V, b: V) -> V;

    #[inline(always)]
    unsafe fn leave_lanes<V: Vector>(all: V, _ranks: usize) -> V {
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
                unsafe fn $function<V: Vector>($a: V, $b: $type) -> V {
                    // SAFETY: the caller's.
                    unsafe { $body }
                }
            )*
        }
    )*};
}

lane_operators! {
    Sum {
        combine_lanes: |a, b: V| V::add(a, b);
    }
    PremulSum {
        enter_lanes: |elements, factor: f64| V::mul(elements, V::splat(factor as f32));
        combine_lanes: |a, b: V| V::add(a, b);
    }
    Avg {
        combine_lanes: |a, b: V| V::add(a, b);
        leave_lanes: |all, ranks: usize| V::div(all, V::splat(ranks as f32));
    }
    Product {
        combine_lanes: |a, b: V| V::mul(a, b);
    }
    Min {
        combine_lanes: |a, b: V| V::lower(a, b);
    }
    Max {
        combine_lanes: |a, b: V| V::higher(a, b);
    }
}

/// Pairs per block: enough additions that do not wait for each other to fill the pipeline.
const PAIRS: usize = 2;

/// The plain loop with pairs of vectors for elements.
///
/// # Safety
///
/// As [`blocks::run`], and as [`Vector`].
#[inline(always)]
pub(super) unsafe fn run<V, I, O, P>(job: &Job<'_>)
where
    V: Vector,
    I: Lanes<V>,
    O: Lanes<V>,
    P: LaneOperator,
{
    let block = PAIRS * 2 * V::LEN;
    let size = size_of::<I>();
    let mut at = 0;
    if let Some(ahead) = job.ahead {
        blocks::ask(job, 0, ahead.bytes.min(job.len * size), ahead);
        // Not beyond the end, as there.
        let end = job.len.saturating_sub(ahead.bytes / size);
        while end.saturating_sub(at) >= block {
            blocks::ask(job, at * size + ahead.bytes, block * size, ahead);
            // SAFETY: passed on; the block ends before `job.len`.
            unsafe { one_block::<V, I, O, P>(job, at) };
            at += block;
        }
    }
    while job.len - at >= block {
        // SAFETY: passed on; the block ends before `job.len`.
        unsafe { one_block::<V, I, O, P>(job, at) };
        at += block;
    }
    // SAFETY: passed on.
    unsafe { blocks::run_from::<false, I, O, P>(job, at) }
}

/// The block that begins at `at`.
///
/// # Safety
///
/// As [`run`]; the block ends before `job.len`.
#[expect(
    clippy::needless_range_loop,
    reason = "iterators are not always vectorised"
)]
#[inline(always)]
unsafe fn one_block<V, I, O, P>(job: &Job<'_>, at: usize)
where
    V: Vector,
    I: Lanes<V>,
    O: Lanes<V>,
    P: LaneOperator,
{
    let (first, others) = job.sources.split_first().expect("there is a source");
    let of = |pair: usize| at + pair * 2 * V::LEN;
    // SAFETY: the elements are within each source and destination, and nobody else touches them now.
    // Where a destination is a source, all sources were read before it is written. The processor has
    // the instructions.
    unsafe {
        let mut all = [load::<V, I, P>(first, of(0)); PAIRS];
        for j in 1..PAIRS {
            all[j] = load::<V, I, P>(first, of(j));
        }
        for source in others {
            for (j, a) in all.iter_mut().enumerate() {
                let b = load::<V, I, P>(source, of(j));
                *a = [P::combine_lanes(a[0], b[0]), P::combine_lanes(a[1], b[1])];
            }
        }
        let mut out = [pack::<V, O, P>(all[0], job.ranks); PAIRS];
        for j in 1..PAIRS {
            out[j] = pack::<V, O, P>(all[j], job.ranks);
        }
        job.dests.each(job.sources, |dest| {
            for (j, packed) in out.iter().enumerate() {
                O::store(dest.cast::<O>().add(of(j)), *packed);
            }
        });
    }
}

/// A pair of vectors as it enters the reduction.
///
/// # Safety
///
/// As [`Lanes`].
#[inline(always)]
unsafe fn load<V: Vector, I: Lanes<V>, P: LaneOperator>(source: &Source, at: usize) -> Pair<V> {
    // SAFETY: the caller's.
    unsafe {
        let [a, b] = I::load(source.ptr.cast::<I>().add(at));
        [
            P::enter_lanes(a, source.factor),
            P::enter_lanes(b, source.factor),
        ]
    }
}

/// A pair of vectors as it leaves the reduction.
///
/// # Safety
///
/// As [`Lanes`].
#[inline(always)]
unsafe fn pack<V: Vector, O: Lanes<V>, P: LaneOperator>(
    [a, b]: Pair<V>,
    ranks: usize,
) -> O::Packed {
    // SAFETY: the caller's.
    unsafe { O::pack([P::leave_lanes(a, ranks), P::leave_lanes(b, ranks)]) }
}
