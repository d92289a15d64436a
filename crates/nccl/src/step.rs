//! What a call is in terms of NCCL's functions: plain data, made without the library.

use std::ffi::{c_int, c_void};

use half::{bf16, f16};
use nccl_sys::*;
use phalanx_pg::{Buffer, Call, DType, Error, ReduceOp, Result, explicit_counts};

use crate::channel::Line;

/// `ncclAlltoAll`, where the library has it.
pub(crate) type AllToAllFn = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    ncclDataType_t,
    ncclComm_t,
    cudaStream_t,
) -> ncclResult_t;

/// `ncclGather` and `ncclScatter`, where the library has them.
pub(crate) type RootedFn = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    ncclDataType_t,
    c_int,
    ncclComm_t,
    cudaStream_t,
) -> ncclResult_t;

/// One call of NCCL's, with the arguments that nearly all have.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(crate) kind: Kind,
    /// Where it reads; what only receives reads nothing.
    pub(crate) send: u64,
    /// Where it writes; what only sends writes nothing.
    pub(crate) recv: u64,
    pub(crate) count: usize,
    pub(crate) dtype: ncclDataType_t,
}

/// Which function, and its other arguments: operator, root or peer.
#[derive(Debug, Clone)]
pub(crate) enum Kind {
    AllReduce(Operator),
    Reduce(Operator, c_int),
    ReduceScatter(Operator),
    Broadcast(c_int),
    AllGather,
    Send(c_int),
    Recv(c_int),
    AllToAll(AllToAllFn),
    Gather(RootedFn, c_int),
    Scatter(RootedFn, c_int),
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
        match &self.kind {
            Kind::AllReduce(operator)
            | Kind::Reduce(operator, _)
            | Kind::ReduceScatter(operator) => Some(operator),
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

    /// A step from here to `to`; none if there is nothing to move.
    fn step(&self, to: &Range, kind: Kind) -> Option<Step> {
        (self.count > 0).then_some(Step {
            kind,
            send: self.address,
            recv: to.address,
            count: self.count,
            dtype: self.dtype,
        })
    }

    fn send(&self, peer: usize) -> Option<Step> {
        self.step(self, Kind::Send(peer as c_int))
    }

    fn recv(&self, peer: usize) -> Option<Step> {
        self.step(self, Kind::Recv(peer as c_int))
    }

    /// For what has no memory on this rank.
    fn nowhere(&self) -> Self {
        Self {
            address: 0,
            ..*self
        }
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
        let step = match call {
            Call::AllReduce { buf, op } => {
                let range = Range::of(buf)?;
                range.step(&range, Kind::AllReduce(reduction(*op, buf)?))
            }
            Call::Reduce { buf, op, root } => {
                let range = Range::of(buf)?;
                let kind = Kind::Reduce(reduction(*op, buf)?, *root as c_int);
                range.step(&range, kind)
            }
            Call::ReduceScatter { input, output, op } => {
                let (from, to) = (Range::of(input)?, Range::of(output)?);
                let kind = Kind::ReduceScatter(reduction(*op, output)?);
                // Counted by what comes out.
                from.part(0, output.len()).step(&to, kind)
            }
            Call::Broadcast { data, root } => {
                let range = Range::of(data.buffer())?;
                range.step(&range, Kind::Broadcast(*root as c_int))
            }
            Call::AllGather { input, output } => {
                Range::of(input)?.step(&Range::of(output)?, Kind::AllGather)
            }
            Call::Batch(calls) => {
                let steps: Result<Vec<_>> = calls.iter().map(|call| self.steps(call)).collect();
                return Ok(steps?.concat());
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
        Ok(step.into_iter().collect())
    }

    /// The sum of a buffer over all ranks.
    pub(crate) fn in_place_sum(&self, buffer: &Buffer) -> Result<Vec<Step>> {
        let range = Range::of(buffer)?;
        let sum = Kind::AllReduce(Operator::Plain(ncclSum));
        Ok(range.step(&range, sum).into_iter().collect())
    }

    fn gather(&self, input: &Buffer, output: Option<&Buffer>, root: usize) -> Result<Vec<Step>> {
        let from = Range::of(input)?;
        let to = output.map(Range::of).transpose()?;
        if let Some(call) = self.gather {
            let to = to.unwrap_or_else(|| from.nowhere());
            let step = from.step(&to, Kind::Gather(call, root as c_int));
            return Ok(step.into_iter().collect());
        }
        let mut steps: Vec<Step> = from.send(root).into_iter().collect();
        if let Some(to) = to {
            let len = input.len();
            let parts = (0..self.size).filter_map(|rank| to.part(rank * len, len).recv(rank));
            steps.extend(parts);
        }
        Ok(steps)
    }

    fn scatter(&self, input: Option<&Buffer>, output: &Buffer, root: usize) -> Result<Vec<Step>> {
        let to = Range::of(output)?;
        let from = input.map(Range::of).transpose()?;
        if let Some(call) = self.scatter {
            let from = from.unwrap_or_else(|| to.nowhere());
            let step = from
                .part(0, output.len())
                .step(&to, Kind::Scatter(call, root as c_int));
            return Ok(step.into_iter().collect());
        }
        let mut steps: Vec<Step> = to.recv(root).into_iter().collect();
        if let Some(from) = from {
            let len = output.len();
            let parts = (0..self.size).filter_map(|rank| from.part(rank * len, len).send(rank));
            steps.extend(parts);
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
            let part = from.part(0, input.len() / self.size);
            return Ok(part.step(&to, Kind::AllToAll(call)).into_iter().collect());
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

#[cfg(test)]
mod tests {
    use super::*;

    /// An older library: everything by sends and receives.
    const OLD: Translator = Translator {
        size: 3,
        alltoall: None,
        gather: None,
        scatter: None,
    };

    fn base(buffer: &Buffer) -> u64 {
        buffer.as_ptr().as_ptr() as u64
    }

    #[test]
    fn complex_numbers_are_pairs_and_premultiplied_by_a_real() {
        let buf = Buffer::zeroed(DType::Complex64, 5);
        let op = ReduceOp::PremulSum(0.5);
        let steps = OLD.steps(&Call::AllReduce { buf, op }).unwrap();
        assert_eq!((steps[0].count, steps[0].dtype), (10, ncclFloat32));
        let Some(Operator::Premul { factor, dtype }) = steps[0].operator() else {
            panic!("{steps:?}");
        };
        assert_eq!(*dtype, ncclFloat32);
        assert_eq!(factor[..4], 0.5f32.to_ne_bytes());
    }

    #[test]
    fn booleans_are_reduced_by_maximum_and_minimum() {
        for (op, expected) in [
            (ReduceOp::Sum, ncclMax),
            (ReduceOp::Max, ncclMax),
            (ReduceOp::Product, ncclMin),
            (ReduceOp::Min, ncclMin),
        ] {
            let Some(Operator::Plain(got)) = operator(op, DType::Bool) else {
                panic!("{op}");
            };
            assert_eq!(got, expected, "{op}");
        }
        assert!(operator(ReduceOp::BitAnd, DType::Bool).is_none());
        assert!(operator(ReduceOp::Product, DType::Complex64).is_none());
    }

    #[test]
    fn parts_of_any_length_go_to_their_places() {
        let (input, output) = (Buffer::zeroed(DType::I64, 5), Buffer::zeroed(DType::I64, 4));
        let (from, to) = (base(&input), base(&output));
        let call = Call::AllToAll {
            input: input.freeze(),
            output,
            send_counts: vec![2, 0, 3],
            recv_counts: vec![1, 3, 0],
        };
        let steps = OLD.steps(&call).unwrap();
        let shown: Vec<_> = steps
            .iter()
            .map(|step| match step.kind {
                Kind::Send(peer) => ("send", peer, step.send - from, step.count),
                Kind::Recv(peer) => ("recv", peer, step.recv - to, step.count),
                _ => panic!("{step:?}"),
            })
            .collect();
        let expected = [
            ("send", 0, 0, 2),
            ("recv", 0, 0, 1),
            ("recv", 1, 8, 3),
            ("send", 2, 16, 3),
        ];
        assert_eq!(shown, expected);
    }

    #[test]
    fn the_root_gathers_and_scatters_for_all() {
        let call = Call::Gather {
            input: Buffer::zeroed(DType::U8, 4).freeze(),
            output: Some(Buffer::zeroed(DType::U8, 12)),
            root: 1,
        };
        assert_eq!(
            OLD.steps(&call).unwrap().len(),
            4,
            "one send, three receives"
        );
        let call = Call::Scatter {
            input: None,
            output: Buffer::zeroed(DType::U8, 4),
            root: 1,
        };
        assert_eq!(OLD.steps(&call).unwrap().len(), 1, "one receive");
    }

    #[test]
    fn nothing_is_nothing_to_do_and_i16_is_refused() {
        let empty = |dtype| Call::AllReduce {
            buf: Buffer::zeroed(dtype, 0),
            op: ReduceOp::Sum,
        };
        assert!(OLD.steps(&empty(DType::F32)).unwrap().is_empty());
        assert!(OLD.steps(&empty(DType::I16)).is_err());
    }
}
