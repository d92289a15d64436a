//! The meaning of the reduction operators, element by element.
//!
//! Plain and slow: what optimised backends are compared with. Contributions are combined in the
//! order given, which is rank order; 16-bit floats are widened to `f32` first, combined there and
//! rounded once at the end.

use bytemuck::pod_read_unaligned;
use half::{bf16, f16};
use num_complex::Complex;

use crate::dtype::{DType, ReduceOp};

/// One rank's part in a reduction.
#[derive(Debug, Clone, Copy)]
pub struct Contribution<'a> {
    /// Its elements.
    pub bytes: &'a [u8],
    /// Its factor in a premultiplied sum; other operators ignore it.
    pub factor: f64,
}

impl<'a> Contribution<'a> {
    /// The part of a rank that called with `op`.
    pub fn new(op: ReduceOp, bytes: &'a [u8]) -> Self {
        let factor = match op {
            ReduceOp::PremulSum(factor) => factor,
            _ => 1.0,
        };
        Self { bytes, factor }
    }
}

/// Combines all ranks' contributions into `out`.
///
/// # Panics
///
/// If lengths differ, there are no contributions, or the operator is not defined for the type.
pub fn reduce(op: ReduceOp, dtype: DType, parts: &[Contribution<'_>], out: &mut [u8]) {
    assert!(op.is_defined_for(dtype), "{op} is not defined for {dtype}");
    match dtype {
        DType::F16 => by_element::<f16>(op, parts, out),
        DType::BF16 => by_element::<bf16>(op, parts, out),
        DType::F32 => by_element::<f32>(op, parts, out),
        DType::F64 => by_element::<f64>(op, parts, out),
        DType::I8 => by_element::<i8>(op, parts, out),
        DType::U8 => by_element::<u8>(op, parts, out),
        DType::I16 => by_element::<i16>(op, parts, out),
        DType::I32 => by_element::<i32>(op, parts, out),
        DType::I64 => by_element::<i64>(op, parts, out),
        DType::Bool => by_element::<Truth>(op, parts, out),
        DType::Complex64 => by_element::<Complex<f32>>(op, parts, out),
    }
}

/// Combines `part` into `acc`, rounding to the type: one step of a reduction that goes rank by rank.
///
/// Rank by rank in order it gives the bits of [`reduce`] for types that are combined as they are,
/// so not for 16-bit floats unless there are two ranks. Averages are sums here, and factors are
/// not applied.
///
/// # Panics
///
/// If lengths differ or the operator is not defined for the type.
pub fn fold(op: ReduceOp, dtype: DType, acc: &mut [u8], part: &[u8]) {
    assert!(op.is_defined_for(dtype), "{op} is not defined for {dtype}");
    assert_eq!(acc.len(), part.len(), "contributions differ in length");
    match dtype {
        DType::F16 => fold_elements::<f16>(op, acc, part),
        DType::BF16 => fold_elements::<bf16>(op, acc, part),
        DType::F32 => fold_elements::<f32>(op, acc, part),
        DType::F64 => fold_elements::<f64>(op, acc, part),
        DType::I8 => fold_elements::<i8>(op, acc, part),
        DType::U8 => fold_elements::<u8>(op, acc, part),
        DType::I16 => fold_elements::<i16>(op, acc, part),
        DType::I32 => fold_elements::<i32>(op, acc, part),
        DType::I64 => fold_elements::<i64>(op, acc, part),
        DType::Bool => fold_elements::<Truth>(op, acc, part),
        DType::Complex64 => fold_elements::<Complex<f32>>(op, acc, part),
    }
}

/// Whether a reduction gives the same bits in whatever order ranks are combined, so that a library
/// may choose the order.
///
/// Whole numbers and booleans always do; floating-point sums and products do between two ranks.
/// (Which of several NaNs comes out is left open, as IEEE 754 does.)
pub fn is_order_free(op: ReduceOp, dtype: DType, ranks: usize) -> bool {
    match op {
        ReduceOp::Sum | ReduceOp::Product => !dtype.is_float() || ranks <= 2,
        // Zeros of different signs are equal, and which one is returned depends on the order.
        ReduceOp::Min | ReduceOp::Max => !dtype.is_float(),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => true,
        ReduceOp::Avg | ReduceOp::PremulSum(_) => false,
    }
}

/// The operator outside the loop, so that the loop has no branches.
fn fold_elements<T: Number>(op: ReduceOp, acc: &mut [u8], part: &[u8]) {
    macro_rules! each {
        ($($op:pat => $same:expr),*) => {
            match op {
                $($op => fold_with::<T>(acc, part, |a, b| T::combine($same, a, b)),)*
            }
        };
    }
    each!(
        ReduceOp::Product => ReduceOp::Product,
        ReduceOp::Min => ReduceOp::Min,
        ReduceOp::Max => ReduceOp::Max,
        ReduceOp::BitAnd => ReduceOp::BitAnd,
        ReduceOp::BitOr => ReduceOp::BitOr,
        ReduceOp::BitXor => ReduceOp::BitXor,
        _ => ReduceOp::Sum
    );
}

#[inline(always)]
fn fold_with<T: Number>(
    acc: &mut [u8],
    part: &[u8],
    combine: impl Fn(T::Wide, T::Wide) -> T::Wide,
) {
    let size = size_of::<T>();
    for (slot, other) in acc.chunks_exact_mut(size).zip(part.chunks_exact(size)) {
        let sum = combine(
            pod_read_unaligned::<T>(slot).widen(),
            pod_read_unaligned::<T>(other).widen(),
        );
        slot.copy_from_slice(bytemuck::bytes_of(&T::narrow(sum)));
    }
}

fn by_element<T: Number>(op: ReduceOp, parts: &[Contribution<'_>], out: &mut [u8]) {
    let size = size_of::<T>();
    let wide = |part: &Contribution<'_>, at: usize| {
        let value = pod_read_unaligned::<T>(&part.bytes[at..at + size]).widen();
        match op {
            ReduceOp::PremulSum(_) => T::scale(value, part.factor),
            _ => value,
        }
    };
    for part in parts {
        assert_eq!(
            part.bytes.len(),
            out.len(),
            "contributions differ in length"
        );
    }
    for (i, slot) in out.chunks_exact_mut(size).enumerate() {
        let at = i * size;
        let first = wide(&parts[0], at);
        let all = parts[1..]
            .iter()
            .fold(first, |acc, part| T::combine(op, acc, wide(part, at)));
        let all = match op {
            ReduceOp::Avg => T::divide(all, parts.len()),
            _ => all,
        };
        slot.copy_from_slice(bytemuck::bytes_of(&T::narrow(all)));
    }
}

/// An element type with the type its values are combined in.
trait Number: bytemuck::Pod {
    type Wide: Copy;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn combine(op: ReduceOp, a: Self::Wide, b: Self::Wide) -> Self::Wide;
    /// Defined for floating-point types, where it can be reached.
    fn scale(wide: Self::Wide, factor: f64) -> Self::Wide;
    fn divide(wide: Self::Wide, count: usize) -> Self::Wide;
}

macro_rules! floats {
    ($($type:ty, $wide:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Number for $type {
            type Wide = $wide;

            fn widen(self) -> $wide {
                $widen(self)
            }

            fn narrow(wide: $wide) -> Self {
                $narrow(wide)
            }

            #[inline(always)]
            fn combine(op: ReduceOp, a: $wide, b: $wide) -> $wide {
                match op {
                    ReduceOp::Product => a * b,
                    ReduceOp::Min if a.is_nan() || a <= b => a,
                    ReduceOp::Max if a.is_nan() || a >= b => a,
                    ReduceOp::Min | ReduceOp::Max => b,
                    _ => a + b,
                }
            }

            fn scale(wide: $wide, factor: f64) -> $wide {
                wide * factor as $wide
            }

            fn divide(wide: $wide, count: usize) -> $wide {
                wide / count as $wide
            }
        }
    )*};
}

floats! {
    f16, f32, f16::to_f32, f16::from_f32;
    bf16, f32, bf16::to_f32, bf16::from_f32;
    f32, f32, |x| x, |x| x;
    f64, f64, |x| x, |x| x;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Number for $type {
            type Wide = $type;

            fn widen(self) -> $type {
                self
            }

            fn narrow(wide: $type) -> $type {
                wide
            }

            #[inline(always)]
            fn combine(op: ReduceOp, a: $type, b: $type) -> $type {
                match op {
                    ReduceOp::Product => a.wrapping_mul(b),
                    ReduceOp::Min => a.min(b),
                    ReduceOp::Max => a.max(b),
                    ReduceOp::BitAnd => a & b,
                    ReduceOp::BitOr => a | b,
                    ReduceOp::BitXor => a ^ b,
                    _ => a.wrapping_add(b),
                }
            }

            fn scale(_: $type, _: f64) -> $type {
                unreachable!("premultiplied sums are for floating-point types")
            }

            fn divide(_: $type, _: usize) -> $type {
                unreachable!("averages are for floating-point types")
            }
        }
    )*};
}

integers!(i8, u8, i16, i32, i64);

/// A boolean as its byte: anything but zero is true, and true is one.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
struct Truth(u8);

impl Number for Truth {
    type Wide = bool;

    fn widen(self) -> bool {
        self.0 != 0
    }

    fn narrow(wide: bool) -> Self {
        Self(wide.into())
    }

    fn combine(op: ReduceOp, a: bool, b: bool) -> bool {
        match op {
            ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => a & b,
            ReduceOp::BitXor => a ^ b,
            _ => a | b,
        }
    }

    fn scale(_: bool, _: f64) -> bool {
        unreachable!("premultiplied sums are for floating-point types")
    }

    fn divide(_: bool, _: usize) -> bool {
        unreachable!("averages are for floating-point types")
    }
}

impl Number for Complex<f32> {
    type Wide = Self;

    fn widen(self) -> Self {
        self
    }

    fn narrow(wide: Self) -> Self {
        wide
    }

    fn combine(op: ReduceOp, a: Self, b: Self) -> Self {
        match op {
            ReduceOp::Product => a * b,
            _ => a + b,
        }
    }

    fn scale(wide: Self, factor: f64) -> Self {
        wide * factor as f32
    }

    fn divide(wide: Self, count: usize) -> Self {
        wide / count as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Element;

    fn reduced<T: Element>(op: ReduceOp, parts: &[&[T]]) -> Vec<T> {
        let parts: Vec<_> = parts
            .iter()
            .map(|part| Contribution::new(op, bytemuck::cast_slice(part)))
            .collect();
        let mut out = vec![0; parts[0].bytes.len()];
        reduce(op, T::DTYPE, &parts, &mut out);
        out.chunks_exact(size_of::<T>())
            .map(pod_read_unaligned)
            .collect()
    }

    #[test]
    fn folding_rank_by_rank_gives_the_same_bits() {
        let element = |rank: usize, at: usize| (at * 37 + rank * 11) as u8;
        for dtype in DType::ALL {
            for op in ReduceOp::ALL {
                let as_it_is = !matches!(op, ReduceOp::Avg | ReduceOp::PremulSum(_))
                    && op.is_defined_for(dtype);
                // Two ranks are rounded once in any case.
                let ranks = if dtype.size() == 2 && dtype.is_float() {
                    2
                } else {
                    5
                };
                if !as_it_is {
                    continue;
                }
                let len = 33 * dtype.size();
                let parts: Vec<Vec<u8>> = (0..ranks)
                    .map(|rank| (0..len).map(|at| element(rank, at) & 0x3f).collect())
                    .collect();
                let contributions: Vec<_> = parts
                    .iter()
                    .map(|bytes| Contribution::new(op, bytes))
                    .collect();
                let mut expected = vec![0; len];
                reduce(op, dtype, &contributions, &mut expected);
                let mut acc = parts[0].clone();
                parts[1..]
                    .iter()
                    .for_each(|part| fold(op, dtype, &mut acc, part));
                assert_eq!(acc, expected, "{op} of {dtype}");
            }
        }
    }

    #[test]
    fn what_is_order_free_gives_the_same_bits_in_every_order() {
        for dtype in DType::ALL {
            for op in ReduceOp::ALL {
                for ranks in [2, 4] {
                    if !op.is_defined_for(dtype) || !is_order_free(op, dtype, ranks) {
                        continue;
                    }
                    let part = |rank: usize| -> Vec<u8> {
                        let byte = |at: usize| (at * 29 + rank * 101) as u8 & 0x3f;
                        (0..16 * dtype.size()).map(byte).collect()
                    };
                    let in_order = |order: &[usize]| {
                        let parts: Vec<_> = order.iter().map(|&rank| part(rank)).collect();
                        let parts: Vec<_> = parts
                            .iter()
                            .map(|bytes| Contribution::new(op, bytes))
                            .collect();
                        let mut out = vec![0; 16 * dtype.size()];
                        reduce(op, dtype, &parts, &mut out);
                        out
                    };
                    let forward: Vec<usize> = (0..ranks).collect();
                    let mut other = forward.clone();
                    other.rotate_left(1);
                    assert_eq!(in_order(&forward), in_order(&other), "{op} of {dtype}");
                    other.reverse();
                    assert_eq!(in_order(&forward), in_order(&other), "{op} of {dtype}");
                }
            }
        }
        let floats = is_order_free(ReduceOp::Sum, DType::F32, 3);
        assert!(!floats && !is_order_free(ReduceOp::Min, DType::F32, 2));
    }

    #[test]
    fn sixteen_bit_sums_are_rounded_once() {
        // One at a time in bf16, 256 + 1 + 1 stays 256.
        let [big, one] = [bf16::from_f32(256.0), bf16::from_f32(1.0)];
        assert_eq!(
            reduced(ReduceOp::Sum, &[&[big], &[one], &[one]])[0].to_f32(),
            258.0
        );
    }

    #[test]
    fn a_nan_wins_in_min_and_max_wherever_it_is() {
        for op in [ReduceOp::Min, ReduceOp::Max] {
            for parts in [
                [f32::NAN, 1.0, 2.0],
                [1.0, f32::NAN, 2.0],
                [1.0, 2.0, f32::NAN],
            ] {
                let [a, b, c] = parts;
                assert!(
                    reduced(op, &[&[a], &[b], &[c]])[0].is_nan(),
                    "{op} of {parts:?}"
                );
            }
        }
    }

    #[test]
    fn integers_wrap_and_bits_combine() {
        assert_eq!(reduced(ReduceOp::Sum, &[&[i8::MAX], &[1]]), [i8::MIN]);
        assert_eq!(reduced(ReduceOp::Product, &[&[200u8], &[2]]), [144]);
        assert_eq!(
            reduced(ReduceOp::BitXor, &[&[0b1100i32], &[0b1010]]),
            [0b0110]
        );
    }

    #[test]
    fn booleans_stay_zero_or_one() {
        let parts = [[0u8, 1, 1, 0], [0, 1, 0, 7]];
        let parts: Vec<_> = parts
            .iter()
            .map(|p| Contribution::new(ReduceOp::Sum, p))
            .collect();
        let mut out = [9; 4];
        reduce(ReduceOp::Sum, DType::Bool, &parts, &mut out);
        assert_eq!(out, [0, 1, 1, 1]);
        reduce(ReduceOp::Min, DType::Bool, &parts, &mut out);
        assert_eq!(out, [0, 1, 0, 0]);
    }

    #[test]
    fn each_rank_brings_its_own_factor() {
        let bytes = [1.0f32.to_le_bytes(), 10.0f32.to_le_bytes()];
        let parts = [
            Contribution {
                bytes: &bytes[0],
                factor: 2.0,
            },
            Contribution {
                bytes: &bytes[1],
                factor: 0.5,
            },
        ];
        let mut out = [0; 4];
        reduce(ReduceOp::PremulSum(2.0), DType::F32, &parts, &mut out);
        assert_eq!(f32::from_le_bytes(out), 7.0);
    }
}
