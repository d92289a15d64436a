//! Reductions in rank order over anything that moves bytes; for backends.
//!
//! A library's own all-reduce combines ranks in an order that depends on the message's size, and so
//! do the bits of a floating-point sum. Here the contributions themselves travel: each rank gets
//! its slice of everybody's vector, combines the slices in rank order, and hands the result out.
//! That moves as many bytes as a ring. Short vectors go to everybody at once instead: one exchange
//! instead of two, and the same bits.

use crate::buffer::{Buffer, Frozen};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, ErrorKind, Result};
use crate::reduce::{Contribution, fold, reduce as reduce_plainly};

/// Up to this many bytes per rank everybody gets everything.
const SHORT: usize = 8 << 10;

/// What a backend moves bytes with. Every rank of the group makes the same calls.
///
/// Memory is given and handed back: after an error it may still be in use, and stays with the
/// backend. Lengths are in bytes.
pub trait Exchange {
    /// Own rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Sends consecutive pieces of `send` to rank 0, 1, ... and receives theirs into `recv`, one
    /// behind the other.
    fn alltoall(
        &self,
        send: Frozen,
        send_lens: &[usize],
        recv: Buffer,
        recv_lens: &[usize],
    ) -> Result<Buffer>;

    /// Gives every rank all pieces; this rank's is in its place in `pieces`.
    fn allgather(&self, pieces: Buffer, lens: &[usize]) -> Result<Buffer>;
}

/// Every rank ends with the reduction of all ranks' buffers, which has the bits of
/// [`reduce`](crate::reduce::reduce).
pub fn allreduce(ex: &dyn Exchange, op: ReduceOp, buf: Buffer) -> Result<Buffer> {
    if buf.byte_len() <= SHORT || ex.size() == 1 {
        return allreduce_short(ex, op, buf);
    }
    let lens = slices(&buf, ex.size());
    let buf = reduce_own_slice(ex, op, buf, &lens)?;
    ex.allgather(buf, &lens)
}

/// The root ends with the reduction of all ranks' buffers; what the others end with means nothing.
pub fn reduce(ex: &dyn Exchange, op: ReduceOp, buf: Buffer, root: usize) -> Result<Buffer> {
    if buf.byte_len() <= SHORT || ex.size() == 1 {
        return allreduce_short(ex, op, buf);
    }
    let (rank, size, dtype) = (ex.rank(), ex.size(), buf.dtype());
    let lens = slices(&buf, size);
    let buf = reduce_own_slice(ex, op, buf, &lens)?;
    let mut own = Buffer::zeroed(dtype, lens[rank] / dtype.size());
    own.as_bytes_mut()?
        .copy_from_slice(&buf.as_bytes()?[range_of(&lens, rank)]);
    let to_root = |peer| if peer == root { lens[rank] } else { 0 };
    let sent: Vec<usize> = (0..size).map(to_root).collect();
    if rank == root {
        return ex.alltoall(own.freeze(), &sent, buf, &lens);
    }
    let nothing = Buffer::zeroed(dtype, 0);
    ex.alltoall(own.freeze(), &sent, nothing, &vec![0; size])?;
    Ok(buf)
}

/// Every rank ends with its part of the reduction of all ranks' `input`.
pub fn reduce_scatter(
    ex: &dyn Exchange,
    op: ReduceOp,
    input: Frozen,
    mut output: Buffer,
) -> Result<Buffer> {
    let lens = vec![output.byte_len(); ex.size()];
    let parts = collect(ex, input, &lens)?;
    let factors = factors(ex, op)?;
    let dtype = output.dtype();
    let out = output.as_bytes_mut()?;
    combine(op, dtype, &factors, parts.as_bytes()?, out);
    Ok(output)
}

fn allreduce_short(ex: &dyn Exchange, op: ReduceOp, mut buf: Buffer) -> Result<Buffer> {
    let (rank, size, len) = (ex.rank(), ex.size(), buf.byte_len());
    let mut parts = Buffer::zeroed(buf.dtype(), buf.len() * size);
    parts.as_bytes_mut()?[rank * len..][..len].copy_from_slice(buf.as_bytes()?);
    let parts = ex.allgather(parts, &vec![len; size])?;
    let factors = factors(ex, op)?;
    let dtype = buf.dtype();
    combine(op, dtype, &factors, parts.as_bytes()?, buf.as_bytes_mut()?);
    Ok(buf)
}

/// This rank's slice of the buffer becomes that of the result.
fn reduce_own_slice(
    ex: &dyn Exchange,
    op: ReduceOp,
    buf: Buffer,
    lens: &[usize],
) -> Result<Buffer> {
    let dtype = buf.dtype();
    let sent = buf.freeze();
    let parts = collect(ex, sent.clone(), lens)?;
    let mut buf = sent.try_thaw().map_err(|_| {
        let what = "the backend keeps what it has sent";
        Error::new(ErrorKind::Backend, what)
    })?;
    let factors = factors(ex, op)?;
    let own = range_of(lens, ex.rank());
    let out = &mut buf.as_bytes_mut()?[own];
    combine(op, dtype, &factors, parts.as_bytes()?, out);
    Ok(buf)
}

/// Everybody's piece for this rank, one behind the other.
fn collect(ex: &dyn Exchange, send: Frozen, lens: &[usize]) -> Result<Buffer> {
    let (own, dtype) = (lens[ex.rank()], send.dtype());
    let parts = Buffer::zeroed(dtype, own / dtype.size() * ex.size());
    ex.alltoall(send, lens, parts, &vec![own; ex.size()])
}

/// Every rank's factor, which may differ; nothing unless the operator has any.
fn factors(ex: &dyn Exchange, op: ReduceOp) -> Result<Vec<f64>> {
    let ReduceOp::PremulSum(own) = op else {
        return Ok(Vec::new());
    };
    let mut factors = Buffer::zeroed(DType::F64, ex.size());
    factors.as_mut_slice::<f64>()?[ex.rank()] = own;
    ex.allgather(factors, &vec![8; ex.size()])?.to_vec()
}

/// Combines the parts, one per rank and as long as `out`, in rank order. `factors` are those of a
/// premultiplied sum.
pub fn combine(op: ReduceOp, dtype: DType, factors: &[f64], parts: &[u8], out: &mut [u8]) {
    if out.is_empty() {
        return;
    }
    let mut parts = parts.chunks_exact(out.len());
    let in_steps = match op {
        ReduceOp::Avg | ReduceOp::PremulSum(_) => false,
        // Between steps these would be rounded; and a single rank's truths are not ones yet.
        _ => !matches!(dtype, DType::F16 | DType::BF16 | DType::Bool),
    };
    if in_steps {
        out.copy_from_slice(parts.next().expect("there is a rank"));
        parts.for_each(|part| fold(op, dtype, out, part));
        return;
    }
    let part = |(rank, bytes)| Contribution {
        bytes,
        factor: factors.get(rank).copied().unwrap_or(1.0),
    };
    let parts: Vec<Contribution<'_>> = parts.enumerate().map(part).collect();
    reduce_plainly(op, dtype, &parts, out);
}

/// How many bytes of a vector each rank has to combine: whole elements, as even as can be.
fn slices(buf: &Buffer, size: usize) -> Vec<usize> {
    let elements = buf.len();
    let count = |rank| elements / size + usize::from(rank < elements % size);
    (0..size)
        .map(|rank| count(rank) * buf.dtype().size())
        .collect()
}

fn range_of(lens: &[usize], rank: usize) -> std::ops::Range<usize> {
    let start = lens[..rank].iter().sum();
    start..start + lens[rank]
}
