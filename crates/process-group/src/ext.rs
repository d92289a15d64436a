//! What callers use: typed operations on any group.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::buffer::{Buffer, Frozen};
use crate::call::{Call, CallOptions, Payload};
use crate::configured::Configured;
use crate::dtype::{Element, ReduceOp};
use crate::error::{Error, Place, Result};
use crate::group::ProcessGroup;
use crate::sparse::Sparse;
use crate::typed_work::Work;
use crate::work::{Done, RawWork};
use crate::{monitored, objects, sparse, subgroup};

/// Tags from here on are for this crate's own messages.
pub(crate) const FIRST_RESERVED_TAG: u32 = 1 << 31;

/// The operations of a group, typed. There for every [`ProcessGroup`].
///
/// Calls that return a [`Work`] are asynchronous: the buffer is the operation's until the work
/// hands it back. Calls that return a value block. [`with`](ProcessGroupExt::with) sets a timeout
/// or runs asynchronous calls in the caller's thread.
///
/// ```
/// use phalanx_pg::{Buffer, FakeGroup, ProcessGroupExt, ReduceOp};
///
/// let group = FakeGroup::new(0, 4); // rank 0 of 4, alone
/// let work = group.allreduce(Buffer::from_vec(vec![1.0f32, 2.0]), ReduceOp::Sum)?;
/// // ... something else meanwhile ...
/// let sum = work.wait()?;
/// assert_eq!(sum.len(), 2);
/// # Ok::<(), phalanx_pg::Error>(())
/// ```
///
/// May be called from many threads. Threads that issue collectives on one group must agree on
/// their order, the same on all ranks.
///
/// A buffer in flight cannot be touched:
///
/// ```compile_fail,E0382
/// use phalanx_pg::{Buffer, FakeGroup, ProcessGroupExt, ReduceOp};
///
/// let group = FakeGroup::new(0, 4);
/// let buf = Buffer::from_vec(vec![1.0f32]);
/// let work = group.allreduce(buf, ReduceOp::Sum)?;
/// buf.as_slice::<f32>()?; // the operation owns it
/// # Ok::<(), phalanx_pg::Error>(())
/// ```
pub trait ProcessGroupExt: ProcessGroup {
    /// Checks a call against the arguments' rules and the backend's capabilities, then submits it.
    fn call(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        let valid = match call.is_valid_anywhere() {
            true => Ok(()),
            false => call.validate(self.rank(), self.size()),
        };
        match valid.and_then(|()| self.capabilities().check(&call)) {
            Ok(()) => self.submit(call, options),
            Err(err) => Err(err.at(refused(self, &call))),
        }
    }

    /// This group with other options for the calls made through the result.
    fn with(&self, options: CallOptions) -> Configured<'_, Self> {
        Configured::new(self, options)
    }

    /// Every rank ends with the reduction of all ranks' buffers.
    fn allreduce(&self, buf: Buffer, op: ReduceOp) -> Result<Work<Buffer>> {
        self.start(Call::AllReduce { buf, op }, buffer)
    }

    /// Several all-reduces as one operation.
    fn allreduce_coalesced(&self, bufs: Vec<Buffer>, op: ReduceOp) -> Result<Work<Vec<Buffer>>> {
        let calls = bufs
            .into_iter()
            .map(|buf| Call::AllReduce { buf, op })
            .collect();
        self.start(Call::Batch(calls), buffers)
    }

    /// Every rank ends with the root's buffer.
    fn broadcast(&self, buf: Buffer, root: usize) -> Result<Work<Buffer>> {
        self.start(
            Call::Broadcast {
                data: buf.into(),
                root,
            },
            buffer,
        )
    }

    /// The root's side of a broadcast from memory that others read too.
    fn broadcast_from_here(&self, data: Frozen) -> Result<Work<()>> {
        let data = Payload::ReadOnly(data);
        self.start(
            Call::Broadcast {
                data,
                root: self.rank(),
            },
            nothing,
        )
    }

    /// Several broadcasts from one root as one operation.
    fn broadcast_coalesced(&self, bufs: Vec<Buffer>, root: usize) -> Result<Work<Vec<Buffer>>> {
        let calls = bufs
            .into_iter()
            .map(|buf| Call::Broadcast {
                data: buf.into(),
                root,
            })
            .collect();
        self.start(Call::Batch(calls), buffers)
    }

    /// The root ends with the reduction of all ranks' buffers; the others get theirs back with
    /// unspecified contents.
    fn reduce(&self, buf: Buffer, op: ReduceOp, root: usize) -> Result<Work<Buffer>> {
        self.start(Call::Reduce { buf, op, root }, buffer)
    }

    /// Every rank ends with all ranks' inputs, in `output`, one after the other.
    fn allgather_into(&self, input: impl Into<Frozen>, output: Buffer) -> Result<Work<Buffer>> {
        self.start(
            Call::AllGather {
                input: input.into(),
                output,
            },
            buffer,
        )
    }

    /// Every rank ends with all ranks' inputs, by rank.
    fn allgather(&self, input: Frozen) -> Result<Work<Vec<Buffer>>> {
        let size = self.size();
        let output = self.allocate(input.device(), input.dtype(), input.len() * size)?;
        let work = self.start(Call::AllGather { input, output }, buffer)?;
        Ok(work.map(move |all| all.split_even(size)))
    }

    /// Several all-gathers as one operation: each input with the room for all ranks' parts.
    fn allgather_coalesced(&self, pairs: Vec<(Frozen, Buffer)>) -> Result<Work<Vec<Buffer>>> {
        let gather = |(input, output)| Call::AllGather { input, output };
        self.start(
            Call::Batch(pairs.into_iter().map(gather).collect()),
            buffers,
        )
    }

    /// The root ends with all ranks' inputs, by rank; the others with `None`.
    fn gather(&self, input: Frozen, root: usize) -> Result<Work<Option<Vec<Buffer>>>> {
        let size = self.size();
        let output = match self.rank() == root {
            true => Some(self.allocate(input.device(), input.dtype(), input.len() * size)?),
            false => None,
        };
        let raw = self.call(
            Call::Gather {
                input,
                output,
                root,
            },
            &CallOptions::default(),
        )?;
        Ok(Work::with(raw, move |done| {
            Ok(done.buffer.map(|all| all.split_even(size)))
        }))
    }

    /// Every rank gets its part of the root's input, which has `size` times the output's length
    /// and is given by the root only.
    fn scatter(&self, input: Option<Frozen>, output: Buffer, root: usize) -> Result<Work<Buffer>> {
        self.start(
            Call::Scatter {
                input,
                output,
                root,
            },
            buffer,
        )
    }

    /// Every rank gets its part of the reduction of all ranks' inputs.
    fn reduce_scatter(&self, input: Frozen, output: Buffer, op: ReduceOp) -> Result<Work<Buffer>> {
        self.start(Call::ReduceScatter { input, output, op }, buffer)
    }

    /// Several reduce-scatters as one operation.
    fn reduce_scatter_coalesced(
        &self,
        pairs: Vec<(Frozen, Buffer)>,
        op: ReduceOp,
    ) -> Result<Work<Vec<Buffer>>> {
        let scatter = |(input, output)| Call::ReduceScatter { input, output, op };
        self.start(
            Call::Batch(pairs.into_iter().map(scatter).collect()),
            buffers,
        )
    }

    /// Every rank sends an equal part of its input to every rank.
    fn alltoall(&self, input: Frozen, output: Buffer) -> Result<Work<Buffer>> {
        self.alltoall_v(input, output, Vec::new(), Vec::new())
    }

    /// Every rank sends a part of its input to every rank, with lengths of their own.
    fn alltoall_v(
        &self,
        input: Frozen,
        output: Buffer,
        send_counts: Vec<usize>,
        recv_counts: Vec<usize>,
    ) -> Result<Work<Buffer>> {
        self.start(
            Call::AllToAll {
                input,
                output,
                send_counts,
                recv_counts,
            },
            buffer,
        )
    }

    /// Sends to a rank that receives with the same tag.
    fn send(&self, data: Frozen, peer: usize, tag: u32) -> Result<Work<()>> {
        let call = Call::Send { data, peer, tag };
        check_tags(self, &call)?;
        self.start(call, nothing)
    }

    /// Receives exactly `buf.len()` elements from a rank that sends with the same tag.
    fn recv(&self, buf: Buffer, peer: usize, tag: u32) -> Result<Work<Buffer>> {
        let peer = Some(peer);
        let call = Call::Recv { buf, peer, tag };
        check_tags(self, &call)?;
        self.start(call, buffer)
    }

    /// Receives from whoever sends with this tag first; the second value is that rank.
    fn recv_any(&self, buf: Buffer, tag: u32) -> Result<Work<(Buffer, usize)>> {
        let peer = None;
        let call = Call::Recv { buf, peer, tag };
        check_tags(self, &call)?;
        self.start(call, |done| {
            let source = done
                .source
                .ok_or_else(|| missing("the source of a receive"))?;
            Ok((buffer(done)?, source))
        })
    }

    /// Several sends and receives as one operation, which no order among them can block.
    ///
    /// The result has the received buffer for each receive and `None` for each send.
    fn batch_p2p(&self, calls: Vec<Call>) -> Result<Work<Vec<Option<Buffer>>>> {
        let batch = Call::Batch(calls);
        check_tags(self, &batch)?;
        self.start(batch, |done| {
            Ok(done.parts.into_iter().map(|part| part.buffer).collect())
        })
    }

    /// Blocks until every rank has arrived and all earlier collectives are finished.
    fn barrier(&self) -> Result<()> {
        self.call(Call::Barrier, &CallOptions::blocking())?
            .wait()
            .map(drop)
    }

    /// As [`barrier`](ProcessGroupExt::barrier), without blocking.
    fn barrier_async(&self) -> Result<Work<()>> {
        self.start(Call::Barrier, nothing)
    }

    /// A barrier that says who is missing: rank 0 names every rank that did not come within
    /// `limit`; the others are told to look there.
    ///
    /// Needs point-to-point calls. After a failure the group should be aborted: messages of late
    /// ranks may still arrive.
    fn monitored_barrier(&self, limit: Duration) -> Result<()> {
        monitored::barrier(self, limit)
    }

    /// Sums sparse tensors: the union of all ranks' indices with summed values. Blocks.
    fn allreduce_sparse(&self, input: Sparse) -> Result<Sparse> {
        action(self, "allreduce_sparse", |group| {
            sparse::allreduce(group, input)
        })
    }

    /// Every rank gets every rank's value, by rank. Blocks.
    fn allgather_object<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>> {
        action(self, "allgather_object", |group| {
            objects::allgather(group, value)
        })
    }

    /// The root gets every rank's value, by rank. Blocks.
    fn gather_object<T: Serialize + DeserializeOwned>(
        &self,
        value: &T,
        root: usize,
    ) -> Result<Option<Vec<T>>> {
        action(self, "gather_object", |group| {
            objects::gather(group, value, root)
        })
    }

    /// Every rank gets the root's value, which only the root gives. Blocks.
    fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        value: Option<&T>,
        root: usize,
    ) -> Result<T> {
        action(self, "broadcast_object", |group| {
            objects::broadcast(group, value, root)
        })
    }

    /// Every rank gets its one of the root's values, which only the root gives. Blocks.
    fn scatter_object<T: Serialize + DeserializeOwned>(
        &self,
        values: Option<&[T]>,
        root: usize,
    ) -> Result<T> {
        action(self, "scatter_object", |group| {
            objects::scatter(group, values, root)
        })
    }

    /// All-reduce of a plain slice. Blocks; copies through a [`Buffer`].
    fn allreduce_in_place<T: Element>(&self, values: &mut [T], op: ReduceOp) -> Result<()> {
        let call = Call::AllReduce {
            buf: Buffer::from_slice(values),
            op,
        };
        copy_back(self.call(call, &CallOptions::blocking())?, values)
    }

    /// Broadcast of a plain slice. Blocks; copies through a [`Buffer`].
    fn broadcast_in_place<T: Element>(&self, values: &mut [T], root: usize) -> Result<()> {
        let call = Call::Broadcast {
            data: Buffer::from_slice(values).into(),
            root,
        };
        copy_back(self.call(call, &CallOptions::blocking())?, values)
    }

    /// All ranks' slices, one after the other. Blocks; copies through a [`Buffer`].
    fn allgather_slice<T: Element>(&self, values: &[T]) -> Result<Vec<T>> {
        let output = Buffer::zeroed(T::DTYPE, values.len() * self.size());
        let call = Call::AllGather {
            input: Buffer::from_slice(values).freeze(),
            output,
        };
        buffer(self.call(call, &CallOptions::blocking())?.wait()?)?.to_vec()
    }

    /// A group of some of this group's ranks, by PyTorch's rules: every rank of this group calls
    /// it, in the same order; the ranks are sorted; those not among them get `None`.
    ///
    /// `name` tells groups apart and must be new in this group.
    fn new_group(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
        subgroup::new_group(self, ranks, name)
    }

    /// Divides the group: ranks of equal `color` form a group, ordered by `key`, then by rank.
    /// `None` joins no group. Every rank calls it. Blocks.
    fn split_by(
        &self,
        color: Option<i64>,
        key: i64,
        name: &str,
    ) -> Result<Option<Arc<dyn ProcessGroup>>> {
        subgroup::split_by(self, color, key, name)
    }

    /// The rank in the world of a rank of this group.
    fn global_rank(&self, rank: usize) -> Result<usize> {
        let known = self.global_ranks().get(rank).copied();
        known.ok_or_else(|| {
            let what = format!("rank {rank} is not in a group of {}", self.size());
            subgroup::placed(Error::invalid(what), self, "global_rank")
        })
    }

    /// The rank in this group of a rank of the world.
    fn group_rank(&self, global: usize) -> Result<usize> {
        let known = self.global_ranks().iter().position(|&rank| rank == global);
        known.ok_or_else(|| {
            let what = format!("global rank {global} is not in this group");
            subgroup::placed(Error::invalid(what), self, "group_rank")
        })
    }

    /// Submits with default options and types the result.
    #[doc(hidden)]
    fn start<T>(&self, call: Call, finish: fn(Done) -> Result<T>) -> Result<Work<T>> {
        Ok(Work::new(self.call(call, &CallOptions::default())?, finish))
    }
}

impl<G: ProcessGroup + ?Sized> ProcessGroupExt for G {}

/// Whether a caller may use the tags of a point-to-point call.
fn check_tags<G: ProcessGroup + ?Sized>(group: &G, call: &Call) -> Result<()> {
    let problem = match call {
        Call::Send { tag, .. } | Call::Recv { tag, .. } if *tag < FIRST_RESERVED_TAG => {
            return Ok(());
        }
        Call::Send { tag, .. } | Call::Recv { tag, .. } => {
            format!("tag {tag} is reserved, use one below 2^31")
        }
        Call::Batch(calls) => return calls.iter().try_for_each(|call| check_tags(group, call)),
        other => format!("{} is not a point-to-point call", other.kind()),
    };
    // A place in the order of messages, also for what is none.
    let place = Place {
        seq: Some(group.p2p_sequence()),
        ..refused(group, call)
    };
    Err(Error::invalid(problem).at(place))
}

/// Where a call that is refused happens: at the number that it does not take.
pub(crate) fn refused<G: ProcessGroup + ?Sized>(group: &G, call: &Call) -> Place {
    let (peer, seq) = match call.is_point_to_point() {
        true => (call.root_or_peer(), group.p2p_sequence()),
        false => (None, group.sequence()),
    };
    Place {
        call: Some(call.kind()),
        peer,
        seq: Some(seq),
        ..place_of(group)
    }
}

/// Where errors of a group happen.
fn place_of<G: ProcessGroup + ?Sized>(group: &G) -> Place {
    Place::of_group(group.name(), group.rank())
}

/// What is built of several calls, by its name in errors.
fn action<G: ProcessGroup + ?Sized, T>(
    group: &G,
    name: &'static str,
    run: impl FnOnce(&G) -> Result<T>,
) -> Result<T> {
    run(group).map_err(|err| match err.place().call {
        // One of the calls, which says so itself.
        Some(_) => err,
        None => err.during(name).at(place_of(group)),
    })
}

fn missing(what: &str) -> Error {
    Error::new(
        crate::ErrorKind::Backend,
        format!("the backend did not give back {what}"),
    )
}

#[inline]
pub(crate) fn buffer(done: Done) -> Result<Buffer> {
    done.buffer.ok_or_else(|| missing("the buffer"))
}

fn buffers(done: Done) -> Result<Vec<Buffer>> {
    done.parts.into_iter().map(buffer).collect()
}

pub(crate) fn nothing(_: Done) -> Result<()> {
    Ok(())
}

fn copy_back<T: Element>(work: RawWork, values: &mut [T]) -> Result<()> {
    values.copy_from_slice(buffer(work.wait()?)?.as_slice()?);
    Ok(())
}
