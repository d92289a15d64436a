//! Every collective as calls of the library.

use phalanx_pg::ordered::{self, Exchange};
use phalanx_pg::reduce::is_order_free;
use phalanx_pg::{
    Buffer, Call, DType, Done, Error, Frozen, Payload, ReduceOp, Result, explicit_counts,
};

use crate::context::{Context, Ticket};
use crate::error::GlooError;

/// Whose order of summation counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// That of the ranks, whatever the length: where the library's own would give other bits, the
    /// contributions travel.
    Ranks,
    /// The library's, always: what PyTorch does.
    Library,
}

/// One collective in its turn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Round<'a> {
    pub(crate) context: &'a Context,
    pub(crate) ticket: Ticket,
    pub(crate) order: Order,
}

impl Round<'_> {
    pub(crate) fn run(&self, call: Call) -> Result<Done> {
        match call {
            Call::AllReduce { buf, op } => self.allreduce(buf, op),
            Call::Reduce { buf, op, root } => self.reduce(buf, op, root),
            Call::ReduceScatter { input, output, op } => self.reduce_scatter(input, output, op),
            Call::Broadcast { data, root } => self.broadcast(data, root),
            Call::AllGather { input, output } => self.gather_everywhere(&input, output),
            Call::Gather {
                input,
                output,
                root,
            } => self.gather(&input, output, root),
            Call::Scatter {
                input,
                output,
                root,
            } => self.scatter(input.as_ref(), output, root),
            Call::AllToAll {
                input,
                output,
                send_counts,
                recv_counts,
            } => self.exchange(input, output, &send_counts, &recv_counts),
            Call::Barrier => {
                self.context.barrier(self.ticket).map_err(into_error)?;
                Ok(Done::default())
            }
            Call::Batch(calls) => {
                let parts = calls.into_iter().map(|call| self.run(call));
                Ok(Done {
                    parts: parts.collect::<Result<_>>()?,
                    ..Done::default()
                })
            }
            other => Err(Error::unsupported(format!(
                "{} is no collective",
                other.kind()
            ))),
        }
    }

    fn by_library(&self, op: ReduceOp, dtype: DType) -> bool {
        let size = self.context.size();
        self.order == Order::Library || (size > 1 && is_order_free(op, dtype, size))
    }

    fn allreduce(&self, mut buf: Buffer, op: ReduceOp) -> Result<Done> {
        let dtype = buf.dtype();
        if buf.is_empty() {
            return Ok(buf.into());
        }
        if !self.by_library(op, dtype) {
            return Ok(ordered::allreduce(self, op, buf)?.into());
        }
        let bytes = buf.as_bytes_mut()?;
        let done = self.context.allreduce(self.ticket, bytes, op, dtype);
        done.map_err(into_error)?;
        Ok(buf.into())
    }

    fn reduce(&self, mut buf: Buffer, op: ReduceOp, root: usize) -> Result<Done> {
        let dtype = buf.dtype();
        if buf.is_empty() {
            return Ok(buf.into());
        }
        if !self.by_library(op, dtype) {
            return Ok(ordered::reduce(self, op, buf, root)?.into());
        }
        let bytes = buf.as_bytes_mut()?;
        let done = self.context.reduce(self.ticket, bytes, op, dtype, root);
        done.map_err(into_error)?;
        Ok(buf.into())
    }

    fn reduce_scatter(&self, input: Frozen, output: Buffer, op: ReduceOp) -> Result<Done> {
        match output.is_empty() {
            true => Ok(output.into()),
            false => Ok(ordered::reduce_scatter(self, op, input, output)?.into()),
        }
    }

    fn broadcast(&self, data: Payload, root: usize) -> Result<Done> {
        if data.buffer().is_empty() {
            return Ok(handed_back(data));
        }
        match data {
            Payload::Writable(mut buffer) => {
                let bytes = buffer.as_bytes_mut()?;
                let done = self.context.broadcast(self.ticket, bytes, root);
                done.map_err(into_error)?;
                Ok(buffer.into())
            }
            Payload::ReadOnly(frozen) => {
                let done = self.context.broadcast_from(self.ticket, frozen.as_bytes()?);
                done.map_err(into_error)?;
                Ok(Done::default())
            }
        }
    }

    fn gather_everywhere(&self, input: &Frozen, mut output: Buffer) -> Result<Done> {
        let (from, to) = (input.as_bytes()?, output.as_bytes_mut()?);
        if !from.is_empty() {
            let done = self.context.allgather(self.ticket, from, to);
            done.map_err(into_error)?;
        }
        Ok(output.into())
    }

    fn gather(&self, input: &Frozen, mut output: Option<Buffer>, root: usize) -> Result<Done> {
        let from = input.as_bytes()?;
        let to = match &mut output {
            Some(output) => output.as_bytes_mut()?,
            None => &mut [],
        };
        if !from.is_empty() {
            let done = self.context.gather(self.ticket, from, to, root);
            done.map_err(into_error)?;
        }
        Ok(output.map(Done::from).unwrap_or_default())
    }

    fn scatter(&self, input: Option<&Frozen>, mut output: Buffer, root: usize) -> Result<Done> {
        let from = match input {
            Some(input) => input.as_bytes()?,
            None => &[],
        };
        let to = output.as_bytes_mut()?;
        if !to.is_empty() {
            let done = self.context.scatter(self.ticket, from, to, root);
            done.map_err(into_error)?;
        }
        Ok(output.into())
    }

    fn exchange(
        &self,
        input: Frozen,
        output: Buffer,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<Done> {
        let (size, width) = (self.size(), input.dtype().size());
        let lens = |counts: &[usize], len| -> Vec<usize> {
            let counts = explicit_counts(counts, len, size);
            counts.into_iter().map(|count| count * width).collect()
        };
        let (sent, received) = (
            lens(send_counts, input.len()),
            lens(recv_counts, output.len()),
        );
        Ok(self.alltoall(input, &sent, output, &received)?.into())
    }
}

fn handed_back(data: Payload) -> Done {
    match data {
        Payload::Writable(buffer) => buffer.into(),
        Payload::ReadOnly(_) => Done::default(),
    }
}

fn into_error(err: GlooError) -> Error {
    err.into_error()
}

impl Exchange for Round<'_> {
    fn rank(&self) -> usize {
        self.context.rank()
    }

    fn size(&self) -> usize {
        self.context.size()
    }

    fn alltoall(
        &self,
        send: Frozen,
        send_lens: &[usize],
        mut recv: Buffer,
        recv_lens: &[usize],
    ) -> Result<Buffer> {
        let (from, to) = (send.as_bytes()?, recv.as_bytes_mut()?);
        let done = self
            .context
            .alltoall(self.ticket, (from, send_lens), (to, recv_lens));
        done.map_err(into_error)?;
        Ok(recv)
    }

    fn allgather(&self, mut pieces: Buffer, lens: &[usize]) -> Result<Buffer> {
        let bytes = pieces.as_bytes_mut()?;
        let done = self.context.allgather_pieces(self.ticket, bytes, lens);
        done.map_err(into_error)?;
        Ok(pieces)
    }
}
