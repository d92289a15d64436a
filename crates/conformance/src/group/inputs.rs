//! What each rank contributes, and what must come out: known to every rank without communication.

use half::{bf16, f16};
use num_complex::Complex;
use phalanx_pg::{Buffer, DType, Device, Element, ProcessGroup, ReduceOp};

/// Where a buffer's memory comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    /// From the backend's `allocate`.
    Registered,
    /// From a vector.
    Plain,
    /// In the middle of a larger buffer, off every alignment but the element's.
    Inner,
}

impl Memory {
    pub(super) const ALL: [Memory; 3] = [Memory::Registered, Memory::Plain, Memory::Inner];
}

/// Inputs repeat after this many elements: no power of two, so that a piece in the wrong place
/// shows, and short, so that long inputs are copies and not computed.
const PERIOD: usize = 3 * 5 * 7 * 11;

/// Small whole numbers: sums and products of them are exact in every type and order.
fn small(rank: usize, at: usize, salt: usize) -> i64 {
    let mixed = at + at / 5 + at / 77;
    ((rank * 7 + mixed + salt * 5) % 3) as i64 + i64::from(rank == 0)
}

/// `len` elements, of which `element` gives the first [`PERIOD`].
fn repeated(len: usize, element: impl Fn(usize) -> Vec<u8>) -> Vec<u8> {
    let period: Vec<u8> = (0..len.min(PERIOD)).flat_map(element).collect();
    let mut bytes = period.repeat(len / PERIOD);
    let rest = period.len() / PERIOD.min(len.max(1)) * (len % PERIOD);
    bytes.extend_from_slice(&period[..rest]);
    bytes
}

fn encode(dtype: DType, value: i64) -> Vec<u8> {
    match dtype {
        DType::F16 => f16::from_f32(value as f32).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(value as f32).to_le_bytes().to_vec(),
        DType::F32 => (value as f32).to_le_bytes().to_vec(),
        DType::F64 => (value as f64).to_le_bytes().to_vec(),
        DType::I8 | DType::U8 => vec![value as u8],
        DType::I16 => (value as i16).to_le_bytes().to_vec(),
        DType::I32 => (value as i32).to_le_bytes().to_vec(),
        DType::I64 => value.to_le_bytes().to_vec(),
        DType::Bool => vec![u8::from(value % 2 != 0)],
        DType::Complex64 => {
            let number = Complex::new(value as f32, -(value as f32));
            bytemuck::bytes_of(&number).to_vec()
        }
        other => panic!("{other} is not known to the suite"),
    }
}

/// Rank `rank`'s whole input as bytes.
pub(super) fn input(dtype: DType, rank: usize, len: usize, salt: usize) -> Vec<u8> {
    repeated(len, |at| encode(dtype, small(rank, at, salt)))
}

/// A buffer with the given bytes in the given kind of memory.
pub(super) fn fill(group: &dyn ProcessGroup, memory: Memory, dtype: DType, bytes: &[u8]) -> Buffer {
    let len = bytes.len() / dtype.size();
    let mut buf = match memory {
        Memory::Registered => group
            .allocate(Device::Cpu, dtype, len)
            .expect("a backend allocates host memory"),
        Memory::Plain => Buffer::zeroed(dtype, len),
        Memory::Inner => Buffer::zeroed(dtype, len + 2).split_at(1).1.split_at(len).0,
    };
    buf.as_bytes_mut()
        .expect("host memory")
        .copy_from_slice(bytes);
    buf
}

/// What a reduction of whole small inputs must give, exactly.
///
/// Written independently of [`phalanx_pg::reduce`]: in 64-bit integers, except where the type
/// wraps or is not a number.
pub(super) fn reduced(dtype: DType, op: ReduceOp, size: usize, len: usize, salt: usize) -> Vec<u8> {
    repeated(len, |at| reduced_element(dtype, op, size, at, salt))
}

fn reduced_element(dtype: DType, op: ReduceOp, size: usize, at: usize, salt: usize) -> Vec<u8> {
    let values: Vec<i64> = (0..size).map(|rank| small(rank, at, salt)).collect();
    if dtype == DType::Bool {
        let mut truths = values.iter().map(|value| value % 2 != 0);
        let truth = match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => truths.any(|t| t),
            ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => truths.all(|t| t),
            _ => truths.filter(|&t| t).count() % 2 == 1,
        };
        return vec![truth.into()];
    }
    if dtype == DType::Complex64 && op == ReduceOp::Product {
        let product = values
            .iter()
            .map(|&v| Complex::new(v as f32, -(v as f32)))
            .reduce(|a, b| a * b)
            .expect("a group has ranks");
        return bytemuck::bytes_of(&product).to_vec();
    }
    let sum: i64 = values.iter().sum();
    let value = match op {
        ReduceOp::Sum => sum,
        ReduceOp::Product => values.iter().fold(1, |a: i64, &b| a.wrapping_mul(b)),
        ReduceOp::Min => *values.iter().min().expect("a group has ranks"),
        ReduceOp::Max => *values.iter().max().expect("a group has ranks"),
        ReduceOp::BitAnd => values.iter().fold(-1, |a, b| a & b),
        ReduceOp::BitOr => values.iter().fold(0, |a, b| a | b),
        ReduceOp::BitXor => values.iter().fold(0, |a, b| a ^ b),
        ReduceOp::Avg => return real(dtype, sum as f64 / size as f64),
        ReduceOp::PremulSum(factor) => return real(dtype, sum as f64 * factor),
        other => panic!("{other} is not known to the suite"),
    };
    encode(dtype, value)
}

/// A floating-point result, rounded once to the type. Averages of whole numbers and sums times a
/// power of two come out the same by every way of computing them in `f32`.
fn real(dtype: DType, value: f64) -> Vec<u8> {
    match dtype {
        DType::F16 => f16::from_f32(value as f32).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(value as f32).to_le_bytes().to_vec(),
        DType::F32 => (value as f32).to_le_bytes().to_vec(),
        DType::F64 => value.to_le_bytes().to_vec(),
        DType::Complex64 => bytemuck::bytes_of(&Complex::new(value as f32, -value as f32)).to_vec(),
        other => panic!("{other} has no averages"),
    }
}

/// Rank `rank`'s element `at` of a vector whose sum depends on the order of summation.
pub(super) fn rough(rank: usize, at: usize) -> f32 {
    let mixed = (rank as u64 + 1)
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        .wrapping_add(at as u64)
        .wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let unit = ((mixed >> 40) as f32) / (1u64 << 24) as f32 - 0.5;
    unit * [1e-4f32, 1.0, 3e3][(mixed % 3) as usize]
}

pub(super) fn floats(values: impl Iterator<Item = f32>) -> Buffer {
    Buffer::from_vec(values.collect::<Vec<_>>())
}

/// Sizes around every power of two up to `limit`, and the odd ones.
pub(super) fn sizes(limit: usize) -> Vec<usize> {
    let mut sizes = vec![0, 1, 2, 3, 7];
    let mut power = 8;
    while power <= limit {
        sizes.extend([power - 1, power, power + 1]);
        power *= 8;
    }
    sizes.retain(|&size| size <= limit + 1);
    sizes
}

pub(super) fn values<T: Element>(buf: &Buffer) -> Vec<T> {
    buf.to_vec().expect("host memory of that type")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_repeat_as_they_are_computed() {
        for len in [0, 1, 7, PERIOD - 1, PERIOD, PERIOD + 1, 3 * PERIOD + 5] {
            let each = |rank| (0..len).flat_map(move |at| encode(DType::I16, small(rank, at, 4)));
            assert_eq!(input(DType::I16, 1, len, 4), each(1).collect::<Vec<_>>());
            let sum = (0..len).flat_map(|at| reduced_element(DType::F64, ReduceOp::Sum, 3, at, 4));
            let sum: Vec<u8> = sum.collect();
            assert_eq!(reduced(DType::F64, ReduceOp::Sum, 3, len, 4), sum);
        }
    }

    #[test]
    fn a_piece_in_the_wrong_place_shows() {
        let whole = input(DType::U8, 1, 70_000, 0);
        for shift in [1, 8, 64, 512, 4096, 32_768, 65_536] {
            assert_ne!(whole[..4096], whole[shift..shift + 4096], "{shift}");
        }
    }
}
