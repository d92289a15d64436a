//! Element types and reduction operators.

use std::fmt;

use bytemuck::Pod;
use half::{bf16, f16};
use num_complex::Complex;
use serde::{Deserialize, Serialize};

/// Type of the elements of a [`Buffer`](crate::Buffer). The names are PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the names say it")]
pub enum DType {
    F16,
    BF16,
    F32,
    F64,
    I8,
    U8,
    I16,
    I32,
    I64,
    Bool,
    /// Two `f32`: real and imaginary part.
    Complex64,
}

impl DType {
    /// Every element type, for tests and tables.
    pub const ALL: [DType; 11] = [
        DType::F16,
        DType::BF16,
        DType::F32,
        DType::F64,
        DType::I8,
        DType::U8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::Bool,
        DType::Complex64,
    ];

    /// Bytes per element.
    #[inline]
    pub fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::Bool => 1,
            Self::F16 | Self::BF16 | Self::I16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 | Self::Complex64 => 8,
        }
    }

    /// Whether elements are floating-point numbers, complex ones included.
    pub fn is_float(self) -> bool {
        matches!(
            self,
            Self::F16 | Self::BF16 | Self::F32 | Self::F64 | Self::Complex64
        )
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::Bool => "bool",
            Self::Complex64 => "complex64",
        })
    }
}

/// A Rust type that is an element type.
///
/// Plain old data, so that any bytes that arrive are a value of it. `bool` is not; elements of
/// [`DType::Bool`] are read as `u8`, zero or one.
///
/// Sealed: [`Buffer`](crate::Buffer) relies on its size and alignment being those of its
/// [`DType`].
///
/// ```compile_fail,E0277
/// #[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
/// #[repr(C)]
/// struct Big([u8; 512]);
///
/// impl phalanx_pg::Element for Big {
///     const DTYPE: phalanx_pg::DType = phalanx_pg::DType::U8;
/// }
/// ```
pub trait Element: sealed::Sealed + Pod + Send + Sync + PartialEq + fmt::Debug {
    /// The element type it is.
    const DTYPE: DType;
}

mod sealed {
    /// Keeps [`Element`](super::Element) to the types listed here.
    pub trait Sealed {}
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),* $(,)?) => {
        $(
            impl sealed::Sealed for $type {}

            impl Element for $type {
                const DTYPE: DType = DType::$dtype;
            }
        )*
    };
}

elements! {
    f16 => F16, bf16 => BF16, f32 => F32, f64 => F64,
    i8 => I8, u8 => U8, i16 => I16, i32 => I32, i64 => I64,
    Complex<f32> => Complex64,
}

/// How elements of several ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum. Integers wrap around; booleans are or-ed.
    Sum,
    /// The sum divided by the number of ranks. Floating-point types only.
    Avg,
    /// The product. Integers wrap around; booleans are and-ed.
    Product,
    /// The smallest. A NaN wins.
    Min,
    /// The largest. A NaN wins.
    Max,
    /// Bitwise and. Integers and booleans only.
    BitAnd,
    /// Bitwise or. Integers and booleans only.
    BitOr,
    /// Bitwise exclusive or. Integers and booleans only.
    BitXor,
    /// The sum of each rank's elements times that rank's factor. Floating-point types only.
    PremulSum(f64),
}

impl ReduceOp {
    /// Every operator, for tests and tables.
    pub const ALL: [ReduceOp; 9] = [
        ReduceOp::Sum,
        ReduceOp::Avg,
        ReduceOp::Product,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::BitAnd,
        ReduceOp::BitOr,
        ReduceOp::BitXor,
        ReduceOp::PremulSum(0.5),
    ];

    /// Whether the operator has a meaning for elements of this type.
    #[inline]
    pub fn is_defined_for(self, dtype: DType) -> bool {
        match self {
            Self::Sum | Self::Product => true,
            Self::Avg | Self::PremulSum(_) => dtype.is_float(),
            Self::Min | Self::Max => dtype != DType::Complex64,
            Self::BitAnd | Self::BitOr | Self::BitXor => !dtype.is_float(),
        }
    }

    /// Its name, without the factor of a premultiplied sum.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Avg => "avg",
            Self::Product => "product",
            Self::Min => "min",
            Self::Max => "max",
            Self::BitAnd => "bit_and",
            Self::BitOr => "bit_or",
            Self::BitXor => "bit_xor",
            Self::PremulSum(_) => "premul_sum",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PremulSum(factor) => write!(f, "premul_sum({factor})"),
            other => f.write_str(other.name()),
        }
    }
}

/// Where a buffer's memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Device {
    /// Host memory.
    Cpu,
    /// Memory of the CUDA device with this ordinal.
    Cuda(u32),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fits<T: Element>() -> bool {
        size_of::<T>() == T::DTYPE.size() && align_of::<T>() <= T::DTYPE.size()
    }

    #[test]
    fn every_element_has_the_size_of_its_type() {
        assert!(fits::<f16>() && fits::<bf16>() && fits::<f32>() && fits::<f64>());
        assert!(fits::<i8>() && fits::<u8>() && fits::<i16>() && fits::<i32>() && fits::<i64>());
        assert!(fits::<Complex<f32>>());
    }
}
