//! Operations on data.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use nccl_sys::*;

use super::{answer, give};
use crate::comm::{Comm, find};
use crate::last_error::fail;
use crate::op::{self, Op, byte_len};
use crate::wire::{self, Collective, Kind, What};

/// What most operations have in common.
struct Operands {
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    stream: cudaStream_t,
}

impl Operands {
    fn bytes(&self) -> Result<usize, ncclResult_t> {
        byte_len(self.dtype, self.count).ok_or_else(|| {
            let why = format!("the emulator does not know {:?}", self.dtype);
            fail(ncclInvalidArgument, why)
        })
    }

    /// Elements of the part of `rank` in a buffer of parts.
    fn part(&self, base: u64, rank: usize) -> Result<u64, ncclResult_t> {
        Ok(base + (rank * self.bytes()?) as u64)
    }
}

fn collective(
    comm: ncclComm_t,
    kind: Kind,
    operands: &Operands,
    op: Option<ncclRedOp_t>,
    root: Option<c_int>,
) -> ncclResult_t {
    answer(|| {
        let comm = find(comm)?;
        let _inside = comm.enter()?;
        let bytes = operands.bytes()?;
        let root = root.map(|root| peer(&comm, root)).transpose()?;
        if operands.count == 0 {
            return Ok(ncclSuccess);
        }
        let input = match kind {
            Kind::ReduceScatter => bytes * comm.ranks(),
            // Only the root's buffer is read.
            Kind::Broadcast if root != Some(comm.rank()) => 0,
            _ => bytes,
        };
        let what = What::Collective(Collective {
            kind,
            dtype: operands.dtype.0,
            count: operands.count,
            op: op.map(|op| operator(&comm, op)),
            root,
        });
        let op = Op {
            what,
            input: (operands.send as u64, input),
            output: operands.recv as u64,
        };
        Ok(op::add(&comm, operands.stream, op))
    })
}

fn operator(comm: &Comm, op: ncclRedOp_t) -> wire::Op {
    match comm.factors.lock().get(&op.0) {
        Some(&factor) => wire::Op::PremulSum(factor),
        None => wire::Op::Plain(op.0),
    }
}

fn peer(comm: &Comm, rank: c_int) -> Result<usize, ncclResult_t> {
    let rank = usize::try_from(rank).ok();
    let known = rank.filter(|&rank| rank < comm.ranks());
    known.ok_or_else(|| fail(ncclInvalidArgument, "no such rank"))
}

fn send(comm: &Arc<Comm>, operands: &Operands, from: u64, peer: usize) -> ncclResult_t {
    answer(|| {
        let what = What::Send {
            peer,
            dtype: operands.dtype.0,
            count: operands.count,
        };
        let op = Op {
            what,
            input: (from, operands.bytes()?),
            output: 0,
        };
        Ok(op::add(comm, operands.stream, op))
    })
}

fn recv(comm: &Arc<Comm>, operands: &Operands, to: u64, peer: usize) -> ncclResult_t {
    answer(|| {
        let what = What::Recv {
            peer,
            dtype: operands.dtype.0,
            count: operands.count,
        };
        operands.bytes()?;
        let op = Op {
            what,
            input: (0, 0),
            output: to,
        };
        Ok(op::add(comm, operands.stream, op))
    })
}

/// Several sends and receives as one operation.
fn together(
    comm: ncclComm_t,
    operands: &Operands,
    parts: impl FnOnce(&Arc<Comm>) -> Result<(), ncclResult_t>,
) -> ncclResult_t {
    answer(|| {
        let comm = find(comm)?;
        let _inside = comm.enter()?;
        operands.bytes()?;
        if operands.count == 0 {
            return Ok(ncclSuccess);
        }
        op::open_group();
        let added = parts(&comm);
        let started = op::close_group();
        added.map(|()| started)
    })
}

/// A part of an operation, which must be accepted.
fn accepted(code: ncclResult_t) -> Result<(), ncclResult_t> {
    match code {
        ncclSuccess => Ok(()),
        code => Err(code),
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllReduce(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let operands = Operands {
        send,
        recv,
        count,
        dtype,
        stream,
    };
    collective(comm, Kind::AllReduce, &operands, Some(op), None)
}

#[unsafe(no_mangle)]
extern "C" fn ncclReduce(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    op: ncclRedOp_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let operands = Operands {
        send,
        recv,
        count,
        dtype,
        stream,
    };
    collective(comm, Kind::Reduce, &operands, Some(op), Some(root))
}

#[unsafe(no_mangle)]
extern "C" fn ncclReduceScatter(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let operands = Operands {
        send,
        recv,
        count,
        dtype,
        stream,
    };
    collective(comm, Kind::ReduceScatter, &operands, Some(op), None)
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllGather(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let operands = Operands {
        send,
        recv,
        count,
        dtype,
        stream,
    };
    collective(comm, Kind::AllGather, &operands, None, None)
}

#[unsafe(no_mangle)]
extern "C" fn ncclBroadcast(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let operands = Operands {
        send,
        recv,
        count,
        dtype,
        stream,
    };
    collective(comm, Kind::Broadcast, &operands, None, Some(root))
}

#[unsafe(no_mangle)]
extern "C" fn ncclBcast(
    data: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    ncclBroadcast(data, data, count, dtype, root, comm, stream)
}

#[unsafe(no_mangle)]
extern "C" fn ncclSend(
    data: *const c_void,
    count: usize,
    dtype: ncclDataType_t,
    to: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let recv = std::ptr::null_mut();
    let operands = Operands {
        send: data,
        recv,
        count,
        dtype,
        stream,
    };
    answer(|| {
        let comm = find(comm)?;
        let _inside = comm.enter()?;
        Ok(send(&comm, &operands, data as u64, peer(&comm, to)?))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclRecv(
    data: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    from: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let operands = Operands {
        send: data,
        recv: data,
        count,
        dtype,
        stream,
    };
    answer(|| {
        let comm = find(comm)?;
        let _inside = comm.enter()?;
        Ok(recv(&comm, &operands, data as u64, peer(&comm, from)?))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclAlltoAll(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let operands = Operands {
        send: from,
        recv: to,
        count,
        dtype,
        stream,
    };
    together(comm, &operands, |comm| {
        (0..comm.ranks()).try_for_each(|rank| {
            let (from, to) = (
                operands.part(from as u64, rank)?,
                operands.part(to as u64, rank)?,
            );
            accepted(send(comm, &operands, from, rank))?;
            accepted(recv(comm, &operands, to, rank))
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclGather(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let operands = Operands {
        send: from,
        recv: to,
        count,
        dtype,
        stream,
    };
    together(comm, &operands, |comm| {
        let root = peer(comm, root)?;
        accepted(send(comm, &operands, from as u64, root))?;
        if comm.rank() != root {
            return Ok(());
        }
        (0..comm.ranks()).try_for_each(|rank| {
            let to = operands.part(to as u64, rank)?;
            accepted(recv(comm, &operands, to, rank))
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclScatter(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let operands = Operands {
        send: from,
        recv: to,
        count,
        dtype,
        stream,
    };
    together(comm, &operands, |comm| {
        let root = peer(comm, root)?;
        if comm.rank() == root {
            for rank in 0..comm.ranks() {
                let from = operands.part(from as u64, rank)?;
                accepted(send(comm, &operands, from, rank))?;
            }
        }
        accepted(recv(comm, &operands, to as u64, root))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclRedOpCreatePreMulSum(
    op: *mut ncclRedOp_t,
    factor: *mut c_void,
    dtype: ncclDataType_t,
    residence: ncclScalarResidence_t,
    comm: ncclComm_t,
) -> ncclResult_t {
    answer(|| {
        let comm = find(comm)?;
        let _inside = comm.enter()?;
        if residence != ncclScalarHostImmediate || factor.is_null() {
            return Err(fail(ncclInvalidArgument, "the factor must be on the host"));
        }
        let Some(bytes) = byte_len(dtype, 1) else {
            return Err(fail(ncclInvalidArgument, "unknown type"));
        };
        // SAFETY: by NCCL's contract the factor is a value of this type.
        let bytes = unsafe { std::slice::from_raw_parts(factor.cast::<u8>(), bytes) };
        let value = match dtype {
            ncclFloat32 => f32::from_ne_bytes(bytes.try_into().expect("4 bytes")).into(),
            ncclFloat64 => f64::from_ne_bytes(bytes.try_into().expect("8 bytes")),
            ncclFloat16 => half::f16::from_ne_bytes(bytes.try_into().expect("2 bytes")).to_f64(),
            ncclBfloat16 => half::bf16::from_ne_bytes(bytes.try_into().expect("2 bytes")).to_f64(),
            _ => return Err(fail(ncclInvalidArgument, "not a floating-point type")),
        };
        // Large and without a pattern, as NCCL's are.
        let mut factors = comm.factors.lock();
        let handle = 0x5000_0005 ^ ((factors.len() as c_int) << 4);
        factors.insert(handle, value);
        give(op, ncclRedOp_t(handle))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclRedOpDestroy(op: ncclRedOp_t, comm: ncclComm_t) -> ncclResult_t {
    answer(|| {
        let comm = find(comm)?;
        let _inside = comm.enter()?;
        match comm.factors.lock().contains_key(&op.0) {
            true => Ok(ncclSuccess),
            false => Err(fail(ncclInvalidArgument, "no such operator")),
        }
    })
}
