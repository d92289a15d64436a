//! Collectives of groups whose ranks are on several hosts.
//!
//! The ranks of a host share its work: each talks to its own part of the ranks elsewhere, over
//! connections of its own, and passes on what concerns its neighbours through shared memory. A
//! reduction adds up the ranks of each host in order, then the hosts in order of their lowest
//! ranks.
//!
//! | file | what it is |
//! |---|---|
//! | `cut.rs` | how many streams, and how much goes on one at a time |
//! | `link.rs` | one stream: pieces that are written and read |
//! | `wire.rs` | all streams, and moving pieces in both directions at once |
//! | `reduce.rs` | reductions: partial sums to their owners, results to everybody |
//! | `small.rs` | small reductions and barriers: partial sums to everybody |
//! | `moves.rs` | calls that only move data |

mod cut;
mod link;
mod moves;
mod reduce;
mod small;
#[cfg(test)]
mod tests;
mod wire;

use std::net::TcpStream;

use parking_lot::Mutex;
use phalanx_pg::{Buffer, Call, CallKind, DType, Done, Error, ErrorKind, Payload, Result};

use crate::host::{Current, Descriptor, Input, Local, PerRank, SMALL_REDUCTION};
use crate::shm::Block;
pub(crate) use cut::Cut;
use wire::{Script, Stamp, Watch, Wire};

/// Largest reduction that a rank alone on its host sends to everybody at once.
const SMALL_ALONE: usize = 64 << 10;

/// What a group across hosts has besides its part on this host.
pub(crate) struct Between {
    /// The ranks on each host, hosts in order of their lowest ranks.
    hosts: Vec<Vec<usize>>,
    /// Own host.
    here: usize,
    cut: Cut,
    wire: Mutex<Wire>,
}

/// One operation, on this rank.
struct Job<'a> {
    between: &'a Between,
    local: &'a Local,
    current: &'a Current<'a>,
    all: PerRank<Descriptor>,
    /// By rank on this host: the memory that it shares for the operation.
    memory: PerRank<*mut u8>,
    broken: &'a dyn Fn(usize) -> Option<Error>,
}

impl Between {
    pub(crate) fn new(
        hosts: Vec<Vec<usize>>,
        here: usize,
        cut: Cut,
        streams: Vec<Vec<TcpStream>>,
    ) -> Self {
        Self {
            hosts,
            here,
            cut,
            wire: Mutex::new(Wire::new(streams, cut.piece)),
        }
    }

    /// The host of a rank, and its place on it.
    fn seat_of(&self, rank: usize) -> (usize, usize) {
        let on = |ranks: &Vec<usize>| ranks.iter().position(|&other| other == rank);
        let found = self.hosts.iter().enumerate();
        let mut found = found.filter_map(|(host, ranks)| Some((host, on(ranks)?)));
        found.next().expect("every rank is on a host")
    }

    /// The ranks on other hosts, with their hosts.
    fn remote(&self) -> impl Iterator<Item = (usize, usize)> {
        let others = self
            .hosts
            .iter()
            .enumerate()
            .filter(|(host, _)| *host != self.here);
        others.flat_map(|(host, ranks)| ranks.iter().map(move |&rank| (rank, host)))
    }

    /// Who on a host passes on what comes from a rank elsewhere.
    fn relay(&self, host: usize, from: usize) -> usize {
        let ranks = &self.hosts[host];
        ranks[from % ranks.len()]
    }

    /// Makes the memory that neighbours work on shared; what to give back instead of it.
    pub(crate) fn share(&self, local: &Local, call: Call) -> Result<(Call, Option<Buffer>)> {
        if local.ranks() == 1 {
            return Ok((call, None));
        }
        let reduces = matches!(call, Call::AllReduce { .. } | Call::Reduce { .. });
        let shadow = |buffer: &Buffer| -> Result<Option<Buffer>> {
            let small = reduces && buffer.byte_len() <= SMALL_REDUCTION;
            if buffer.is_empty() || small || Block::of(buffer, &local.seat.arenas).is_some() {
                return Ok(None);
            }
            let mut shadow = local.seat.arenas.allocate(buffer.dtype(), buffer.len())?;
            shadow.as_bytes_mut()?.copy_from_slice(buffer.as_bytes()?);
            Ok(Some(shadow))
        };
        Ok(match call {
            Call::AllReduce { buf, op } => match shadow(&buf)? {
                Some(shadow) => (Call::AllReduce { buf: shadow, op }, Some(buf)),
                None => (Call::AllReduce { buf, op }, None),
            },
            Call::Reduce { buf, op, root } => match shadow(&buf)? {
                Some(shadow) => (
                    Call::Reduce {
                        buf: shadow,
                        op,
                        root,
                    },
                    Some(buf),
                ),
                None => (Call::Reduce { buf, op, root }, None),
            },
            Call::Broadcast { data, root } => match (shadow(data.buffer())?, data) {
                (Some(shadow), Payload::Writable(buf)) => {
                    let data = shadow.into();
                    (Call::Broadcast { data, root }, Some(buf))
                }
                (Some(shadow), Payload::ReadOnly(_)) => {
                    let data = shadow.freeze().into();
                    (Call::Broadcast { data, root }, None)
                }
                (None, data) => (Call::Broadcast { data, root }, None),
            },
            Call::AllGather { input, output } => match shadow(&output)? {
                Some(shadow) => {
                    let call = Call::AllGather {
                        input,
                        output: shadow,
                    };
                    (call, Some(output))
                }
                None => (Call::AllGather { input, output }, None),
            },
            Call::Gather {
                input,
                output,
                root,
            } => {
                let input = shadow(&input)?.map_or(input, Buffer::freeze);
                let call = Call::Gather {
                    input,
                    output,
                    root,
                };
                (call, None)
            }
            Call::Scatter {
                input: Some(input),
                output,
                root,
            } => {
                let input = Some(shadow(&input)?.map_or(input, Buffer::freeze));
                let call = Call::Scatter {
                    input,
                    output,
                    root,
                };
                (call, None)
            }
            Call::ReduceScatter { input, output, op } => {
                let input = shadow(&input)?.map_or(input, Buffer::freeze);
                (Call::ReduceScatter { input, output, op }, None)
            }
            Call::AllToAll {
                input,
                output,
                send_counts,
                recv_counts,
            } => {
                let input = shadow(&input)?.map_or(input, Buffer::freeze);
                let call = Call::AllToAll {
                    input,
                    output,
                    send_counts,
                    recv_counts,
                };
                (call, None)
            }
            other => (other, None),
        })
    }

    /// Runs a call whose memory has been [shared](Between::share) and announced.
    pub(crate) fn run(
        &self,
        local: &Local,
        current: &Current<'_>,
        call: Call,
        broken: &dyn Fn(usize) -> Option<Error>,
    ) -> Result<Done> {
        // Where neighbours find it; before they are told that this rank is there.
        let own = local
            .exposed(&call)
            .map_or(std::ptr::null_mut(), |buf| buf.as_ptr().as_ptr());
        let element = call.dtype().map_or(1, DType::size);
        let parts = match call.kind() {
            CallKind::AllGather | CallKind::Scatter | CallKind::ReduceScatter => local.seat.size,
            _ => 1,
        };
        let all = local.meet(current)?;
        let bytes = |descriptor: &Descriptor| descriptor.len as usize * parts * element;
        let inputs = local.inputs(current, &all, bytes)?;
        let memory = inputs.iter().enumerate().map(|(rank, input)| match input {
            Input::At(ptr) if rank != local.me() => ptr.cast_mut(),
            _ => own,
        });
        let job = Job {
            between: self,
            local,
            current,
            memory: memory.collect(),
            all,
            broken,
        };
        local.keep(current, None);
        job.run(call)
    }
}

impl Job<'_> {
    fn run(&self, call: Call) -> Result<Done> {
        match call {
            Call::AllReduce { buf, op } => self.reduce(buf, op, None),
            Call::Reduce { buf, op, root } => self.reduce(buf, op, Some(root)),
            Call::ReduceScatter { input, output, op } => self.reduce_scatter(input, output, op),
            Call::Barrier => self.barrier(),
            other => self.moves(other),
        }
    }

    /// Own rank in the group.
    fn own(&self) -> usize {
        self.local.seat.ranks[self.local.me()]
    }

    fn exchange(&self, script: &mut dyn Script) -> Result<()> {
        let stamp = Stamp {
            op: self.current.op,
            digest: self.all[self.local.me()].digest(),
        };
        let late = |rank| self.local.late(self.current.turn, rank, "do its part of");
        let watch = Watch {
            deadline: self.current.turn.deadline,
            broken: self.broken,
            late: &late,
        };
        let result = self.between.wire.lock().exchange(stamp, script, &watch);
        result.map_err(|err| match err.kind() {
            // The peer may have said why it went, on another connection.
            ErrorKind::PeerLost => self.reason_for(err),
            _ => err,
        })
    }

    fn reason_for(&self, err: Error) -> Error {
        let rank = err.peer().unwrap_or(self.own());
        for _ in 0..100 {
            if let Some(cause) = (self.broken)(rank) {
                return cause;
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        err
    }

    /// Copies to the same place in the memory of all neighbours.
    fn spread(&self, offset: usize, bytes: usize) {
        let own = self.memory[self.local.me()].wrapping_add(offset);
        for rank in self.local.peers() {
            let to = self.memory[rank].wrapping_add(offset);
            self.local.copy(own, to, bytes);
        }
    }
}
