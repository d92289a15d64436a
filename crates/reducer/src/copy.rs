//! Copies that scale, convert or add on the way: the inner loops.
//!
//! Elements are multiplied by the reciprocal of the divisor, as PyTorch does: for divisors that
//! are no power of two this is not the same as dividing. 16-bit floats are multiplied as `f32` and
//! rounded once.

use bytemuck::{Pod, cast_slice_mut, pod_read_unaligned};
use half::{bf16, f16};
use phalanx_pg::{DType, Stores, copy_lines, map_past_cache};

/// A floating-point type with the type that it is computed in.
trait Float: Pod {
    fn to_f32(self) -> f32;
    fn to_f64(self) -> f64;
    fn from_f32(value: f32) -> Self;
    fn from_f64(value: f64) -> Self;
    fn scaled(self, factor: f64) -> Self;
    fn plus(self, other: Self) -> Self;
}

macro_rules! narrow {
    ($($type:ty),*) => {$(
        impl Float for $type {
            fn to_f32(self) -> f32 {
                self.to_f32()
            }
            fn to_f64(self) -> f64 {
                self.to_f32().into()
            }
            fn from_f32(value: f32) -> Self {
                Self::from_f32(value)
            }
            fn from_f64(value: f64) -> Self {
                Self::from_f64(value)
            }
            fn scaled(self, factor: f64) -> Self {
                Self::from_f32(self.to_f32() * factor as f32)
            }
            fn plus(self, other: Self) -> Self {
                Self::from_f32(self.to_f32() + other.to_f32())
            }
        }
    )*};
}

macro_rules! wide {
    ($($type:ty),*) => {$(
        impl Float for $type {
            fn to_f32(self) -> f32 {
                self as f32
            }
            fn to_f64(self) -> f64 {
                self as f64
            }
            fn from_f32(value: f32) -> Self {
                value as Self
            }
            fn from_f64(value: f64) -> Self {
                value as Self
            }
            fn scaled(self, factor: f64) -> Self {
                self * factor as Self
            }
            fn plus(self, other: Self) -> Self {
                self + other
            }
        }
    )*};
}

narrow!(f16, bf16);
wide!(f32, f64);

/// Runs `$body` with `$t` bound to the type of the elements of `$dtype`.
macro_rules! with_type {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            DType::F16 => {
                type $t = f16;
                $body
            }
            DType::BF16 => {
                type $t = bf16;
                $body
            }
            // A complex number is two of them, and all that is done here is linear.
            DType::F32 | DType::Complex64 => {
                type $t = f32;
                $body
            }
            DType::F64 => {
                type $t = f64;
                $body
            }
            other => unreachable!("a parameter of type {other} was refused"),
        }
    };
}

/// Whether there are gradients of this type.
pub(crate) fn is_gradient(dtype: DType) -> bool {
    use DType::*;
    matches!(dtype, F16 | BF16 | F32 | F64 | Complex64)
}

/// `dst = src * factor`.
pub(crate) fn scale_into(dtype: DType, dst: &mut [u8], src: &[u8], factor: f64) {
    debug_assert_eq!(dst.len(), src.len());
    if factor == 1.0 {
        dst.copy_from_slice(src);
        return;
    }
    with_type!(dtype, T => each::<T, T>(dst, src, |value| value.scaled(factor)));
}

/// The same into a bucket.
pub(crate) fn scale_into_bucket(
    stores: Stores,
    dtype: DType,
    bucket: &mut [u8],
    src: &[u8],
    factor: f64,
) {
    match stores {
        _ if factor == 1.0 => copy_lines(stores, bucket, src),
        Stores::Ordinary => scale_into(dtype, bucket, src, factor),
        Stores::PastCache => with_type!(dtype, T => {
            let bucket: &mut [T] = cast_slice_mut(bucket);
            map_past_cache::<T, T>(bucket, src, |value| value.scaled(factor));
        }),
    }
}

/// `values *= factor`.
pub(crate) fn scale_in_place(dtype: DType, values: &mut [u8], factor: f64) {
    with_type!(dtype, T => {
        let values: &mut [T] = cast_slice_mut(values);
        values.iter_mut().for_each(|value| *value = value.scaled(factor));
    });
}

/// `dst = (a + b) * factor`: what was accumulated and what has just come.
pub(crate) fn sum_into(dtype: DType, dst: &mut [u8], a: &[u8], b: &[u8], factor: f64) {
    debug_assert!(dst.len() == a.len() && a.len() == b.len());
    with_type!(dtype, T => {
        let dst: &mut [T] = cast_slice_mut(dst);
        let sums = values::<T>(a).zip(values::<T>(b)).map(|(a, b)| a.plus(b));
        dst.iter_mut().zip(sums).for_each(|(dst, sum)| *dst = sum.scaled(factor));
    });
}

/// `dst += src`.
pub(crate) fn add_to(dtype: DType, dst: &mut [u8], src: &[u8]) {
    debug_assert_eq!(dst.len(), src.len());
    with_type!(dtype, T => {
        let dst: &mut [T] = cast_slice_mut(dst);
        dst.iter_mut().zip(values::<T>(src)).for_each(|(dst, src)| *dst = dst.plus(src));
    });
}

/// `dst = src * factor`, from one floating-point type to another; computed in the wider one.
pub(crate) fn convert_into(to: DType, dst: &mut [u8], from: DType, src: &[u8], factor: f64) {
    if to == from {
        return scale_into(to, dst, src, factor);
    }
    with_type!(to, D => with_type!(from, S => match to == DType::F64 || from == DType::F64 {
        true => each::<D, S>(dst, src, |s| D::from_f64(Float::to_f64(s) * factor)),
        false => each::<D, S>(dst, src, |s| D::from_f32(Float::to_f32(s) * factor as f32)),
    }));
}

fn each<D: Pod, S: Pod>(dst: &mut [u8], src: &[u8], f: impl Fn(S) -> D) {
    let dst: &mut [D] = cast_slice_mut(dst);
    dst.iter_mut()
        .zip(values(src))
        .for_each(|(dst, src)| *dst = f(src));
}

/// Buckets are aligned; a framework's memory may not be.
fn values<T: Pod>(bytes: &[u8]) -> impl Iterator<Item = T> {
    bytes.chunks_exact(size_of::<T>()).map(pod_read_unaligned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes<T: Pod>(values: &[T]) -> Vec<u8> {
        bytemuck::cast_slice(values).to_vec()
    }

    #[test]
    fn scaling_multiplies_by_the_reciprocal_in_the_elements_own_precision() {
        let src = [1.0f32, 0.1, -7.0, f32::MAX];
        let mut dst = [0.0f32; 4];
        let third = 1.0 / 3.0;
        scale_into(
            DType::F32,
            bytemuck::cast_slice_mut(&mut dst),
            &bytes(&src),
            third,
        );
        assert_eq!(dst, src.map(|value| value * third as f32));
        let halves = [f16::from_f32(3.0), f16::from_f32(-0.1)];
        let mut dst = [f16::ZERO; 2];
        scale_into(
            DType::F16,
            bytemuck::cast_slice_mut(&mut dst),
            &bytes(&halves),
            0.5,
        );
        assert_eq!(dst, halves.map(|value| f16::from_f32(value.to_f32() * 0.5)));
    }

    #[test]
    fn buckets_have_the_same_bits_past_the_cache() {
        let values: Vec<f32> = (0..1000).map(|i| (i as f32).sin() * 1e3).collect();
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            let mut memory = vec![0f64; 3 * values.len()];
            let memory = bytemuck::cast_slice_mut::<f64, u8>(&mut memory);
            let (src, rest) = memory.split_at_mut(8 * values.len());
            let (dst, bucket) = rest.split_at_mut(8 * values.len());
            let [src, dst, bucket] =
                [src, dst, bucket].map(|bytes| &mut bytes[..values.len() * dtype.size()]);
            convert_into(dtype, src, DType::F32, &bytes(&values), 1.0);
            for factor in [1.0, 1.0 / 3.0] {
                scale_into(dtype, dst, src, factor);
                for stores in [Stores::Ordinary, Stores::PastCache] {
                    bucket.fill(0);
                    scale_into_bucket(stores, dtype, bucket, src, factor);
                    assert_eq!(bucket, dst, "{dtype} times {factor}, {stores:?}");
                }
            }
        }
    }

    #[test]
    fn a_factor_of_one_keeps_every_bit() {
        let src = [f32::from_bits(0x7fc0_1234), -0.0, f32::INFINITY];
        let mut dst = [1.0f32; 3];
        scale_into(
            DType::F32,
            bytemuck::cast_slice_mut(&mut dst),
            &bytes(&src),
            1.0,
        );
        assert_eq!(dst.map(f32::to_bits), src.map(f32::to_bits));
    }

    #[test]
    fn unaligned_sources_are_read_right() {
        let src = [1.5f64, -2.5, 3.25];
        let mut shifted = vec![0u8];
        shifted.extend(bytes(&src));
        let mut dst = [0.0f64; 3];
        scale_into(
            DType::F64,
            bytemuck::cast_slice_mut(&mut dst),
            &shifted[1..],
            0.5,
        );
        assert_eq!(dst, [0.75, -1.25, 1.625]);
        add_to(
            DType::F64,
            bytemuck::cast_slice_mut(&mut dst),
            &shifted[1..],
        );
        assert_eq!(dst, [2.25, -3.75, 4.875]);
    }

    #[test]
    fn every_pair_of_types_converts() {
        use DType::{BF16, F16, F32, F64};
        let read = |dtype: DType, bytes: &[u8]| -> Vec<f64> {
            with_type!(dtype, T => values::<T>(bytes).map(Float::to_f64).collect())
        };
        for from in [F16, BF16, F32, F64] {
            for to in [F16, BF16, F32, F64] {
                let mut src = vec![0u8; 3 * from.size()];
                let ones = [1.0f64, -2.0, 0.5];
                convert_into(from, &mut src, F64, &bytes(&ones), 1.0);
                let mut dst = vec![0u8; 3 * to.size()];
                convert_into(to, &mut dst, from, &src, 0.5);
                assert_eq!(read(to, &dst), [0.5, -1.0, 0.25], "{from} to {to}");
            }
        }
    }

    #[test]
    fn sums_round_before_they_are_scaled() {
        let (a, b) = ([f16::from_f32(2048.0)], [f16::from_f32(1.0)]);
        let mut dst = [f16::ZERO];
        sum_into(
            DType::F16,
            bytemuck::cast_slice_mut(&mut dst),
            &bytes(&a),
            &bytes(&b),
            0.5,
        );
        // 2049 is no f16.
        assert_eq!(dst[0].to_f32(), 1024.0);
    }
}
