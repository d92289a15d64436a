//! One process that pretends to be one rank of any world.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::buffer::Buffer;
use crate::call::{Call, CallOptions};
use crate::error::{Place, Result};
use crate::group::{Capabilities, DEFAULT_TIMEOUT, ProcessGroup};
use crate::point_to_point::PointToPoint;
use crate::subgroup::{check_members, timed};
use crate::work::{Done, RawWork, Times};

/// A group without peers: sizes are right, data is its own.
///
/// For trying out a program as rank `r` of a large world, and for measuring what everything but
/// communication costs. Reductions and broadcasts leave the buffer as it is, gathers repeat the
/// own input, scatters take the own part; a receive leaves the buffer as it is.
///
/// May be used from many threads. Every call runs in the caller's.
#[derive(Debug)]
pub struct FakeGroup {
    rank: usize,
    ranks: Vec<usize>,
    name: String,
    next_seq: AtomicU64,
    messages: PointToPoint,
}

impl FakeGroup {
    /// Rank `rank` of `size`.
    ///
    /// # Panics
    ///
    /// If `rank` is not below `size`.
    pub fn new(rank: usize, size: usize) -> Self {
        assert!(rank < size, "rank {rank} is not in a world of {size}");
        Self::member(rank, (0..size).collect(), "fake".into())
    }

    fn member(rank: usize, ranks: Vec<usize>, name: String) -> Self {
        Self {
            rank,
            ranks,
            next_seq: AtomicU64::new(0),
            messages: PointToPoint::new(Place::of_group(&name, rank)),
            name,
        }
    }

    fn run(&self, call: Call) -> Result<Done> {
        match call {
            Call::AllReduce { buf, .. } | Call::Reduce { buf, .. } => Ok(buf.into()),
            Call::Recv { buf, peer, .. } => Ok(Done {
                buffer: Some(buf),
                source: peer.or(Some(0)),
                ..Done::default()
            }),
            Call::Broadcast {
                data: crate::Payload::Writable(buf),
                ..
            } => Ok(buf.into()),
            Call::Broadcast { .. } | Call::Barrier | Call::Send { .. } => Ok(Done::default()),
            Call::AllGather { input, output } => repeat(&input, output),
            Call::Gather { input, output, .. } => match output {
                Some(output) => repeat(&input, output),
                None => Ok(Done::default()),
            },
            Call::Scatter { input, output, .. } => match input {
                Some(input) => own_part(&input, self.rank * output.byte_len(), output),
                None => Ok(output.into()),
            },
            Call::ReduceScatter { input, output, .. } => {
                own_part(&input, self.rank * output.byte_len(), output)
            }
            Call::AllToAll { input, output, .. } => {
                let len = input.byte_len().min(output.byte_len());
                copy(&input.as_bytes()?[..len], output)
            }
            Call::Batch(calls) => {
                let parts = calls
                    .into_iter()
                    .map(|call| self.run(call))
                    .collect::<Result<_>>()?;
                Ok(Done {
                    parts,
                    ..Done::default()
                })
            }
        }
    }
}

fn repeat(input: &Buffer, mut output: Buffer) -> Result<Done> {
    let part = input.as_bytes()?;
    for slot in output.as_bytes_mut()?.chunks_exact_mut(part.len().max(1)) {
        slot.copy_from_slice(part);
    }
    Ok(output.into())
}

fn own_part(input: &Buffer, at: usize, output: Buffer) -> Result<Done> {
    let len = output.byte_len();
    copy(&input.as_bytes()?[at..at + len], output)
}

fn copy(bytes: &[u8], mut output: Buffer) -> Result<Done> {
    output.as_bytes_mut()?[..bytes.len()].copy_from_slice(bytes);
    Ok(output.into())
}

impl ProcessGroup for FakeGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn backend(&self) -> &str {
        "fake"
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn global_ranks(&self) -> &[usize] {
        &self.ranks
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::all_on_host()
    }

    fn timeout(&self) -> Duration {
        DEFAULT_TIMEOUT
    }

    fn submit(&self, call: Call, _: &CallOptions) -> Result<RawWork> {
        let kind = call.kind();
        let seq = match call.is_point_to_point() {
            true => self.messages.number(&call).seq,
            false => Some(self.next_seq.fetch_add(1, Ordering::Relaxed)),
        };
        let times = Times::now();
        let result = self.run(call).map_err(|err| {
            err.at(Place {
                call: Some(kind),
                seq,
                ..Place::of_group(&self.name, self.rank)
            })
        });
        Ok(RawWork::ready(result, times))
    }

    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
        let place = Place::of_group(&self.name, self.rank);
        timed("split", &place, || check_members(ranks, self.size()))?;
        let Some(rank) = ranks.iter().position(|&rank| rank == self.rank) else {
            return Ok(None);
        };
        let ranks = ranks.iter().map(|&rank| self.ranks[rank]).collect();
        let name = format!("{}/{name}", self.name);
        Ok(Some(Arc::new(Self::member(rank, ranks, name))))
    }

    fn abort(&self, _: &str) {}

    fn shutdown(&self) -> Result<()> {
        Ok(())
    }

    fn sequence(&self) -> u64 {
        self.next_seq.load(Ordering::Relaxed)
    }

    fn p2p_sequence(&self) -> u64 {
        self.messages.sequence()
    }
}
