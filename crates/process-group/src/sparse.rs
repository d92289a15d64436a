//! Sparse tensors in coordinate form, as embedding layers' gradients come.

use std::collections::BTreeMap;

use crate::error::{Error, ErrorKind, Result};
use crate::ext::buffer;
use crate::reduce::{Contribution, reduce};
use crate::set::Member;
use crate::{Buffer, Call, CallOptions, DType, ProcessGroup, ProcessGroupExt, ReduceOp};

/// A sparse tensor: rows of values at given indices, all else zero.
#[derive(Debug)]
pub struct Sparse {
    /// `dims` numbers for each row: where it is. An index may occur more than once.
    pub indices: Vec<i64>,
    /// How many numbers an index has.
    pub dims: usize,
    /// The rows, one after the other.
    pub values: Buffer,
}

impl Sparse {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.indices.len().checked_div(self.dims).unwrap_or(0)
    }

    fn check(&self) -> Result<()> {
        let rows = self.rows();
        if self.dims == 0 || !self.indices.len().is_multiple_of(self.dims) {
            return Err(Error::invalid(format!(
                "{} numbers are no indices of {} dimensions",
                self.indices.len(),
                self.dims
            )));
        }
        let fits = if rows == 0 {
            self.values.is_empty()
        } else {
            self.values.len().is_multiple_of(rows)
        };
        match fits {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "{} values do not divide into {rows} rows",
                self.values.len()
            ))),
        }
    }
}

/// What a rank says about its tensor before it sends it.
struct Header {
    rows: usize,
    row_len: usize,
    dims: usize,
    /// The position of the element type.
    dtype: usize,
}

impl Header {
    const LEN: usize = 4;

    fn of(input: &Sparse) -> Self {
        let rows = input.rows();
        Self {
            rows,
            row_len: input.values.len().checked_div(rows).unwrap_or(0),
            dims: input.dims,
            dtype: input.values.dtype().position() as usize,
        }
    }

    fn encode(&self) -> [i64; Self::LEN] {
        [self.rows, self.row_len, self.dims, self.dtype].map(|n| n as i64)
    }

    fn decode(numbers: &[i64]) -> Result<Self> {
        let number = |at: usize| {
            let number = numbers.get(at).and_then(|&n| usize::try_from(n).ok());
            number.ok_or_else(|| mismatch("a rank's sparse tensor has no header".into()))
        };
        Ok(Self {
            rows: number(0)?,
            row_len: number(1)?,
            dims: number(2)?,
            dtype: number(3)?,
        })
    }
}

/// Gathers all ranks' rows and sums those of equal index, in rank order, on every rank alike.
pub(crate) fn allreduce<G: ProcessGroup + ?Sized>(group: &G, input: Sparse) -> Result<Sparse> {
    input.check()?;
    let (dims, dtype) = (input.dims, input.values.dtype());
    let headers = gather(group, Buffer::from_slice(&Header::of(&input).encode()))?;
    let headers = headers.as_slice::<i64>()?.chunks_exact(Header::LEN);
    let headers = headers.map(Header::decode).collect::<Result<Vec<_>>>()?;
    let row_len = agree(&headers)?;
    let counts: Vec<usize> = headers.iter().map(|header| header.rows).collect();
    let most = counts.iter().copied().max().unwrap_or(0);
    let indices = gather(
        group,
        padded(Buffer::from_slice(&input.indices), most * dims)?,
    )?;
    let values = gather(group, padded(input.values, most * row_len)?)?;
    sum_rows(&indices, &values, &counts, most, dims, row_len, dtype)
}

/// The row length, which ranks without rows do not know.
///
/// Every rank sees all headers and comes to the same answer, so none goes on alone.
fn agree(headers: &[Header]) -> Result<usize> {
    let first = &headers[0];
    for (rank, other) in headers.iter().enumerate() {
        let differ = |what: &str| {
            let what = format!("ranks 0 and {rank} differ in the {what} of a sparse tensor");
            Err(mismatch(what).from_peer(rank))
        };
        if other.dtype != first.dtype {
            return differ("element type");
        }
        if other.dims != first.dims {
            return differ("number of dimensions");
        }
    }
    let mut lens = headers.iter().filter(|h| h.rows > 0).map(|h| h.row_len);
    let row_len = lens.next().unwrap_or(0);
    match lens.all(|len| len == row_len) {
        true => Ok(row_len),
        false => Err(mismatch(
            "ranks differ in the length of a sparse row".into(),
        )),
    }
}

fn mismatch(what: String) -> Error {
    Error::new(ErrorKind::Mismatch, what)
}

fn sum_rows(
    indices: &Buffer,
    values: &Buffer,
    counts: &[usize],
    most: usize,
    dims: usize,
    row_len: usize,
    dtype: DType,
) -> Result<Sparse> {
    let row_bytes = row_len * dtype.size();
    let (indices, values) = (indices.as_slice::<i64>()?, values.as_bytes()?);
    let mut rows: BTreeMap<&[i64], Vec<Contribution<'_>>> = BTreeMap::new();
    for (rank, &count) in counts.iter().enumerate() {
        for row in rank * most..rank * most + count {
            let index = &indices[row * dims..][..dims];
            let value = &values[row * row_bytes..][..row_bytes];
            rows.entry(index)
                .or_default()
                .push(Contribution::new(ReduceOp::Sum, value));
        }
    }
    let mut out = Buffer::zeroed(dtype, rows.len() * row_len);
    let mut out_indices = Vec::with_capacity(rows.len() * dims);
    for (sum, parts) in out
        .as_bytes_mut()?
        .chunks_mut(row_bytes.max(1))
        .zip(rows.values())
    {
        reduce(ReduceOp::Sum, dtype, parts, sum);
    }
    rows.keys()
        .for_each(|index| out_indices.extend_from_slice(index));
    Ok(Sparse {
        indices: out_indices,
        dims,
        values: out,
    })
}

fn gather<G: ProcessGroup + ?Sized>(group: &G, part: Buffer) -> Result<Buffer> {
    let output = Buffer::zeroed(part.dtype(), part.len() * group.size());
    let call = Call::AllGather {
        input: part.freeze(),
        output,
    };
    buffer(group.call(call, &CallOptions::blocking())?.wait()?)
}

fn padded(part: Buffer, len: usize) -> Result<Buffer> {
    let mut padded = Buffer::zeroed(part.dtype(), len);
    padded.as_bytes_mut()?[..part.byte_len()].copy_from_slice(part.as_bytes()?);
    Ok(padded)
}
