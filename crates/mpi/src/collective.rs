//! Every collective, once all ranks have said hello.

use std::time::Instant;

use phalanx_pg::ordered::{self, Exchange};
use phalanx_pg::reduce::is_order_free;
use phalanx_pg::{
    Buffer, Call, Done, Error, ErrorKind, Frozen, Payload, ReduceOp, Result, explicit_counts,
};

use crate::comm::{Comm, MAX_COUNT};
use crate::flight::{Flight, Source};
use crate::hello::MAX_INLINE;
use crate::member::{EXCHANGE, Member, Needs};

/// One collective in its turn.
pub(crate) struct Round<'a> {
    pub(crate) member: &'a Member,
    pub(crate) seq: u64,
    pub(crate) deadline: Instant,
}

/// Bytes that travel behind the data of a premultiplied sum.
fn factor_len(op: ReduceOp) -> usize {
    match op {
        ReduceOp::PremulSum(_) => 8,
        _ => 0,
    }
}

/// Whether a reduction is so short that it travels with the hello.
fn is_inline(buf: &Buffer, op: ReduceOp, size: usize) -> bool {
    let room = MAX_INLINE / size;
    buf.byte_len() + factor_len(op) <= room
}

/// What travels with the hello.
pub(crate) fn data_for_hello(call: &Call, size: usize) -> Result<Vec<u8>> {
    match call {
        Call::AllReduce { buf, op } if is_inline(buf, *op, size) => {
            let mut data = buf.as_bytes()?.to_vec();
            if let ReduceOp::PremulSum(factor) = op {
                data.extend(factor.to_le_bytes());
            }
            Ok(data)
        }
        _ => Ok(Vec::new()),
    }
}

/// Whether a collective of MPI's does it, which cannot be left.
pub(crate) fn is_by_library(call: &Call, size: usize) -> bool {
    let reduces = |buf: &Buffer, op| size > 1 && is_order_free(op, buf.dtype(), size);
    match call {
        Call::AllReduce { buf, op } => !is_inline(buf, *op, size) && reduces(buf, *op),
        Call::Reduce { buf, op, .. } => reduces(buf, *op),
        Call::Broadcast { .. } => true,
        Call::AllGather { input, .. } | Call::Gather { input, .. } => input.byte_len() <= MAX_COUNT,
        Call::Scatter { output, .. } => output.byte_len() <= MAX_COUNT,
        _ => false,
    }
}

/// Runs a call that [`is_by_library`]. All ranks must have come to it.
pub(crate) fn by_library(comm: &Comm, call: Call) -> Result<Done> {
    match call {
        Call::AllReduce { mut buf, op } => {
            let dtype = buf.dtype();
            comm.allreduce(buf.as_bytes_mut()?, op, dtype)?;
            Ok(buf.into())
        }
        Call::Reduce { mut buf, op, root } => {
            let dtype = buf.dtype();
            comm.reduce(buf.as_bytes_mut()?, op, dtype, root)?;
            Ok(buf.into())
        }
        Call::Broadcast {
            data: Payload::Writable(mut buf),
            root,
        } => {
            comm.broadcast(buf.as_bytes_mut()?, root)?;
            Ok(buf.into())
        }
        Call::Broadcast {
            data: Payload::ReadOnly(data),
            ..
        } => {
            comm.broadcast_from(data.as_bytes()?)?;
            Ok(Done::default())
        }
        Call::AllGather { input, mut output } => {
            comm.allgather(input.as_bytes()?, output.as_bytes_mut()?)?;
            Ok(output.into())
        }
        Call::Gather {
            input,
            mut output,
            root,
        } => {
            let out = match &mut output {
                Some(output) => output.as_bytes_mut()?,
                None => &mut [],
            };
            comm.gather(input.as_bytes()?, out, root)?;
            Ok(output.map(Done::from).unwrap_or_default())
        }
        Call::Scatter {
            input,
            mut output,
            root,
        } => {
            let from = match &input {
                Some(input) => input.as_bytes()?,
                None => &[],
            };
            comm.scatter(from, output.as_bytes_mut()?, root)?;
            Ok(output.into())
        }
        other => Err(unsupported(&other)),
    }
}

fn unsupported(call: &Call) -> Error {
    Error::unsupported(format!("{} is no collective", call.kind()))
}

impl Round<'_> {
    /// `heard` is what travelled with the hello, by rank.
    pub(crate) fn run(&self, call: Call, heard: &[u8]) -> Result<Done> {
        let size = self.size();
        if is_by_library(&call, size) {
            return by_library(self.member.comm(), call);
        }
        match call {
            Call::AllReduce { buf, op } if is_inline(&buf, op, size) => {
                self.combine(buf, op, heard)
            }
            Call::AllReduce { buf, op } => Ok(ordered::allreduce(self, op, buf)?.into()),
            Call::Reduce { buf, op, root } => Ok(ordered::reduce(self, op, buf, root)?.into()),
            Call::ReduceScatter { input, output, op } => {
                Ok(ordered::reduce_scatter(self, op, input, output)?.into())
            }
            Call::AllToAll {
                input,
                output,
                send_counts,
                recv_counts,
            } => self.exchange(input, &send_counts, output, &recv_counts),
            Call::AllGather { input, output } => self.long_gather(input, Some(output), |_| true),
            Call::Gather {
                input,
                output,
                root,
            } => self.long_gather(input, output, |rank| rank == root),
            Call::Scatter {
                input,
                output,
                root,
            } => self.long_scatter(input, output, root),
            Call::Barrier => Ok(Done::default()),
            other => Err(unsupported(&other)),
        }
    }

    /// A reduction of what travelled with the hello.
    fn combine(&self, mut buf: Buffer, op: ReduceOp, heard: &[u8]) -> Result<Done> {
        let (len, dtype) = (buf.byte_len(), buf.dtype());
        let out = buf.as_bytes_mut()?;
        if factor_len(op) == 0 {
            ordered::combine(op, dtype, &[], heard, out);
            return Ok(buf.into());
        }
        let blocks = heard.chunks_exact(len + factor_len(op));
        let (mut parts, mut factors) = (Vec::new(), Vec::new());
        for (part, factor) in blocks.map(|block| block.split_at(len)) {
            parts.extend(part);
            factors.push(f64::from_le_bytes(factor.try_into().expect("eight bytes")));
        }
        ordered::combine(op, dtype, &factors, &parts, out);
        Ok(buf.into())
    }

    fn exchange(
        &self,
        input: Frozen,
        send_counts: &[usize],
        output: Buffer,
        recv_counts: &[usize],
    ) -> Result<Done> {
        let (size, width) = (self.size(), input.dtype().size());
        let lens = |counts: &[usize], len| -> Vec<usize> {
            let counts = explicit_counts(counts, len, size);
            counts.into_iter().map(|count| count * width).collect()
        };
        let sent = lens(send_counts, input.len());
        let received = lens(recv_counts, output.len());
        Ok(self.alltoall(input, &sent, output, &received)?.into())
    }

    /// A gather of parts that are longer than MPI counts.
    fn long_gather(
        &self,
        input: Frozen,
        output: Option<Buffer>,
        gets_all: impl Fn(usize) -> bool,
    ) -> Result<Done> {
        let (size, len, dtype) = (self.size(), input.byte_len(), input.dtype());
        let is_root = gets_all(self.rank());
        // Everybody sends all of the same input, which is one message to each.
        let messages = (0..size).filter(|&rank| gets_all(rank));
        let sends = messages.map(|rank| (rank, 0..len)).collect();
        let room = output.unwrap_or_else(|| Buffer::zeroed(dtype, 0));
        let recvs = match is_root {
            true => pieces(&vec![len; size]),
            false => Vec::new(),
        };
        let done = self.transfer(input, sends, room, recvs)?;
        Ok(match is_root {
            true => done.into(),
            false => Done::default(),
        })
    }

    /// A scatter of parts that are longer than MPI counts.
    fn long_scatter(&self, input: Option<Frozen>, output: Buffer, root: usize) -> Result<Done> {
        let (size, len, dtype) = (self.size(), output.byte_len(), output.dtype());
        let nothing = || Buffer::zeroed(dtype, 0).freeze();
        let sent = if self.rank() == root { len } else { 0 };
        let received = |rank| if rank == root { len } else { 0 };
        let recv_lens: Vec<usize> = (0..size).map(received).collect();
        let input = input.unwrap_or_else(nothing);
        let done = self.alltoall(input, &vec![sent; size], output, &recv_lens)?;
        Ok(done.into())
    }

    /// Sends ranges of one memory and receives into ranges of another, each to or from a rank. What
    /// is empty travels too: the other side may see it otherwise, and must not take it for what
    /// comes next.
    fn transfer(
        &self,
        send: Frozen,
        sends: Vec<(usize, std::ops::Range<usize>)>,
        mut recv: Buffer,
        recvs: Vec<(usize, std::ops::Range<usize>)>,
    ) -> Result<Buffer> {
        let me = self.rank();
        let own = |ranges: &[(usize, std::ops::Range<usize>)]| {
            let mut ranges = ranges.iter().filter(|(rank, _)| *rank == me);
            ranges.next().map(|(_, range)| range.clone())
        };
        if let (Some(from), Some(to)) = (own(&sends), own(&recvs)) {
            recv.as_bytes_mut()?[to].copy_from_slice(&send.as_bytes()?[from]);
        }
        let (from, to) = (send.as_ptr().as_ptr().cast_const(), recv.as_ptr().as_ptr());
        let (sent_len, recv_len) = (send.byte_len(), recv.byte_len());
        let mut flight = Flight::new((send, recv));
        let others = |ranges: Vec<(usize, std::ops::Range<usize>)>, len: usize| {
            let ranges = ranges.into_iter();
            ranges.filter(move |(rank, range)| {
                assert!(range.end <= len, "a message is inside its memory");
                *rank != me
            })
        };
        let mut expected = Vec::new();
        // SAFETY: each range is inside the memory, which is the flight's and does not move with
        // it; those that are received into do not overlap.
        unsafe {
            for (rank, range) in others(recvs, recv_len) {
                let place = (to.add(range.start), range.len());
                flight.recv(self.member.control(), place, Source::Rank(rank), EXCHANGE)?;
                expected.push((rank, range.len(), flight.messages()));
            }
            for (rank, range) in others(sends, sent_len) {
                let place = (from.add(range.start), range.len());
                flight.send(self.member.control(), place, rank, EXCHANGE)?;
            }
        }
        self.wait(&mut flight)?;
        check_lengths(&flight, &expected)?;
        let (_sent, received) = flight.land();
        Ok(received)
    }

    fn wait<M>(&self, flight: &mut Flight<M>) -> Result<()> {
        let late = |_: &Flight<M>| {
            let what = "not all ranks have given their part in time";
            Error::new(ErrorKind::Timeout, what)
        };
        self.member.poll(
            Needs::All(self.seq),
            self.deadline,
            flight,
            Flight::test,
            late,
        )
    }
}

/// That as much has come as there is room for. Receives were started first, each up to the number
/// of messages that it goes with.
fn check_lengths<M>(flight: &Flight<M>, expected: &[(usize, usize, usize)]) -> Result<()> {
    let mut first = 0;
    for &(rank, len, end) in expected {
        let came: Result<usize> = (first..end)
            .map(|message| flight.arrival(message).map(|arrival| arrival.bytes))
            .sum();
        let came = came?;
        if came != len {
            let what = format!("rank {rank} sent {came} bytes, {len} were expected");
            return Err(Error::new(ErrorKind::Mismatch, what).from_peer(rank));
        }
        first = end;
    }
    Ok(())
}

/// Consecutive ranges of these lengths, by rank.
fn pieces(lens: &[usize]) -> Vec<(usize, std::ops::Range<usize>)> {
    let mut start = 0;
    let piece = |(rank, &len): (usize, &usize)| {
        let range = start..start + len;
        start += len;
        (rank, range)
    };
    lens.iter().enumerate().map(piece).collect()
}

impl Exchange for Round<'_> {
    fn rank(&self) -> usize {
        self.member.rank()
    }

    fn size(&self) -> usize {
        self.member.size()
    }

    fn alltoall(
        &self,
        send: Frozen,
        send_lens: &[usize],
        recv: Buffer,
        recv_lens: &[usize],
    ) -> Result<Buffer> {
        self.transfer(send, pieces(send_lens), recv, pieces(recv_lens))
    }

    fn allgather(&self, buf: Buffer, lens: &[usize]) -> Result<Buffer> {
        let rank = self.rank();
        let ranges = pieces(lens);
        let own = ranges[rank].1.clone();
        let place = buf.as_ptr().as_ptr();
        assert!(ranges.iter().all(|(_, range)| range.end <= buf.byte_len()));
        let mut flight = Flight::new(buf);
        let mut expected = Vec::new();
        // SAFETY: each range is inside the memory, which is the flight's and does not move with
        // it; what is sent is only read, and none of the others overlaps it or another.
        unsafe {
            for (peer, range) in ranges.into_iter().filter(|(peer, _)| *peer != rank) {
                if !range.is_empty() {
                    let place = (place.add(range.start), range.len());
                    flight.recv(self.member.control(), place, Source::Rank(peer), EXCHANGE)?;
                    expected.push((peer, range.len(), flight.messages()));
                }
            }
            for peer in (0..self.size()).filter(|&peer| peer != rank && !own.is_empty()) {
                let place = (place.add(own.start).cast_const(), own.len());
                flight.send(self.member.control(), place, peer, EXCHANGE)?;
            }
        }
        self.wait(&mut flight)?;
        check_lengths(&flight, &expected)?;
        Ok(flight.land())
    }
}
