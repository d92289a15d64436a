//! What each rank contributes, and what must come out: known to every rank without communication.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

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

/// Inputs with salts that differ by this much are the same.
const SALTS: usize = 3;

/// Small whole numbers: sums and products of them are exact in every type and order.
fn small(rank: usize, at: usize, salt: usize) -> i64 {
    let mixed = at + at / 5 + at / 77;
    ((rank * 7 + mixed + salt * 5) % SALTS) as i64 + i64::from(rank == 0)
}

/// Elements that repeat: what a rank contributes, or what must come out.
///
/// Written and compared a period at a time, since long vectors are what the suite does most.
#[derive(Debug, Clone)]
pub(super) struct Pattern {
    period: Arc<[u8]>,
    /// Bytes per element.
    width: usize,
    /// Whether the sign of a zero depends on the order of the ranks, as in complex products: then
    /// both are right.
    zeros_alike: bool,
}

impl Pattern {
    /// What determines a pattern, so that each is computed once in a process.
    fn known(key: Key, element: impl Fn(usize) -> Vec<u8>) -> Self {
        static KNOWN: LazyLock<Mutex<HashMap<Key, Arc<[u8]>>>> = LazyLock::new(Mutex::default);
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let period = known
            .entry(key)
            .or_insert_with(|| (0..PERIOD).flat_map(element).collect());
        Self {
            period: Arc::clone(period),
            width: key.dtype.size(),
            zeros_alike: key.dtype == DType::Complex64
                && key
                    .op
                    .is_some_and(|(name, _)| name == ReduceOp::Product.name()),
        }
    }

    /// Writes the elements from number `start` on.
    pub(super) fn write(&self, start: usize, out: &mut [u8]) {
        let mut done = 0;
        for piece in self.pieces(start, out.len()) {
            out[done..done + piece.len()].copy_from_slice(piece);
            done += piece.len();
        }
    }

    /// The first byte of `got` that is not that of the elements from number `start` on.
    pub(super) fn differs(&self, start: usize, got: &[u8]) -> Option<usize> {
        let mut done = 0;
        for piece in self.pieces(start, got.len()) {
            let part = &got[done..done + piece.len()];
            if part != piece && !(self.zeros_alike && are_equal_numbers(part, piece)) {
                return part
                    .iter()
                    .zip(piece)
                    .position(|(a, b)| a != b)
                    .map(|at| done + at);
            }
            done += piece.len();
        }
        None
    }

    /// `len` bytes from element `start` on, in as few pieces as there are.
    fn pieces(&self, start: usize, len: usize) -> impl Iterator<Item = &[u8]> {
        let mut at = start % PERIOD * self.width;
        let mut left = len;
        std::iter::from_fn(move || {
            let piece = &self.period[at..(at + left).min(self.period.len())];
            (at, left) = (0, left - piece.len());
            (!piece.is_empty()).then_some(piece)
        })
    }

    /// The element with number `at`.
    pub(super) fn element(&self, at: usize) -> &[u8] {
        &self.period[at % PERIOD * self.width..][..self.width]
    }
}

/// Whether both hold the same numbers, whatever the signs of zeros.
fn are_equal_numbers(a: &[u8], b: &[u8]) -> bool {
    let numbers = |bytes: &[u8]| -> Vec<f32> {
        let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("4 bytes"));
        bytes.chunks_exact(4).map(number).collect()
    };
    numbers(a) == numbers(b)
}

/// What a pattern is computed from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    dtype: DType,
    /// The operator's name and factor; none for an input.
    op: Option<(&'static str, u64)>,
    /// The rank of an input, the number of ranks of a result.
    ranks: usize,
    salt: usize,
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

/// What rank `rank` contributes.
pub(super) fn input(dtype: DType, rank: usize, salt: usize) -> Pattern {
    let key = Key {
        dtype,
        op: None,
        ranks: rank,
        salt: salt % SALTS,
    };
    Pattern::known(key, |at| encode(dtype, small(rank, at, salt)))
}

/// A buffer of `len` elements in the given kind of memory, which `write` fills.
pub(super) fn fill(
    group: &dyn ProcessGroup,
    memory: Memory,
    (dtype, len): (DType, usize),
    write: impl FnOnce(&mut [u8]),
) -> Buffer {
    let mut buf = match memory {
        Memory::Registered => group
            .allocate(Device::Cpu, dtype, len)
            .expect("a backend allocates host memory"),
        Memory::Plain => Buffer::zeroed(dtype, len),
        Memory::Inner => Buffer::zeroed(dtype, len + 2).split_at(1).1.split_at(len).0,
    };
    write(buf.as_bytes_mut().expect("host memory"));
    buf
}

/// What a reduction over `size` ranks must give, exactly.
///
/// Written independently of [`phalanx_pg::reduce`]: in 64-bit integers, except where the type
/// wraps or is not a number.
pub(super) fn reduced(dtype: DType, op: ReduceOp, size: usize, salt: usize) -> Pattern {
    let factor = match op {
        ReduceOp::PremulSum(factor) => factor,
        _ => 1.0,
    };
    let key = Key {
        dtype,
        op: Some((op.name(), factor.to_bits())),
        ranks: size,
        salt: salt % SALTS,
    };
    Pattern::known(key, |at| reduced_element(dtype, op, size, at, salt))
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

    fn bytes(pattern: &Pattern, start: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0xAA; len * pattern.width];
        pattern.write(start, &mut out);
        out
    }

    #[test]
    fn patterns_are_what_is_computed_element_by_element() {
        for len in [0, 1, 7, PERIOD - 1, PERIOD, PERIOD + 1, 3 * PERIOD + 5] {
            for start in [0, 1, PERIOD - 1, 2 * PERIOD + 3] {
                let at = start..start + len;
                let each = at.clone().map(|at| small(1, at % PERIOD, 4));
                let each: Vec<u8> = each.flat_map(|value| encode(DType::I16, value)).collect();
                assert_eq!(bytes(&input(DType::I16, 1, 4), start, len), each);
                let sum = reduced(DType::F64, ReduceOp::Sum, 3, 4);
                let each =
                    at.flat_map(|at| reduced_element(DType::F64, ReduceOp::Sum, 3, at % PERIOD, 4));
                assert_eq!(bytes(&sum, start, len), each.collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn one_wrong_byte_is_found_wherever_it_is() {
        let pattern = input(DType::I32, 2, 1);
        for len in [1, 2, PERIOD, 2 * PERIOD + 1] {
            let good = bytes(&pattern, 5, len);
            assert_eq!(pattern.differs(5, &good), None);
            for at in [0, 1, len * 2, len * 4 - 1] {
                let mut bad = good.clone();
                bad[at] ^= 0x40;
                assert_eq!(pattern.differs(5, &bad), Some(at));
            }
        }
    }

    #[test]
    fn equal_salts_give_equal_inputs_and_others_do_not() {
        let at = |salt| (0..PERIOD).map(|at| small(1, at, salt)).collect::<Vec<_>>();
        assert_eq!(at(1), at(1 + SALTS));
        assert_ne!(at(0), at(1));
        assert_ne!(at(1), at(2));
    }

    #[test]
    fn a_piece_in_the_wrong_place_shows() {
        let whole = bytes(&input(DType::U8, 1, 0), 0, 70_000);
        for shift in [1, 8, 64, 512, 4096, 32_768, 65_536] {
            assert_ne!(whole[..4096], whole[shift..shift + 4096], "{shift}");
        }
    }
}
