//! What one element means: how it is widened, combined and narrowed.
//!
//! `phalanx_pg::reduce` is the rule book; this says the same in a form that compilers vectorise:
//! no branch depends on the operator, and rounding selects instead of branching.

use half::f16;
use num_complex::Complex;

/// An element as it lies in memory.
pub(super) trait Element: Copy {
    /// The type that elements are combined in.
    type Wide: Copy;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
}

/// A reduction operator on the wide type.
pub(super) trait Operator<W> {
    /// An element as it enters the reduction, given its source's factor.
    #[inline(always)]
    fn enter(element: W, _factor: f64) -> W {
        element
    }

    /// Two elements as one.
    fn combine(a: W, b: W) -> W;

    /// All elements as one, as it leaves the reduction, given the number of ranks.
    #[inline(always)]
    fn leave(all: W, _ranks: usize) -> W {
        all
    }
}

pub(super) enum Sum {}
pub(super) enum PremulSum {}
pub(super) enum Avg {}
pub(super) enum Product {}
pub(super) enum Min {}
pub(super) enum Max {}
pub(super) enum And {}
pub(super) enum Or {}
pub(super) enum Xor {}

macro_rules! as_it_is {
    ($($type:ty),*) => {$(
        impl Element for $type {
            type Wide = $type;

            #[inline(always)]
            fn widen(self) -> $type {
                self
            }

            #[inline(always)]
            fn narrow(wide: $type) -> $type {
                wide
            }
        }
    )*};
}

macro_rules! operators {
    ($type:ty: $($operator:ident = |$a:ident, $b:ident| $combine:expr;)*) => {$(
        impl Operator<$type> for $operator {
            #[inline(always)]
            fn combine($a: $type, $b: $type) -> $type {
                $combine
            }
        }
    )*};
}

macro_rules! floats {
    ($($type:ty),*) => {$(
        as_it_is!($type);

        impl Operator<$type> for PremulSum {
            #[inline(always)]
            fn enter(element: $type, factor: f64) -> $type {
                element * factor as $type
            }

            #[inline(always)]
            fn combine(a: $type, b: $type) -> $type {
                a + b
            }
        }

        impl Operator<$type> for Avg {
            #[inline(always)]
            fn combine(a: $type, b: $type) -> $type {
                a + b
            }

            #[inline(always)]
            fn leave(all: $type, ranks: usize) -> $type {
                all / ranks as $type
            }
        }

        operators! { $type:
            Sum = |a, b| a + b;
            Product = |a, b| a * b;
            Min = |a, b| if a.is_nan() | (a <= b) { a } else { b };
            Max = |a, b| if a.is_nan() | (a >= b) { a } else { b };
        }
    )*};
}

floats!(f32, f64);

macro_rules! integers {
    ($($type:ty),*) => {$(
        as_it_is!($type);

        operators! { $type:
            Sum = |a, b| a.wrapping_add(b);
            Product = |a, b| a.wrapping_mul(b);
            Min = |a, b| a.min(b);
            Max = |a, b| a.max(b);
            And = |a, b| a & b;
            Or = |a, b| a | b;
            Xor = |a, b| a ^ b;
        }
    )*};
}

integers!(i8, u8, i16, i32, i64);

/// Only products come here: for everything else a complex number is two real ones.
impl Operator<Complex<f32>> for Product {
    #[inline(always)]
    fn combine(a: Complex<f32>, b: Complex<f32>) -> Complex<f32> {
        a * b
    }
}

as_it_is!(Complex<f32>);

/// A boolean as its byte: anything but zero is true, and true is one.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Truth(u8);

impl Element for Truth {
    type Wide = u8;

    #[inline(always)]
    fn widen(self) -> u8 {
        u8::from(self.0 != 0)
    }

    #[inline(always)]
    fn narrow(wide: u8) -> Self {
        Self(wide)
    }
}

/// Bits of a 16-bit float.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Bf16(pub(super) u16);

impl Element for Bf16 {
    type Wide = f32;

    /// A signalling NaN stays one here; whatever is done to it next, `narrow` at the latest,
    /// makes it quiet.
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    /// To the nearest, ties to even; a NaN keeps its upper bits and becomes quiet.
    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        let bits = wide.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        let quiet = bits | 0x0040_0000;
        let bits = if wide.is_nan() { quiet } else { rounded };
        Self((bits >> 16) as u16)
    }
}

impl Element for f16 {
    type Wide = f32;

    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        f16::from_f32(wide)
    }
}
