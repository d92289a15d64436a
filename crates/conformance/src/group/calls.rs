//! Every call with every element type, operator, size, memory and mode.

use phalanx_pg::{Call, CallKind, Frozen, Payload};

use super::combinations::{Combination, Piece, Shape, combinations};
use super::inputs::reduced;
use super::{Bench, Case, Outcome};

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

/// A call that combines the elements of whole buffers.
const REDUCES: Shape = Shape {
    reduces: true,
    parts: false,
};
/// A call that moves whole buffers.
const MOVES: Shape = Shape {
    reduces: false,
    parts: false,
};
/// A call that moves one part per rank.
const MOVES_PARTS: Shape = Shape {
    reduces: false,
    parts: true,
};

fn allreduce(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce])?;
    combinations(bench, REDUCES, |c| {
        let got = c.run(
            bench,
            Call::AllReduce {
                buf: c.input(bench, 1),
                op: c.op,
            },
        );
        c.expect(bench, got, reduced(c.dtype, c.op, bench.size(), c.round));
    })
}

fn reduce(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::Reduce])?;
    combinations(bench, REDUCES, |c| {
        let got = c.run(
            bench,
            Call::Reduce {
                buf: c.input(bench, 1),
                op: c.op,
                root: c.root,
            },
        );
        if bench.rank() == c.root {
            c.expect(bench, got, reduced(c.dtype, c.op, bench.size(), c.round));
        }
    })
}

fn reduce_scatter(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::ReduceScatter])?;
    let size = bench.size();
    combinations(
        bench,
        Shape {
            parts: true,
            ..REDUCES
        },
        |c| {
            let input = c.input(bench, size).freeze();
            let output = c.room(bench, c.len);
            let got = c.run(
                bench,
                Call::ReduceScatter {
                    input,
                    output,
                    op: c.op,
                },
            );
            let own = Piece {
                pattern: reduced(c.dtype, c.op, size, c.round),
                start: bench.rank() * c.len,
                len: c.len,
            };
            c.expect_pieces(bench, got, &[own]);
        },
    )
}

fn broadcast(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::Broadcast])?;
    combinations(bench, MOVES, |c| {
        let expected = c.pattern(c.root);
        let own = c.input(bench, 1);
        if bench.rank() == c.root && c.round % 2 == 0 {
            let kept = own.freeze();
            let data = Payload::ReadOnly(Frozen::clone(&kept));
            c.run(bench, Call::Broadcast { data, root: c.root });
            c.expect(bench, kept.try_thaw().ok(), expected);
        } else {
            let got = c.run(
                bench,
                Call::Broadcast {
                    data: own.into(),
                    root: c.root,
                },
            );
            c.expect(bench, got, expected);
        }
    })
}

fn allgather(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllGather])?;
    combinations(bench, MOVES_PARTS, |c| {
        let input = c.input(bench, 1).freeze();
        let output = c.room(bench, c.len * bench.size());
        let got = c.run(bench, Call::AllGather { input, output });
        c.expect_pieces(bench, got, &c.all_inputs(bench));
    })
}

fn gather(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::Gather])?;
    combinations(bench, MOVES_PARTS, |c| {
        let is_root = bench.rank() == c.root;
        let input = c.input(bench, 1).freeze();
        let output = is_root.then(|| c.room(bench, c.len * bench.size()));
        let got = c.run(
            bench,
            Call::Gather {
                input,
                output,
                root: c.root,
            },
        );
        if is_root {
            c.expect_pieces(bench, got, &c.all_inputs(bench));
        }
    })
}

fn scatter(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::Scatter])?;
    combinations(bench, MOVES_PARTS, |c| {
        let data = (bench.rank() == c.root).then(|| c.input(bench, bench.size()).freeze());
        let output = c.room(bench, c.len);
        let got = c.run(
            bench,
            Call::Scatter {
                input: data,
                output,
                root: c.root,
            },
        );
        let own = Piece {
            pattern: c.pattern(c.root),
            start: bench.rank() * c.len,
            len: c.len,
        };
        c.expect_pieces(bench, got, &[own]);
    })
}

fn alltoall(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllToAll])?;
    let size = bench.size();
    combinations(bench, MOVES_PARTS, |c| {
        let data = c.input(bench, size).freeze();
        let output = c.room(bench, c.len * size);
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
        let piece = |rank| Piece {
            pattern: c.pattern(rank),
            start: bench.rank() * c.len,
            len: c.len,
        };
        let expected: Vec<Piece> = (0..size).map(piece).collect();
        c.expect_pieces(bench, got, &expected);
    })
}

fn alltoall_v(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllToAll])?;
    let (me, size) = (bench.rank(), bench.size());
    // Zero for some pairs.
    let count =
        |from: usize, to: usize, c: &Combination| (from * 3 + to + c.round) % 4 * (c.len % 97);
    combinations(bench, MOVES_PARTS, |c| {
        let send_counts: Vec<usize> = (0..size).map(|to| count(me, to, &c)).collect();
        let recv_counts: Vec<usize> = (0..size).map(|from| count(from, me, &c)).collect();
        let sent = send_counts.iter().sum();
        let data = c.buffer(bench, sent).freeze();
        let output = c.room(bench, recv_counts.iter().sum());
        let got = c.run(
            bench,
            Call::AllToAll {
                input: data,
                output,
                send_counts,
                recv_counts,
            },
        );
        let piece = |from| Piece {
            pattern: c.pattern(from),
            start: (0..me).map(|to| count(from, to, &c)).sum(),
            len: count(from, me, &c),
        };
        let expected: Vec<Piece> = (0..size).map(piece).collect();
        c.expect_pieces(bench, got, &expected);
    })
}

fn batches(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::Batch, CallKind::AllReduce, CallKind::AllGather])?;
    combinations(bench, MOVES_PARTS, |c| {
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
            let expected = reduced(c.dtype, c.op, bench.size(), c.round);
            c.expect(bench, part.buffer, expected);
        }
        let calls = pair.map(|c| Call::AllGather {
            input: c.input(bench, 1).freeze(),
            output: c.room(bench, c.len * bench.size()),
        });
        let done = c.submit(bench, Call::Batch(calls.into())).wait();
        let done = done.unwrap_or_else(|err| panic!("batch of allgather {c:?}: {err}"));
        for (c, part) in pair.iter().zip(done.parts) {
            c.expect_pieces(bench, part.buffer, &c.all_inputs(bench));
        }
    })
}
