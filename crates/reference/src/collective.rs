//! The collectives, each as one exchange of messages.
//!
//! In an exchange every rank sends one message to every rank, empty if it has nothing to say, and
//! waits for one from each. That is all a collective here does:
//!
//! | call | what a rank sends to rank `i` | what it does with what came |
//! |---|---|---|
//! | allreduce | its buffer | reduces all of them, in rank order |
//! | reduce | its buffer, if `i` is the root | the root reduces |
//! | reduce_scatter | part `i` of its input | reduces |
//! | broadcast | its buffer, if it is the root | takes the root's |
//! | allgather | its input | lines all of them up |
//! | gather | its input, if `i` is the root | the root lines them up |
//! | scatter | part `i`, if it is the root | takes the root's |
//! | alltoall | part `i` of its input | lines all of them up |
//! | barrier | nothing | nothing |
//!
//! It moves more bytes than it must, and buys three things with them. Every rank computes the
//! same function of the same bytes, so results are the same bits everywhere. Nobody passes an
//! operation before everybody has reached it, so nobody runs ahead and a rank that waits knows
//! whom it waits for. And an exchange is complete before its contents are looked at, so ranks that
//! disagree about lengths get an error and stay in step.

use std::ops::Range;
use std::sync::Arc;

use phalanx_pg::reduce::{Contribution, reduce};
use phalanx_pg::{
    Buffer, Call, Done, Error, ErrorKind, Payload, ReduceOp, Result, explicit_counts,
};

use crate::mailbox::Data;

/// The one thing collectives need from below.
pub(crate) trait Exchange {
    fn rank(&self) -> usize;
    fn size(&self) -> usize;

    /// Sends `outgoing[i]` to rank `i` and returns what came from each rank, own included. `part`
    /// tells the exchanges of one operation apart.
    fn exchange(&self, part: u32, outgoing: Vec<Data>) -> Result<Vec<Data>>;
}

/// Runs a collective to its end.
pub(crate) fn run(call: Call, ranks: &dyn Exchange) -> Result<Done> {
    match call {
        Call::Batch(calls) => batch(calls, ranks),
        call => Step { part: 0, ranks }.run(call),
    }
}

/// Goes through all calls even if one fails for its lengths: the other ranks do too.
fn batch(calls: Vec<Call>, ranks: &dyn Exchange) -> Result<Done> {
    let mut results = Vec::with_capacity(calls.len());
    for (part, call) in (0..).zip(calls) {
        let result = Step { part, ranks }.run(call);
        if result.as_ref().is_err_and(|err| !err.leaves_group_usable()) {
            return result;
        }
        results.push(result);
    }
    let parts = results.into_iter().collect::<Result<_>>()?;
    Ok(Done {
        parts,
        ..Done::default()
    })
}

/// One collective of a batch, or the only one.
struct Step<'a> {
    part: u32,
    ranks: &'a dyn Exchange,
}

impl Step<'_> {
    fn run(&self, call: Call) -> Result<Done> {
        match call {
            Call::AllReduce { buf, op } => {
                let came = self.to_all(contribution(op, buf.as_bytes()?))?;
                combine(op, &came, buf)
            }
            Call::Reduce { buf, op, root } => {
                let came = self.to_root(root, || Ok(contribution(op, buf.as_bytes()?)))?;
                match self.is(root) {
                    true => combine(op, &came, buf),
                    false => Ok(buf.into()),
                }
            }
            Call::ReduceScatter { input, output, op } => {
                let parts = equal_parts(self.size(), output.byte_len());
                let came = self.parts(&parts, |part| {
                    Ok(contribution(op, &input.as_bytes()?[part]))
                })?;
                combine(op, &came, output)
            }
            Call::Broadcast { data, root } => self.broadcast(data, root),
            Call::AllGather { input, output } => {
                let parts = equal_parts(self.size(), input.byte_len());
                let came = self.to_all(copy(input.as_bytes()?))?;
                line_up(&came, &parts, output)
            }
            Call::Gather {
                input,
                output,
                root,
            } => {
                let parts = equal_parts(self.size(), input.byte_len());
                let came = self.to_root(root, || Ok(copy(input.as_bytes()?)))?;
                match output {
                    Some(output) => line_up(&came, &parts, output),
                    None => Ok(Done::default()),
                }
            }
            Call::Scatter {
                input,
                output,
                root,
            } => {
                let parts = equal_parts(self.size(), output.byte_len());
                let came = self.parts(&parts, |part| match &input {
                    Some(input) => Ok(copy(&input.as_bytes()?[part])),
                    None => Ok(Data::default()),
                })?;
                take(root, &came[root], output)
            }
            Call::AllToAll {
                input,
                output,
                send_counts,
                recv_counts,
            } => {
                let sent = self.counted_parts(&send_counts, &input);
                let room = self.counted_parts(&recv_counts, &output);
                let came = self.parts(&sent, |part| Ok(copy(&input.as_bytes()?[part])))?;
                line_up(&came, &room, output)
            }
            Call::Barrier => self.to_all(Data::default()).map(|_| Done::default()),
            other => Err(Error::unsupported(format!(
                "the reference backend has no collective {}",
                other.kind()
            ))),
        }
    }

    fn broadcast(&self, data: Payload, root: usize) -> Result<Done> {
        let mine = match self.is(root) {
            true => copy(data.buffer().as_bytes()?),
            false => Data::default(),
        };
        let came = self.to_all(mine)?;
        match data {
            Payload::ReadOnly(_) => Ok(Done::default()),
            Payload::Writable(buf) => take(root, &came[root], buf),
        }
    }

    fn size(&self) -> usize {
        self.ranks.size()
    }

    fn is(&self, root: usize) -> bool {
        self.ranks.rank() == root
    }

    fn to_all(&self, data: Data) -> Result<Vec<Data>> {
        let outgoing = vec![data; self.size()];
        self.ranks.exchange(self.part, outgoing)
    }

    fn to_root(&self, root: usize, data: impl FnOnce() -> Result<Data>) -> Result<Vec<Data>> {
        let mut outgoing = vec![Data::default(); self.size()];
        outgoing[root] = data()?;
        self.ranks.exchange(self.part, outgoing)
    }

    fn parts(
        &self,
        parts: &[Range<usize>],
        data: impl Fn(Range<usize>) -> Result<Data>,
    ) -> Result<Vec<Data>> {
        let outgoing = parts.iter().cloned().map(data).collect::<Result<_>>()?;
        self.ranks.exchange(self.part, outgoing)
    }

    /// Where the parts of an all-to-all are, in bytes.
    fn counted_parts(&self, counts: &[usize], buf: &Buffer) -> Vec<Range<usize>> {
        let width = buf.dtype().size();
        let counts = explicit_counts(counts, buf.len(), self.size());
        let ends = counts.into_iter().scan(0, |end, count| {
            let start = *end;
            *end += count * width;
            Some(start..*end)
        });
        ends.collect()
    }
}

fn equal_parts(count: usize, bytes: usize) -> Vec<Range<usize>> {
    (0..count).map(|i| i * bytes..(i + 1) * bytes).collect()
}

fn copy(bytes: &[u8]) -> Data {
    Arc::new(bytes.to_vec())
}

/// Bytes of a contribution before its elements: the factor of a premultiplied sum, which each
/// rank has its own of.
const FACTOR_LEN: usize = size_of::<f64>();

fn contribution(op: ReduceOp, bytes: &[u8]) -> Data {
    let factor = Contribution::new(op, bytes).factor.to_le_bytes();
    Arc::new([&factor[..], bytes].concat())
}

/// Reduces all contributions into `out`.
fn combine(op: ReduceOp, came: &[Data], mut out: Buffer) -> Result<Done> {
    let mut parts = Vec::with_capacity(came.len());
    for (rank, data) in came.iter().enumerate() {
        let Some((factor, bytes)) = data.split_first_chunk::<FACTOR_LEN>() else {
            let what = format!("rank {rank} called something that is no {}", op.name());
            return Err(Error::new(ErrorKind::Mismatch, what).from_peer(rank));
        };
        check_len(rank, bytes.len(), out.byte_len())?;
        let factor = f64::from_le_bytes(*factor);
        parts.push(Contribution { bytes, factor });
    }
    let dtype = out.dtype();
    reduce(op, dtype, &parts, out.as_bytes_mut()?);
    Ok(out.into())
}

/// Puts each rank's message where its part is.
fn line_up(came: &[Data], parts: &[Range<usize>], mut out: Buffer) -> Result<Done> {
    let bytes = out.as_bytes_mut()?;
    for (rank, (data, part)) in came.iter().zip(parts).enumerate() {
        check_len(rank, data.len(), part.len())?;
        bytes[part.clone()].copy_from_slice(data);
    }
    Ok(out.into())
}

fn take(from: usize, data: &Data, mut out: Buffer) -> Result<Done> {
    let bytes = out.as_bytes_mut()?;
    check_len(from, data.len(), bytes.len())?;
    bytes.copy_from_slice(data);
    Ok(out.into())
}

/// The error that a message of the wrong length is. The group stays usable: the exchange, or the
/// message, is over.
pub(crate) fn check_len(from: usize, got: usize, expected: usize) -> Result<()> {
    match got == expected {
        true => Ok(()),
        false => {
            let what = format!("rank {from} sent {got} bytes, {expected} were expected");
            Err(Error::new(ErrorKind::Mismatch, what).from_peer(from))
        }
    }
}
