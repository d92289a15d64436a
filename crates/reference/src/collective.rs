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
//! disagree get an error and stay in step: every message begins with the fingerprint of its call
//! (kind, number, element type, length, operator, root), and a rank that finds another one than its
//! own among them stops there, as all others do.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use phalanx_pg::reduce::{Contribution, reduce};
use phalanx_pg::{
    Buffer, Call, Done, Error, ErrorKind, Fingerprint, Payload, ReduceOp, Result, explicit_counts,
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

/// Runs the collective with number `seq` to its end.
pub(crate) fn run(call: Call, seq: u64, ranks: &dyn Exchange) -> Result<Done> {
    let print = Fingerprint::of(&call, seq);
    let differ = Cell::new(false);
    let step = |part| Step {
        part,
        print,
        differ: &differ,
        ranks,
    };
    match call {
        Call::Batch(calls) => batch(calls, step),
        call => step(0).run(call),
    }
}

/// Ranks with different batches find that in the first exchange, and stop. Ranks with equal ones go
/// through all calls even if one fails for its split sizes.
fn batch<'a>(calls: Vec<Call>, step: impl Fn(u32) -> Step<'a>) -> Result<Done> {
    let mut results = Vec::with_capacity(calls.len());
    for (part, call) in (0..).zip(calls) {
        let step = step(part);
        let result = step.run(call);
        let over = |err: &Error| !err.leaves_group_usable() || step.differ.get();
        if result.as_ref().is_err_and(over) {
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
    /// Of the whole call, also for a part of a batch.
    print: Fingerprint,
    /// Set when another rank's is a different one.
    differ: &'a Cell<bool>,
    ranks: &'a dyn Exchange,
}

impl Step<'_> {
    fn run(&self, call: Call) -> Result<Done> {
        match call {
            Call::AllReduce { buf, op } => {
                let came = self.to_all(self.contribution(op, buf.as_bytes()?))?;
                combine(op, &came, buf)
            }
            Call::Reduce { buf, op, root } => {
                let came = self.to_root(root, || Ok(self.contribution(op, buf.as_bytes()?)))?;
                match self.is(root) {
                    true => combine(op, &came, buf),
                    false => Ok(buf.into()),
                }
            }
            Call::ReduceScatter { input, output, op } => {
                let parts = equal_parts(self.size(), output.byte_len());
                let came = self.parts(&parts, |part| {
                    Ok(self.contribution(op, &input.as_bytes()?[part]))
                })?;
                combine(op, &came, output)
            }
            Call::Broadcast { data, root } => self.broadcast(data, root),
            Call::AllGather { input, output } => {
                let parts = equal_parts(self.size(), input.byte_len());
                let came = self.to_all(self.message(&[input.as_bytes()?]))?;
                line_up(&came, &parts, output)
            }
            Call::Gather {
                input,
                output,
                root,
            } => {
                let parts = equal_parts(self.size(), input.byte_len());
                let came = self.to_root(root, || Ok(self.message(&[input.as_bytes()?])))?;
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
                    Some(input) => Ok(self.message(&[&input.as_bytes()?[part]])),
                    None => Ok(self.message(&[])),
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
                let came =
                    self.parts(&sent, |part| Ok(self.message(&[&input.as_bytes()?[part]])))?;
                line_up(&came, &room, output)
            }
            Call::Barrier => self.to_all(self.message(&[])).map(|_| Done::default()),
            other => Err(Error::unsupported(format!(
                "the reference backend has no collective {}",
                other.kind()
            ))),
        }
    }

    fn broadcast(&self, data: Payload, root: usize) -> Result<Done> {
        let mine = match self.is(root) {
            true => self.message(&[data.buffer().as_bytes()?]),
            false => self.message(&[]),
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

    /// What goes to a rank: the call's fingerprint, and these bytes.
    fn message(&self, content: &[&[u8]]) -> Data {
        let mut bytes = self.print.encode();
        content
            .iter()
            .for_each(|part| bytes.extend_from_slice(part));
        Arc::new(bytes)
    }

    /// A rank's part in a reduction, behind its factor.
    fn contribution(&self, op: ReduceOp, bytes: &[u8]) -> Data {
        let factor = Contribution::new(op, bytes).factor.to_le_bytes();
        self.message(&[&factor, bytes])
    }

    /// What came from each rank, now that all of it is there and belongs to the same call.
    fn exchange(&self, outgoing: Vec<Data>) -> Result<Vec<Content>> {
        let came = self.ranks.exchange(self.part, outgoing)?;
        let print = |data: &Data| {
            let print = data.get(..Fingerprint::LEN).unwrap_or_default();
            Fingerprint::decode(print)
        };
        let prints: Vec<Fingerprint> = came.iter().map(print).collect::<Result<_>>()?;
        if let Some(err) = Fingerprint::mismatch(&prints, self.ranks.rank()) {
            self.differ.set(true);
            return Err(err);
        }
        Ok(came.into_iter().map(Content).collect())
    }

    fn to_all(&self, data: Data) -> Result<Vec<Content>> {
        self.exchange(vec![data; self.size()])
    }

    fn to_root(&self, root: usize, data: impl FnOnce() -> Result<Data>) -> Result<Vec<Content>> {
        let mut outgoing = vec![self.message(&[]); self.size()];
        outgoing[root] = data()?;
        self.exchange(outgoing)
    }

    fn parts(
        &self,
        parts: &[Range<usize>],
        data: impl Fn(Range<usize>) -> Result<Data>,
    ) -> Result<Vec<Content>> {
        let outgoing = parts.iter().cloned().map(data).collect::<Result<_>>()?;
        self.exchange(outgoing)
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

/// Bytes of a contribution before its elements: the factor of a premultiplied sum, which each
/// rank has its own of.
const FACTOR_LEN: usize = size_of::<f64>();

/// A message whose fingerprint is right.
struct Content(Data);

impl Content {
    fn bytes(&self) -> &[u8] {
        &self.0[Fingerprint::LEN..]
    }
}

/// Reduces all contributions into `out`.
fn combine(op: ReduceOp, came: &[Content], mut out: Buffer) -> Result<Done> {
    let mut parts = Vec::with_capacity(came.len());
    for (rank, content) in came.iter().enumerate() {
        let Some((factor, bytes)) = content.bytes().split_first_chunk::<FACTOR_LEN>() else {
            let what = format!("rank {rank} sent no factor for {}", op.name());
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
fn line_up(came: &[Content], parts: &[Range<usize>], mut out: Buffer) -> Result<Done> {
    let bytes = out.as_bytes_mut()?;
    for (rank, (content, part)) in came.iter().zip(parts).enumerate() {
        check_len(rank, content.bytes().len(), part.len())?;
        bytes[part.clone()].copy_from_slice(content.bytes());
    }
    Ok(out.into())
}

fn take(from: usize, content: &Content, mut out: Buffer) -> Result<Done> {
    let bytes = out.as_bytes_mut()?;
    check_len(from, content.bytes().len(), bytes.len())?;
    bytes.copy_from_slice(content.bytes());
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
