//! Small sets of small enumerations.

use std::fmt;
use std::marker::PhantomData;

use crate::call::CallKind;
use crate::dtype::{DType, ReduceOp};

/// A set of calls, element types or operators.
///
/// ```
/// use phalanx_pg::{DType, Set};
///
/// let floats: Set<DType> = DType::ALL.into_iter().filter(|d| d.is_float()).collect();
/// assert!(floats.contains(DType::BF16) && !floats.contains(DType::I8));
/// ```
pub struct Set<T> {
    bits: u32,
    of: PhantomData<T>,
}

/// Something that a [`Set`] can hold.
pub trait Member: Copy {
    /// Its position, below 32.
    fn position(self) -> u32;
}

impl Member for CallKind {
    #[inline]
    fn position(self) -> u32 {
        self as u32
    }
}

impl Member for DType {
    #[inline]
    fn position(self) -> u32 {
        self as u32
    }
}

impl Member for ReduceOp {
    #[inline]
    fn position(self) -> u32 {
        match self {
            Self::Sum => 0,
            Self::Avg => 1,
            Self::Product => 2,
            Self::Min => 3,
            Self::Max => 4,
            Self::BitAnd => 5,
            Self::BitOr => 6,
            Self::BitXor => 7,
            Self::PremulSum(_) => 8,
        }
    }
}

impl<T: Member> Set<T> {
    /// Whether `member` is in it.
    #[inline]
    pub fn contains(self, member: T) -> bool {
        self.bits & (1 << member.position()) != 0
    }

    /// What is in either.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self {
            bits: self.bits | other.bits,
            of: PhantomData,
        }
    }

    /// The set without `member`.
    #[must_use]
    pub fn without(self, member: T) -> Self {
        Self {
            bits: self.bits & !(1 << member.position()),
            of: PhantomData,
        }
    }
}

impl<T: Member> FromIterator<T> for Set<T> {
    fn from_iter<I: IntoIterator<Item = T>>(members: I) -> Self {
        let bits = members
            .into_iter()
            .fold(0, |bits, member| bits | 1 << member.position());
        Self {
            bits,
            of: PhantomData,
        }
    }
}

impl<T> Clone for Set<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Set<T> {}

impl<T> fmt::Debug for Set<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Set({:#b})", self.bits)
    }
}
