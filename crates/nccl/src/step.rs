//! What a call is in terms of NCCL's functions: plain data, made without the library.

use std::ffi::{c_int, c_void};

use half::{bf16, f16};
use nccl_sys::*;
use phalanx_pg::{Buffer, Call, DType, Error, ReduceOp, Result, explicit_counts};

use crate::channel::Line;

/// `ncclAlltoAll`, where the library has it.
type AllToAllFn = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    ncclDataType_t,
    ncclComm_t,
    cudaStream_t,
) -> ncclResult_t;

/// `ncclGather` and `ncclScatter`, where the library has them.
type RootedFn = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    ncclDataType_t,
    c_int,
    ncclComm_t,
    cudaStream_t,
) -> ncclResult_t;

/// One call of NCCL's.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    AllReduce {
        send: u64,
        recv: u64,
        count: usize,
        dtype: ncclDataType_t,
        operator: Operator,
    },
    Reduce {
        send: u64,
        recv: u64,
        count: usize,
        dtype: ncclDataType_t,
        operator: Operator,
        root: c_int,
    },
    ReduceScatter {
        send: u64,
        recv: u64,
        count: usize,
        dtype: ncclDataType_t,
        operator: Operator,
    },
    Broadcast {
        data: u64,
        count: usize,
        dtype: ncclDataType_t,
        root: c_int,
    },
    AllGather {
        send: u64,
        recv: u64,
        count: usize,
        dtype: ncclDataType_t,
    },
    Send {
        data: u64,
        count: usize,
        dtype: ncclDataType_t,
        peer: c_int,
    },
    Recv {
        data: u64,
        count: usize,
        dtype: ncclDataType_t,
        peer: c_int,
    },
    AllToAll {
        call: AllToAllFn,
        send: u64,
        recv: u64,
        count: usize,
        dtype: ncclDataType_t,
    },
    Gather {
        call: RootedFn,
        send: u64,
        recv: u64,
        count: usize,
        dtype: ncclDataType_t,
        root: c_int,
    },
    Scatter {
        call: RootedFn,
        send: u64,
        recv: u64,
        count: usize,
        dtype: ncclDataType_t,
        root: c_int,
    },
}

/// How elements become one.
#[derive(Debug, Clone)]
pub(crate) enum Operator {
    Plain(ncclRedOp_t),
    /// Made for each communicator; the factor's bytes are of the type.
    Premul {
        factor: [u8; 8],
        dtype: ncclDataType_t,
    },
}

impl Step {
    pub(crate) fn operator(&self) -> Option<&Operator> {
        match self {
            Self::AllReduce { operator, .. }
            | Self::Reduce { operator, .. }
            | Self::ReduceScatter { operator, .. } => Some(operator),
            _ => None,
        }
    }
}

/// NCCL's type for elements of ours, and how many of them each is.
///
/// Booleans are bytes, complex numbers pairs. NCCL has no 16-bit integers.
pub(crate) fn element(dtype: DType) -> Option<(ncclDataType_t, usize)> {
    Some(match dtype {
        DType::F16 => (ncclFloat16, 1),
        DType::BF16 => (ncclBfloat16, 1),
        DType::F32 => (ncclFloat32, 1),
        DType::F64 => (ncclFloat64, 1),
        DType::I8 => (ncclInt8, 1),
        DType::U8 | DType::Bool => (ncclUint8, 1),
        DType::I32 => (ncclInt32, 1),
        DType::I64 => (ncclInt64, 1),
        DType::Complex64 => (ncclFloat32, 2),
        _ => return None,
    })
}

/// NCCL's operator; booleans zero and one are or-ed by the maximum and and-ed by the minimum.
pub(crate) fn operator(op: ReduceOp, dtype: DType) -> Option<Operator> {
    let bool = dtype == DType::Bool;
    Some(Operator::Plain(match op {
        ReduceOp::Sum if bool => ncclMax,
        ReduceOp::Product if bool => ncclMin,
        ReduceOp::Sum => ncclSum,
        ReduceOp::Product if dtype != DType::Complex64 => ncclProd,
        ReduceOp::Min => ncclMin,
        ReduceOp::Max => ncclMax,
        ReduceOp::Avg => ncclAvg,
        ReduceOp::PremulSum(factor) => {
            let (dtype, _) = element(dtype)?;
            return premul(factor, dtype);
        }
        _ => return None,
    }))
}

fn premul(factor: f64, dtype: ncclDataType_t) -> Option<Operator> {
    let mut bytes = [0; 8];
    let mut put = |value: &[u8]| bytes[..value.len()].copy_from_slice(value);
    match dtype {
        ncclFloat16 => put(&f16::from_f64(factor).to_ne_bytes()),
        ncclBfloat16 => put(&bf16::from_f64(factor).to_ne_bytes()),
        ncclFloat32 => put(&(factor as f32).to_ne_bytes()),
        ncclFloat64 => put(&factor.to_ne_bytes()),
        _ => return None,
    }
    Some(Operator::Premul {
        factor: bytes,
        dtype,
    })
}

/// Turns calls into steps for one rank of a group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Translator {
    pub(crate) size: usize,
    /// From 2.28 on; older libraries do these by sends and receives.
    pub(crate) alltoall: Option<AllToAllFn>,
    pub(crate) gather: Option<RootedFn>,
    pub(crate) scatter: Option<RootedFn>,
}

/// A range of a buffer, in NCCL's elements.
struct Range {
    address: u64,
    count: usize,
    dtype: ncclDataType_t,
    /// Bytes of one of our elements.
    width: usize,
    /// NCCL's elements in one of ours.
    each: usize,
}

impl Range {
    fn of(buffer: &Buffer) -> Result<Self> {
        let (dtype, each) = element(buffer.dtype())
            .ok_or_else(|| Error::unsupported(format!("nccl has no {}", buffer.dtype())))?;
        Ok(Self {
            address: buffer.as_ptr().as_ptr() as u64,
            count: buffer.len() * each,
            dtype,
            width: buffer.dtype().size(),
            each,
        })
    }

    /// `count` of our elements from number `start` on.
    fn part(&self, start: usize, count: usize) -> Self {
        Self {
            address: self.address + (start * self.width) as u64,
            count: count * self.each,
            ..*self
        }
    }

    fn send(&self, peer: usize) -> Option<Step> {
        let (data, count, dtype) = (self.address, self.count, self.dtype);
        let peer = peer as c_int;
        (count > 0).then_some(Step::Send {
            data,
            count,
            dtype,
            peer,
        })
    }

    fn recv(&self, peer: usize) -> Option<Step> {
        let (data, count, dtype) = (self.address, self.count, self.dtype);
        let peer = peer as c_int;
        (count > 0).then_some(Step::Recv {
            data,
            count,
            dtype,
            peer,
        })
    }
}

impl Translator {
    pub(crate) fn new(nccl: &Nccl, size: usize) -> Self {
        let has = nccl.version >= 22800;
        Self {
            size,
            alltoall: nccl.ncclAlltoAll.filter(|_| has),
            gather: nccl.ncclGather.filter(|_| has),
            scatter: nccl.ncclScatter.filter(|_| has),
        }
    }

    /// The steps of a collective. Nothing to do if it has no elements.
    pub(crate) fn steps(&self, call: &Call) -> Result<Vec<Step>> {
        let unsupported = || Error::unsupported(format!("nccl has no such {}", call.kind()));
        let reduction =
            |op: ReduceOp, buffer: &Buffer| operator(op, buffer.dtype()).ok_or_else(unsupported);
        if let Call::Batch(calls) = call {
            let steps: Result<Vec<Vec<Step>>> = calls.iter().map(|call| self.steps(call)).collect();
            return Ok(steps?.concat());
        }
        let step = match call {
            Call::AllReduce { buf, op } => {
                let Range {
                    address,
                    count,
                    dtype,
                    ..
                } = Range::of(buf)?;
                let operator = reduction(*op, buf)?;
                Step::AllReduce {
                    send: address,
                    recv: address,
                    count,
                    dtype,
                    operator,
                }
            }
            Call::Reduce { buf, op, root } => {
                let Range {
                    address,
                    count,
                    dtype,
                    ..
                } = Range::of(buf)?;
                let (operator, root) = (reduction(*op, buf)?, *root as c_int);
                Step::Reduce {
                    send: address,
                    recv: address,
                    count,
                    dtype,
                    operator,
                    root,
                }
            }
            Call::ReduceScatter { input, output, op } => {
                let (from, to) = (Range::of(input)?, Range::of(output)?);
                let operator = reduction(*op, output)?;
                Step::ReduceScatter {
                    send: from.address,
                    recv: to.address,
                    count: to.count,
                    dtype: to.dtype,
                    operator,
                }
            }
            Call::Broadcast { data, root } => {
                let Range {
                    address,
                    count,
                    dtype,
                    ..
                } = Range::of(data.buffer())?;
                Step::Broadcast {
                    data: address,
                    count,
                    dtype,
                    root: *root as c_int,
                }
            }
            Call::AllGather { input, output } => {
                let (from, to) = (Range::of(input)?, Range::of(output)?);
                Step::AllGather {
                    send: from.address,
                    recv: to.address,
                    count: from.count,
                    dtype: from.dtype,
                }
            }
            Call::Gather {
                input,
                output,
                root,
            } => {
                return self.gather(input, output.as_ref(), *root);
            }
            Call::Scatter {
                input,
                output,
                root,
            } => {
                return self.scatter(input.as_deref(), output, *root);
            }
            Call::AllToAll {
                input,
                output,
                send_counts,
                recv_counts,
            } => {
                return self.alltoall(input, output, (send_counts, recv_counts));
            }
            _ => return Err(unsupported()),
        };
        let moves = call
            .input()
            .or(call.output())
            .is_some_and(|buf| !buf.is_empty());
        Ok(if moves { vec![step] } else { Vec::new() })
    }

    /// The sum of a buffer over all ranks.
    pub(crate) fn in_place_sum(&self, buffer: &Buffer) -> Result<Vec<Step>> {
        let Range {
            address,
            count,
            dtype,
            ..
        } = Range::of(buffer)?;
        Ok(vec![Step::AllReduce {
            send: address,
            recv: address,
            count,
            dtype,
            operator: Operator::Plain(ncclSum),
        }])
    }

    fn gather(&self, input: &Buffer, output: Option<&Buffer>, root: usize) -> Result<Vec<Step>> {
        let from = Range::of(input)?;
        if from.count == 0 {
            return Ok(Vec::new());
        }
        let to = output.map(Range::of).transpose()?;
        if let Some(call) = self.gather {
            return Ok(vec![Step::Gather {
                call,
                send: from.address,
                recv: to.map_or(0, |to| to.address),
                count: from.count,
                dtype: from.dtype,
                root: root as c_int,
            }]);
        }
        let mut steps: Vec<Step> = from.send(root).into_iter().collect();
        if let Some(to) = to {
            let len = input.len();
            let each = (0..self.size).filter_map(|rank| to.part(rank * len, len).recv(rank));
            steps.extend(each);
        }
        Ok(steps)
    }

    fn scatter(&self, input: Option<&Buffer>, output: &Buffer, root: usize) -> Result<Vec<Step>> {
        let to = Range::of(output)?;
        if to.count == 0 {
            return Ok(Vec::new());
        }
        let from = input.map(Range::of).transpose()?;
        if let Some(call) = self.scatter {
            return Ok(vec![Step::Scatter {
                call,
                send: from.map_or(0, |from| from.address),
                recv: to.address,
                count: to.count,
                dtype: to.dtype,
                root: root as c_int,
            }]);
        }
        let mut steps: Vec<Step> = to.recv(root).into_iter().collect();
        if let Some(from) = from {
            let len = output.len();
            let each = (0..self.size).filter_map(|rank| from.part(rank * len, len).send(rank));
            steps.extend(each);
        }
        Ok(steps)
    }

    fn alltoall(
        &self,
        input: &Buffer,
        output: &Buffer,
        (send, recv): (&[usize], &[usize]),
    ) -> Result<Vec<Step>> {
        let (from, to) = (Range::of(input)?, Range::of(output)?);
        if let (Some(call), [], []) = (self.alltoall, send, recv) {
            let count = from.count / self.size;
            let step = Step::AllToAll {
                call,
                send: from.address,
                recv: to.address,
                count,
                dtype: from.dtype,
            };
            return Ok(if count > 0 { vec![step] } else { Vec::new() });
        }
        let send = explicit_counts(send, input.len(), self.size);
        let recv = explicit_counts(recv, output.len(), self.size);
        let (mut sent, mut received) = (0, 0);
        let mut steps = Vec::new();
        for rank in 0..self.size {
            steps.extend(from.part(sent, send[rank]).send(rank));
            steps.extend(to.part(received, recv[rank]).recv(rank));
            (sent, received) = (sent + send[rank], received + recv[rank]);
        }
        Ok(steps)
    }

    /// The step of a send or receive, and the communicator that it is for.
    pub(crate) fn message(&self, call: &Call) -> Result<(Line, Option<Step>)> {
        match call {
            Call::Send { data, peer, .. } => Ok((Line::To(*peer), Range::of(data)?.send(1))),
            Call::Recv {
                buf,
                peer: Some(peer),
                ..
            } => Ok((Line::From(*peer), Range::of(buf)?.recv(0))),
            other => {
                let what = format!("nccl has no such {}", other.kind());
                Err(Error::unsupported(what))
            }
        }
    }
}
