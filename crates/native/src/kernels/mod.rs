//! Loops over elements: reductions and copies on memory that other processes may write to.
//!
//! Everything works on raw pointers. A reference would promise that nobody else writes to the
//! memory for as long as it lives; here others do, only not while a loop runs over it.
//!
//! `phalanx_pg::reduce` is the rule book: for every element type, operator and number of sources
//! these loops give its bits, on every processor. The one thing that it leaves open, and IEEE 754
//! with it, is *which* NaN comes out when several go into a sum or a product.

use std::ffi::OsStr;
use std::sync::OnceLock;

use half::f16;
use num_complex::Complex;
use phalanx_pg::{DType, ReduceOp};

use element::{And, Avg, Bf16, Max, Min, Or, PremulSum, Product, Sum, Truth, Xor};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod blocks;
mod copy;
mod element;
pub(crate) mod hint;
#[cfg(target_arch = "x86_64")]
mod lanes;
#[cfg(test)]
mod tests;

pub(crate) use copy::copy;

/// Calls one of the three functions with the types of the sources' and destinations' elements and
/// the operator: the first for elements that are combined as they are, the second for those that
/// are `f32`, the third for 16-bit floats.
macro_rules! loops {
    ($op:expr, $dtype:expr, $ends:expr, $job:expr, $($run:ident)::+, $($single:ident)::+, $($lanes:ident)::+, $bf16_wide:ty) => {
        match ($dtype, $ends) {
            (DType::F16, Ends::Narrow) => floats!($op, $($lanes)::+, f16, f16, $job),
            (DType::F16, Ends::WideIn) => floats!($op, $($lanes)::+, f32, f16, $job),
            (DType::F16, Ends::WideOut) => floats!($op, $($lanes)::+, f16, f32, $job),
            (DType::BF16, Ends::Narrow) => floats!($op, $($lanes)::+, Bf16, Bf16, $job),
            (DType::BF16, Ends::WideIn) => floats!($op, $($lanes)::+, $bf16_wide, Bf16, $job),
            (DType::BF16, Ends::WideOut) => floats!($op, $($lanes)::+, Bf16, $bf16_wide, $job),
            (DType::F32, _) => floats!($op, $($single)::+, f32, f32, $job),
            (DType::F64, _) => floats!($op, $($run)::+, f64, f64, $job),
            (DType::I8, _) => integers!($op, $($run)::+, i8, $job),
            (DType::U8, _) => integers!($op, $($run)::+, u8, $job),
            (DType::I16, _) => integers!($op, $($run)::+, i16, $job),
            (DType::I32, _) => integers!($op, $($run)::+, i32, $job),
            (DType::I64, _) => integers!($op, $($run)::+, i64, $job),
            (DType::Bool, _) => match $op {
                ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => {
                    $($run)::+::<Truth, Truth, And>($job)
                }
                ReduceOp::BitXor => $($run)::+::<Truth, Truth, Xor>($job),
                _ => $($run)::+::<Truth, Truth, Or>($job),
            },
            (DType::Complex64, _) => $($run)::+::<Complex<f32>, Complex<f32>, Product>($job),
            (other, _) => unreachable!("there are no loops for {other}"),
        }
    };
}

macro_rules! floats {
    ($op:expr, $($run:ident)::+, $in:ty, $out:ty, $job:expr) => {
        match $op {
            ReduceOp::PremulSum(_) => $($run)::+::<$in, $out, PremulSum>($job),
            ReduceOp::Avg => $($run)::+::<$in, $out, Avg>($job),
            ReduceOp::Product => $($run)::+::<$in, $out, Product>($job),
            ReduceOp::Min => $($run)::+::<$in, $out, Min>($job),
            ReduceOp::Max => $($run)::+::<$in, $out, Max>($job),
            _ => $($run)::+::<$in, $out, Sum>($job),
        }
    };
}

macro_rules! integers {
    ($op:expr, $($run:ident)::+, $type:ty, $job:expr) => {
        match $op {
            ReduceOp::Product => $($run)::+::<$type, $type, Product>($job),
            ReduceOp::Min => $($run)::+::<$type, $type, Min>($job),
            ReduceOp::Max => $($run)::+::<$type, $type, Max>($job),
            ReduceOp::BitAnd => $($run)::+::<$type, $type, And>($job),
            ReduceOp::BitOr => $($run)::+::<$type, $type, Or>($job),
            ReduceOp::BitXor => $($run)::+::<$type, $type, Xor>($job),
            _ => $($run)::+::<$type, $type, Sum>($job),
        }
    };
}

/// Chooses the loops; `portable` is the one value.
const KERNELS_VAR: &str = "PHALANX_KERNELS";

/// Which loops run on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernels {
    /// What every processor of the target has.
    Portable,
    /// AVX2 and F16C. Made by [`Kernels::available`] alone, where the processor has them.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Those and AVX-512, likewise.
    #[cfg(target_arch = "x86_64")]
    Avx512(Option<Ahead>),
}

/// How loops ask for lines of other processes some time before they read them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ahead {
    /// How long before, in bytes of a source.
    bytes: usize,
    /// Where to: the nearest cache, or the one behind it.
    nearest: bool,
}

#[cfg(target_arch = "x86_64")]
impl Ahead {
    /// Intel's processors ask by themselves within a page, but begin late. In a trial with two
    /// processes on a Xeon 1 and 2 KiB were about the same from 64 KiB to 16 MiB and a little better
    /// than none; 4 KiB was worse at 64 KiB.
    const INTEL: Self = Self {
        bytes: 1024,
        nearest: true,
    };
    /// AMD's can have few lines on their way to the nearest cache at a time, and the loop itself needs
    /// those; into the nearest cache it cost time at any distance. Two ranks on an EPYC took 64 KiB in a
    /// fifth less time with processors that have nothing in common and in a tenth less on a busy host.
    /// Beside each other and quiet they took a thirtieth less, or a tenth more: which of the two, lasts
    /// for seconds at any distance, and was not traced. 4 KiB were better apart, and worse on a busy host.
    const AMD: Self = Self {
        bytes: 3072,
        nearest: false,
    };
}

impl Kernels {
    /// The best that the processor has, unless `PHALANX_KERNELS=portable` forces the plain loops.
    /// An error is a text to show to the user.
    pub(crate) fn detect() -> Result<Self, String> {
        static DETECTED: OnceLock<Result<Kernels, String>> = OnceLock::new();
        let var = || std::env::var_os(KERNELS_VAR);
        DETECTED
            .get_or_init(|| Self::chosen(var().as_deref()))
            .clone()
    }

    fn chosen(value: Option<&OsStr>) -> Result<Self, String> {
        match value {
            None => Ok(Self::best()),
            Some(value) if value == "portable" => Ok(Self::Portable),
            Some(value) => Err(format!(
                "{KERNELS_VAR} is {value:?}: set it to `portable`, or unset it for the best loops \
                 that this processor has"
            )),
        }
    }

    fn best() -> Self {
        Self::available().last().unwrap_or(Self::Portable)
    }

    /// What this processor can run, the best last.
    pub(crate) fn available() -> impl Iterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let special = {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
            let avx512 =
                is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
            let (other, better) = match &vendor() {
                b"GenuineIntel" => (Ahead::AMD, Ahead::INTEL),
                _ => (Ahead::INTEL, Ahead::AMD),
            };
            let avx512 = |ahead| (avx2 && avx512).then_some(Self::Avx512(ahead));
            [
                avx2.then_some(Self::Avx2),
                avx512(None),
                avx512(Some(other)),
                avx512(Some(better)),
            ]
        };
        #[cfg(not(target_arch = "x86_64"))]
        let special: [Option<Self>; 0] = [];
        std::iter::once(Self::Portable).chain(special.into_iter().flatten())
    }

    /// How to ask for sources before they are read.
    fn ahead(self) -> Option<Ahead> {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(ahead) => ahead,
            _ => None,
        }
    }

    /// Whether loops ask for peers' lines before they read them.
    pub(crate) fn asks(self) -> bool {
        self.ahead().is_some()
    }

    /// The same loops, without asking.
    pub(crate) fn not_asking(self) -> Self {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => Self::Avx512(None),
            other => other,
        }
    }
}

/// Who says to have made the processor.
#[cfg(target_arch = "x86_64")]
fn vendor() -> [u8; 12] {
    let said = std::arch::x86_64::__cpuid(0);
    bytemuck::cast([said.ebx, said.edx, said.ecx])
}

/// One rank's contribution.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source {
    /// Its elements.
    pub(crate) ptr: *const u8,
    /// Its factor in a premultiplied sum; other operators ignore it.
    pub(crate) factor: f64,
    /// Whether another process has written it: its lines are likely to be in another processor's cache.
    pub(crate) far: bool,
}

/// Where a result goes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Dests<'a> {
    /// Over every source.
    Sources,
    At(&'a [*mut u8]),
}

impl Dests<'_> {
    /// Calls `put` with each.
    #[inline(always)]
    fn each(self, sources: &[Source], mut put: impl FnMut(*mut u8)) {
        match self {
            Self::Sources => sources.iter().for_each(|source| put(source.ptr.cast_mut())),
            Self::At(dests) => dests.iter().for_each(|&dest| put(dest)),
        }
    }
}

/// What a loop is to do.
struct Job<'a> {
    sources: &'a [Source],
    dests: Dests<'a>,
    /// Elements of each.
    len: usize,
    /// What averages are divided by.
    ranks: usize,
    /// How to ask for far sources before they are read, in loops that can.
    ahead: Option<Ahead>,
}

/// Combines the sources in the order given and writes the result to every destination. Averages
/// are divided by `ranks`, the size of the whole group.
///
/// # Safety
///
/// - Each source is readable and each destination writable for `len` elements of `dtype`, aligned
///   for it, and during the call nobody else writes to a source or touches a destination.
/// - A destination is one of the sources or overlaps none; destinations do not overlap each other.
///
/// # Panics
///
/// If there is no source, or the operator is not defined for the type.
pub(crate) unsafe fn reduce(
    kernels: Kernels,
    op: ReduceOp,
    dtype: DType,
    sources: &[Source],
    dests: Dests<'_>,
    len: usize,
    ranks: usize,
) {
    let job = Job {
        sources,
        dests,
        len,
        ranks,
        ahead: kernels.ahead(),
    };
    // SAFETY: passed on.
    unsafe { dispatch(kernels, op, dtype, Ends::Narrow, job) }
}

/// Combines the sources in the order given into `out`, in the wide type and not divided: what
/// hosts exchange.
///
/// # Safety
///
/// As [`reduce`], with `out` writable for `len` times [`wide_size`] bytes, aligned for the wide
/// type, and overlapping no source unless the wide type is the type itself.
pub(crate) unsafe fn partial(
    kernels: Kernels,
    op: ReduceOp,
    dtype: DType,
    sources: &[Source],
    out: *mut u8,
    len: usize,
) {
    let op = match op {
        ReduceOp::Avg => ReduceOp::Sum,
        other => other,
    };
    let job = Job {
        sources,
        dests: Dests::At(&[out]),
        len,
        ranks: 1,
        ahead: kernels.ahead(),
    };
    // SAFETY: passed on.
    unsafe { dispatch(kernels, op, dtype, Ends::WideOut, job) }
}

/// Combines partial results in the order given (hosts in order), divides averages by `ranks`,
/// narrows, and writes the result to every destination.
///
/// # Safety
///
/// As [`reduce`], with partial results as [`partial`] writes them for sources.
pub(crate) unsafe fn finish(
    kernels: Kernels,
    op: ReduceOp,
    dtype: DType,
    partials: &[*const u8],
    dests: &[*mut u8],
    len: usize,
    ranks: usize,
) {
    let op = match op {
        ReduceOp::PremulSum(_) => ReduceOp::Sum,
        other => other,
    };
    let sources: Vec<_> = partials
        .iter()
        .map(|&ptr| Source {
            ptr,
            factor: 1.0,
            far: false,
        })
        .collect();
    let job = Job {
        sources: &sources,
        dests: Dests::At(dests),
        len,
        ranks,
        ahead: kernels.ahead(),
    };
    // SAFETY: passed on.
    unsafe { dispatch(kernels, op, dtype, Ends::WideIn, job) }
}

/// Bytes per element of a partial result: 16-bit floats travel as `f32`.
pub(crate) fn wide_size(dtype: DType) -> usize {
    match dtype {
        DType::F16 | DType::BF16 => size_of::<f32>(),
        other => other.size(),
    }
}

/// Where elements of 16-bit types are wide; of others they always are.
#[derive(Clone, Copy)]
enum Ends {
    Narrow,
    WideIn,
    WideOut,
}

/// # Safety
///
/// As [`reduce`].
unsafe fn dispatch(kernels: Kernels, op: ReduceOp, dtype: DType, ends: Ends, mut job: Job<'_>) {
    assert!(op.is_defined_for(dtype), "{op} is not defined for {dtype}");
    assert!(!job.sources.is_empty(), "nothing to reduce");
    if dtype == DType::Complex64 && op != ReduceOp::Product {
        job.len *= 2;
        // SAFETY: passed on; a complex number is two real ones.
        return unsafe { dispatch(kernels, op, DType::F32, ends, job) };
    }
    // SAFETY: passed on; the types that `loops` names have the sizes and the alignments of the
    // element types, and `Avx2` and `Avx512` exist only where the processor has them.
    unsafe {
        match kernels {
            Kernels::Portable => {
                use blocks::run;
                loops!(op, dtype, ends, &job, run, run, run, f32)
            }
            #[cfg(target_arch = "x86_64")]
            Kernels::Avx2 => {
                use avx2::{run, run_lanes};
                use lanes::EvenOdd;
                loops!(op, dtype, ends, &job, run, run_lanes, run_lanes, EvenOdd)
            }
            #[cfg(target_arch = "x86_64")]
            Kernels::Avx512(_) => {
                use avx512::{run, run_lanes};
                use lanes::EvenOdd;
                loops!(op, dtype, ends, &job, run, run, run_lanes, EvenOdd)
            }
        }
    }
}
