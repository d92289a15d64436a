//! MPI's names for element types and operators.
//!
//! Only for reductions whose bits do not depend on the order, see
//! [`is_order_free`](phalanx_pg::reduce::is_order_free): MPI chooses it.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use mpi::ffi;
use phalanx_pg::reduce::fold;
use phalanx_pg::{DType, Error, ReduceOp, Result};

use crate::library::check;

/// MPI has no 16-bit floats: they travel as the integers of their size.
pub(crate) fn datatype_of(dtype: DType) -> Result<ffi::MPI_Datatype> {
    // SAFETY: constants of the library's.
    Ok(unsafe {
        match dtype {
            DType::F16 | DType::BF16 => ffi::RSMPI_UINT16_T,
            DType::F32 => ffi::RSMPI_FLOAT,
            DType::F64 => ffi::RSMPI_DOUBLE,
            DType::I8 => ffi::RSMPI_INT8_T,
            DType::U8 | DType::Bool => ffi::RSMPI_UINT8_T,
            DType::I16 => ffi::RSMPI_INT16_T,
            DType::I32 => ffi::RSMPI_INT32_T,
            DType::I64 => ffi::RSMPI_INT64_T,
            DType::Complex64 => ffi::RSMPI_FLOAT_COMPLEX,
            other => return Err(Error::unsupported(format!("MPI has no {other}"))),
        }
    })
}

pub(crate) fn operator_for(op: ReduceOp, dtype: DType) -> Result<ffi::MPI_Op> {
    if matches!(dtype, DType::F16 | DType::BF16) {
        return half_operator(op, dtype);
    }
    // SAFETY: constants of the library's.
    Ok(unsafe {
        match (op, dtype) {
            // Of booleans: any, all, an odd number.
            (ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr, DType::Bool) => ffi::RSMPI_LOR,
            (ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd, DType::Bool) => ffi::RSMPI_LAND,
            (ReduceOp::BitXor, DType::Bool) => ffi::RSMPI_LXOR,
            (ReduceOp::Sum, _) => ffi::RSMPI_SUM,
            (ReduceOp::Product, _) => ffi::RSMPI_PROD,
            (ReduceOp::Min, _) => ffi::RSMPI_MIN,
            (ReduceOp::Max, _) => ffi::RSMPI_MAX,
            (ReduceOp::BitAnd, _) => ffi::RSMPI_BAND,
            (ReduceOp::BitOr, _) => ffi::RSMPI_BOR,
            (ReduceOp::BitXor, _) => ffi::RSMPI_BXOR,
            (other, _) => return Err(unknown(other, dtype)),
        }
    })
}

fn unknown(op: ReduceOp, dtype: DType) -> Error {
    Error::unsupported(format!("MPI has no {} of {dtype}", op.name()))
}

/// An operator that MPI has been told of.
#[derive(Clone, Copy)]
struct Handle(ffi::MPI_Op);

// SAFETY: a plain value that any thread may hand to MPI, which runs with MPI_THREAD_MULTIPLE.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// Sums and products of 16-bit floats, made when first needed and kept.
fn half_operator(op: ReduceOp, dtype: DType) -> Result<ffi::MPI_Op> {
    static MADE: [OnceLock<std::result::Result<Handle, Error>>; 4] = [const { OnceLock::new() }; 4];
    let (at, function): (usize, UserFunction) = match (op, dtype) {
        (ReduceOp::Sum, DType::F16) => (0, combine::<0>),
        (ReduceOp::Product, DType::F16) => (1, combine::<1>),
        (ReduceOp::Sum, DType::BF16) => (2, combine::<2>),
        (ReduceOp::Product, DType::BF16) => (3, combine::<3>),
        _ => return Err(unknown(op, dtype)),
    };
    let make = || {
        let mut made = MaybeUninit::uninit();
        // SAFETY: the function lives as long as the program, and does what MPI asks of it.
        let code = unsafe { ffi::MPI_Op_create(Some(function), 1, made.as_mut_ptr()) };
        check("MPI_Op_create", code)?;
        // SAFETY: MPI says that it made it.
        Ok(Handle(unsafe { made.assume_init() }))
    };
    let handle = MADE[at].get_or_init(make);
    handle.as_ref().map(|handle| handle.0).map_err(Error::clone)
}

type UserFunction =
    unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int, *mut ffi::MPI_Datatype);

/// The operator of this number; a function that MPI calls has no arguments of ours.
unsafe extern "C" fn combine<const OPERATOR: usize>(
    input: *mut c_void,
    inout: *mut c_void,
    len: *mut c_int,
    _: *mut ffi::MPI_Datatype,
) {
    let (op, dtype) = match OPERATOR {
        0 => (ReduceOp::Sum, DType::F16),
        1 => (ReduceOp::Product, DType::F16),
        2 => (ReduceOp::Sum, DType::BF16),
        _ => (ReduceOp::Product, DType::BF16),
    };
    // SAFETY: MPI gives two vectors of that many elements of two bytes which do not overlap, and
    // the second is for the result.
    let (part, acc) = unsafe {
        let bytes = usize::try_from(*len).unwrap_or(0) * 2;
        (
            std::slice::from_raw_parts(input.cast::<u8>(), bytes),
            std::slice::from_raw_parts_mut(inout.cast::<u8>(), bytes),
        )
    };
    fold(op, dtype, acc, part);
}
