//! Reductions in rank order over anything that moves bytes; for backends.
//!
//! A library's own all-reduce combines ranks in an order that depends on the message's size, and so
//! do the bits of a floating-point sum. Here the contributions themselves travel: each rank gets
//! its slice of everybody's vector, combines the slices in rank order, and hands the result out.
//! That moves as many bytes as a ring. Short vectors go to everybody at once instead: one exchange
//! instead of two, and the same bits.

use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::reduce::{Contribution, fold, reduce as reduce_plainly};

/// Up to this many bytes per rank everybody gets everything.
const SHORT: usize = 8 << 10;

/// What a backend moves bytes with. Every rank of the group makes the same calls.
pub trait Exchange {
    /// Own rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Sends consecutive pieces of `send` to rank 0, 1, ... and receives theirs one behind the
    /// other. Lengths are in bytes.
    fn alltoall(
        &self,
        send: &[u8],
        send_lens: &[usize],
        recv: &mut [u8],
        recv_lens: &[usize],
    ) -> Result<()>;

    /// Gives every rank all pieces; this rank's is in its place in `bytes`. Lengths are in bytes.
    fn allgather(&self, bytes: &mut [u8], lens: &[usize]) -> Result<()>;
}

/// Every rank ends with the reduction of all ranks' `bytes`, which has the bits of
/// [`reduce`](crate::reduce::reduce).
pub fn allreduce(ex: &dyn Exchange, op: ReduceOp, dtype: DType, bytes: &mut [u8]) -> Result<()> {
    if bytes.len() <= SHORT || ex.size() == 1 {
        return allreduce_short(ex, op, dtype, bytes);
    }
    let lens = slices(bytes.len(), dtype, ex.size());
    reduce_own_slice(ex, op, dtype, bytes, &lens)?;
    ex.allgather(bytes, &lens)
}

/// The root ends with the reduction of all ranks' `bytes`; what the others end with means nothing.
pub fn reduce(
    ex: &dyn Exchange,
    op: ReduceOp,
    dtype: DType,
    bytes: &mut [u8],
    root: usize,
) -> Result<()> {
    if bytes.len() <= SHORT || ex.size() == 1 {
        return allreduce_short(ex, op, dtype, bytes);
    }
    let (rank, size) = (ex.rank(), ex.size());
    let lens = slices(bytes.len(), dtype, size);
    reduce_own_slice(ex, op, dtype, bytes, &lens)?;
    let own = bytes[range_of(&lens, rank)].to_vec();
    let to_root = |peer| if peer == root { own.len() } else { 0 };
    let sent: Vec<usize> = (0..size).map(to_root).collect();
    match rank == root {
        true => ex.alltoall(&own, &sent, bytes, &lens),
        false => ex.alltoall(&own, &sent, &mut [], &vec![0; size]),
    }
}

/// Every rank ends with its part of the reduction of all ranks' `input`.
pub fn reduce_scatter(
    ex: &dyn Exchange,
    op: ReduceOp,
    dtype: DType,
    input: &[u8],
    output: &mut [u8],
) -> Result<()> {
    let lens = vec![output.len(); ex.size()];
    let parts = collect(ex, input, &lens, output.len())?;
    combine(&factors(ex, op)?, op, dtype, &parts, output);
    Ok(())
}

fn allreduce_short(ex: &dyn Exchange, op: ReduceOp, dtype: DType, bytes: &mut [u8]) -> Result<()> {
    let (rank, size, len) = (ex.rank(), ex.size(), bytes.len());
    let mut parts = vec![0; len * size];
    parts[rank * len..][..len].copy_from_slice(bytes);
    ex.allgather(&mut parts, &vec![len; size])?;
    combine(&factors(ex, op)?, op, dtype, &parts, bytes);
    Ok(())
}

/// This rank's slice of `bytes` becomes that of the result.
fn reduce_own_slice(
    ex: &dyn Exchange,
    op: ReduceOp,
    dtype: DType,
    bytes: &mut [u8],
    lens: &[usize],
) -> Result<()> {
    let parts = collect(ex, bytes, lens, lens[ex.rank()])?;
    let factors = factors(ex, op)?;
    let own = range_of(lens, ex.rank());
    combine(&factors, op, dtype, &parts, &mut bytes[own]);
    Ok(())
}

/// Everybody's piece for this rank, one behind the other.
fn collect(ex: &dyn Exchange, send: &[u8], lens: &[usize], own_len: usize) -> Result<Vec<u8>> {
    let mut parts = vec![0; own_len * ex.size()];
    ex.alltoall(send, lens, &mut parts, &vec![own_len; ex.size()])?;
    Ok(parts)
}

/// Every rank's factor, which may differ; nothing unless the operator has any.
fn factors(ex: &dyn Exchange, op: ReduceOp) -> Result<Vec<f64>> {
    let ReduceOp::PremulSum(own) = op else {
        return Ok(Vec::new());
    };
    let mut bytes = vec![0; 8 * ex.size()];
    bytes[8 * ex.rank()..][..8].copy_from_slice(&own.to_le_bytes());
    ex.allgather(&mut bytes, &vec![8; ex.size()])?;
    let factor = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    Ok(bytes.chunks_exact(8).map(factor).collect())
}

/// Combines the parts, one per rank, in rank order.
fn combine(factors: &[f64], op: ReduceOp, dtype: DType, parts: &[u8], out: &mut [u8]) {
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
fn slices(len: usize, dtype: DType, size: usize) -> Vec<usize> {
    let elements = len / dtype.size();
    let count = |rank| elements / size + usize::from(rank < elements % size);
    (0..size).map(|rank| count(rank) * dtype.size()).collect()
}

fn range_of(lens: &[usize], rank: usize) -> std::ops::Range<usize> {
    let start = lens[..rank].iter().sum();
    start..start + lens[rank]
}
