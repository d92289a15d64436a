//! Every call with every element type, operator, size, memory and mode.

use phalanx_pg::{
    Buffer, Call, CallKind, CallOptions, DType, Frozen, Payload, ProcessGroupExt, RawWork, ReduceOp,
};

use super::inputs::{Memory, fill, input, reduced, sizes};
use super::{Bench, Case, Level, Outcome, Skip};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "allreduce gives every rank the exact reduction",
        body: allreduce,
    },
    Case {
        name: "reduce gives the root the exact reduction",
        body: reduce,
    },
    Case {
        name: "reduce_scatter gives every rank its part",
        body: reduce_scatter,
    },
    Case {
        name: "broadcast gives every rank the root's data",
        body: broadcast,
    },
    Case {
        name: "allgather gives every rank all inputs",
        body: allgather,
    },
    Case {
        name: "gather gives the root all inputs",
        body: gather,
    },
    Case {
        name: "scatter gives every rank its part",
        body: scatter,
    },
    Case {
        name: "alltoall exchanges equal parts",
        body: alltoall,
    },
    Case {
        name: "alltoall exchanges parts of any length",
        body: alltoall_v,
    },
    Case {
        name: "batches give what single calls give",
        body: batches,
    },
];

/// Largest number of elements that the sample asks for: beyond the usual thresholds.
const SAMPLE_LIMIT: usize = 40_000;
const FULL_LIMIT: usize = 1 << 21;

/// One combination of properties.
#[derive(Debug, Clone, Copy)]
struct Combination {
    dtype: DType,
    op: ReduceOp,
    len: usize,
    memory: Memory,
    root: usize,
    blocking: bool,
    /// Chooses inputs.
    round: usize,
}

/// Calls `each` with the combinations of the level that the backend knows; says what it does not.
///
/// Ranks use different memory and modes in one operation.
fn combinations(bench: &Bench, reducing: bool, mut each: impl FnMut(Combination)) -> Outcome {
    let known = bench.group.capabilities();
    let ops: &[ReduceOp] = match reducing {
        true => &ReduceOp::ALL,
        false => &[ReduceOp::Sum],
    };
    let sizes = sizes(match bench.level {
        Level::Full => FULL_LIMIT,
        Level::Sample => SAMPLE_LIMIT,
    });
    let mut round = 0;
    let mut unknown = Vec::new();
    for dtype in DType::ALL {
        for &op in ops {
            if reducing && !op.is_defined_for(dtype) {
                continue;
            }
            if !known.dtypes.contains(dtype) || (reducing && !known.ops.contains(op)) {
                unknown.push(format!("{dtype}/{}", op.name()));
                continue;
            }
            for _ in 0..repeats(bench.level, sizes.len()) {
                let choice = choose(round, sizes.len());
                each(Combination {
                    dtype,
                    op,
                    len: sizes[choice.size],
                    memory: Memory::ALL[(choice.memory + bench.rank()) % Memory::ALL.len()],
                    blocking: (choice.mode + bench.rank()).is_multiple_of(2),
                    root: round % bench.size(),
                    round,
                });
                round += 1;
            }
        }
    }
    match unknown.is_empty() {
        true => Ok(()),
        false => Err(Skip(format!("passed, but without {}", unknown.join(", ")))),
    }
}

const MODES: usize = 2;

/// Which size, memory and mode a round has.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Choice {
    size: usize,
    memory: usize,
    mode: usize,
}

/// Rounds per element type and operator.
fn repeats(level: Level, sizes: usize) -> usize {
    match level {
        Level::Full => sizes * Memory::ALL.len() * MODES,
        Level::Sample => 3,
    }
}

/// Steps through all combinations of size, memory and mode, each once before the first comes
/// again, in an order in which neighbours have little in common.
fn choose(round: usize, sizes: usize) -> Choice {
    let all = sizes * Memory::ALL.len() * MODES;
    let step = [7, 11, 13, 17, 19, 23]
        .into_iter()
        .find(|&step| !all.is_multiple_of(step))
        .expect("no list of sizes is a multiple of all these primes");
    let index = round * step % all;
    Choice {
        size: index % sizes,
        memory: index / sizes % Memory::ALL.len(),
        mode: index / sizes / Memory::ALL.len(),
    }
}

impl Combination {
    fn buffer(&self, bench: &Bench, bytes: &[u8]) -> Buffer {
        fill(&*bench.group, self.memory, self.dtype, bytes)
    }

    fn input(&self, bench: &Bench, parts: usize) -> Buffer {
        self.buffer(
            bench,
            &input(self.dtype, bench.rank(), self.len * parts, self.round),
        )
    }

    fn room(&self, bench: &Bench, parts: usize) -> Buffer {
        // Not zero, so that what is not written shows.
        self.buffer(bench, &vec![1; self.len * parts * self.dtype.size()])
    }

    fn submit(&self, bench: &Bench, call: Call) -> RawWork {
        let kind = call.kind();
        let options = match self.blocking {
            true => CallOptions::blocking(),
            false => CallOptions::default(),
        };
        let work = bench.group.call(call, &options);
        work.unwrap_or_else(|err| panic!("{kind} {self:?}: {err}"))
    }

    fn run(&self, bench: &Bench, call: Call) -> Option<Buffer> {
        let kind = call.kind();
        let done = self.submit(bench, call).wait();
        done.unwrap_or_else(|err| panic!("{kind} {self:?}: {err}"))
            .buffer
    }

    fn expect(&self, bench: &Bench, got: Option<Buffer>, expected: &[u8]) {
        let got = got.unwrap_or_else(|| panic!("{self:?}: no buffer came back"));
        let bytes = got.as_bytes().expect("host memory");
        let wrong = bytes.iter().zip(expected).position(|(a, b)| a != b);
        assert_eq!(
            bytes.len(),
            expected.len(),
            "{self:?} on rank {}",
            bench.rank()
        );
        if let Some(at) = wrong {
            let size = self.dtype.size();
            let at = at / size * size;
            panic!(
                "{self:?} on rank {} of {}: element {} is {:?}, not {:?}",
                bench.rank(),
                bench.size(),
                at / size,
                &bytes[at..at + size],
                &expected[at..at + size]
            );
        }
    }

    fn all_inputs(&self, bench: &Bench) -> Vec<u8> {
        (0..bench.size())
            .flat_map(|r| input(self.dtype, r, self.len, self.round))
            .collect()
    }
}

fn allreduce(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce])?;
    combinations(bench, true, |c| {
        let got = c.run(
            bench,
            Call::AllReduce {
                buf: c.input(bench, 1),
                op: c.op,
            },
        );
        c.expect(
            bench,
            got,
            &reduced(c.dtype, c.op, bench.size(), c.len, c.round),
        );
    })
}

fn reduce(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::Reduce])?;
    combinations(bench, true, |c| {
        let got = c.run(
            bench,
            Call::Reduce {
                buf: c.input(bench, 1),
                op: c.op,
                root: c.root,
            },
        );
        if bench.rank() == c.root {
            c.expect(
                bench,
                got,
                &reduced(c.dtype, c.op, bench.size(), c.len, c.round),
            );
        }
    })
}

fn reduce_scatter(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::ReduceScatter])?;
    let size = bench.size();
    combinations(bench, true, |c| {
        let input = c.input(bench, size).freeze();
        let output = c.room(bench, 1);
        let got = c.run(
            bench,
            Call::ReduceScatter {
                input,
                output,
                op: c.op,
            },
        );
        let whole = reduced(c.dtype, c.op, size, c.len * size, c.round);
        let part = c.len * c.dtype.size();
        c.expect(bench, got, &whole[bench.rank() * part..][..part]);
    })
}

fn broadcast(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::Broadcast])?;
    combinations(bench, false, |c| {
        let expected = input(c.dtype, c.root, c.len, c.round);
        let own = c.input(bench, 1);
        if bench.rank() == c.root && c.round % 2 == 0 {
            let kept = own.freeze();
            let data = Payload::ReadOnly(Frozen::clone(&kept));
            c.run(bench, Call::Broadcast { data, root: c.root });
            c.expect(bench, kept.try_thaw().ok(), &expected);
        } else {
            let got = c.run(
                bench,
                Call::Broadcast {
                    data: own.into(),
                    root: c.root,
                },
            );
            c.expect(bench, got, &expected);
        }
    })
}

fn allgather(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllGather])?;
    combinations(bench, false, |c| {
        let input = c.input(bench, 1).freeze();
        let output = c.room(bench, bench.size());
        let got = c.run(bench, Call::AllGather { input, output });
        c.expect(bench, got, &c.all_inputs(bench));
    })
}

fn gather(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::Gather])?;
    combinations(bench, false, |c| {
        let is_root = bench.rank() == c.root;
        let input = c.input(bench, 1).freeze();
        let output = is_root.then(|| c.room(bench, bench.size()));
        let got = c.run(
            bench,
            Call::Gather {
                input,
                output,
                root: c.root,
            },
        );
        if is_root {
            c.expect(bench, got, &c.all_inputs(bench));
        }
    })
}

fn scatter(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::Scatter])?;
    combinations(bench, false, |c| {
        let data = (bench.rank() == c.root).then(|| c.input(bench, bench.size()).freeze());
        let output = c.room(bench, 1);
        let got = c.run(
            bench,
            Call::Scatter {
                input: data,
                output,
                root: c.root,
            },
        );
        let whole = input(c.dtype, c.root, c.len * bench.size(), c.round);
        let part = c.len * c.dtype.size();
        c.expect(bench, got, &whole[bench.rank() * part..][..part]);
    })
}

fn alltoall(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllToAll])?;
    let size = bench.size();
    combinations(bench, false, |c| {
        let data = c.input(bench, size).freeze();
        let output = c.room(bench, size);
        let (send_counts, recv_counts) = (Vec::new(), Vec::new());
        let got = c.run(
            bench,
            Call::AllToAll {
                input: data,
                output,
                send_counts,
                recv_counts,
            },
        );
        let part = c.len * c.dtype.size();
        let expected: Vec<u8> = (0..size)
            .flat_map(|rank| {
                let whole = input(c.dtype, rank, c.len * size, c.round);
                whole[bench.rank() * part..][..part].to_vec()
            })
            .collect();
        c.expect(bench, got, &expected);
    })
}

fn alltoall_v(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllToAll])?;
    let (me, size) = (bench.rank(), bench.size());
    // Zero for some pairs.
    let count =
        |from: usize, to: usize, c: &Combination| (from * 3 + to + c.round) % 4 * (c.len % 97);
    combinations(bench, false, |c| {
        let send_counts: Vec<usize> = (0..size).map(|to| count(me, to, &c)).collect();
        let recv_counts: Vec<usize> = (0..size).map(|from| count(from, me, &c)).collect();
        let sent = |rank: usize| -> usize { (0..size).map(|to| count(rank, to, &c)).sum() };
        let data = c
            .buffer(bench, &input(c.dtype, me, sent(me), c.round))
            .freeze();
        let room = recv_counts.iter().sum::<usize>() * c.dtype.size();
        let output = c.buffer(bench, &vec![1; room]);
        let got = c.run(
            bench,
            Call::AllToAll {
                input: data,
                output,
                send_counts,
                recv_counts,
            },
        );
        let mut expected = Vec::new();
        for from in 0..size {
            let before: usize = (0..me).map(|to| count(from, to, &c)).sum();
            let whole = input(c.dtype, from, sent(from), c.round);
            let at = before * c.dtype.size();
            expected.extend_from_slice(&whole[at..][..count(from, me, &c) * c.dtype.size()]);
        }
        c.expect(bench, got, &expected);
    })
}

fn batches(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::Batch, CallKind::AllReduce, CallKind::AllGather])?;
    combinations(bench, false, |c| {
        let other = Combination {
            len: c.len / 2 + 1,
            round: c.round + 1,
            ..c
        };
        let pair = [c, other];
        let calls = pair.map(|c| Call::AllReduce {
            buf: c.input(bench, 1),
            op: c.op,
        });
        let done = c.submit(bench, Call::Batch(calls.into())).wait();
        let done = done.unwrap_or_else(|err| panic!("batch of allreduce {c:?}: {err}"));
        assert_eq!(done.parts.len(), 2);
        for (c, part) in pair.iter().zip(done.parts) {
            let expected = reduced(c.dtype, c.op, bench.size(), c.len, c.round);
            c.expect(bench, part.buffer, &expected);
        }
        let calls = pair.map(|c| Call::AllGather {
            input: c.input(bench, 1).freeze(),
            output: c.room(bench, bench.size()),
        });
        let done = c.submit(bench, Call::Batch(calls.into())).wait();
        let done = done.unwrap_or_else(|err| panic!("batch of allgather {c:?}: {err}"));
        for (c, part) in pair.iter().zip(done.parts) {
            c.expect(bench, part.buffer, &c.all_inputs(bench));
        }
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn everything_is_every_size_in_every_memory_and_mode() {
        let sizes = sizes(FULL_LIMIT).len();
        let rounds = repeats(Level::Full, sizes);
        let seen: HashSet<Choice> = (0..rounds).map(|round| choose(round, sizes)).collect();
        assert_eq!(seen.len(), rounds);
    }

    #[test]
    fn the_sample_of_the_shortest_case_has_every_size_memory_and_mode() {
        let sizes = sizes(SAMPLE_LIMIT).len();
        // A case that reduces nothing has only the element types to go through.
        let rounds = DType::ALL.len() * repeats(Level::Sample, sizes);
        let choices: Vec<Choice> = (0..rounds).map(|round| choose(round, sizes)).collect();
        let count = |of: fn(&Choice) -> usize| choices.iter().map(of).collect::<HashSet<_>>().len();
        assert_eq!(count(|c| c.size), sizes);
        assert_eq!(count(|c| c.memory), Memory::ALL.len());
        assert_eq!(count(|c| c.mode), MODES);
    }
}
