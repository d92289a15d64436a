//! What is built on the calls: objects, sparse tensors, slices, the monitored barrier, refusals.

use std::collections::BTreeMap;
use std::time::Duration;

use phalanx_pg::{
    Buffer, Call, CallKind, CallOptions, DType, ErrorKind, ProcessGroupExt, ReduceOp, Sparse,
};

use super::inputs::values;
use super::{Bench, Case, Outcome};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "objects of different sizes are gathered",
        body: objects,
    },
    Case {
        name: "objects are broadcast and scattered",
        body: objects_from_root,
    },
    Case {
        name: "objects of different types are told apart",
        body: object_types,
    },
    Case {
        name: "sparse tensors sum to the union of their rows",
        body: sparse,
    },
    Case {
        name: "plain slices are reduced in place",
        body: slices,
    },
    Case {
        name: "slices and buffers meet in one operation",
        body: slices_and_buffers,
    },
    Case {
        name: "a monitored barrier lets everybody through",
        body: monitored,
    },
    Case {
        name: "bad arguments are refused and change nothing",
        body: refused,
    },
];

const COLLECTIVES: &[CallKind] = &[
    CallKind::AllReduce,
    CallKind::AllGather,
    CallKind::Broadcast,
    CallKind::Gather,
];

fn object(rank: usize) -> BTreeMap<String, Vec<f64>> {
    (0..rank * 2)
        .map(|i| (format!("key {i}"), vec![rank as f64; i]))
        .collect()
}

fn objects(bench: &Bench) -> Outcome {
    bench.needs(COLLECTIVES)?;
    let expected: Vec<_> = (0..bench.size()).map(object).collect();
    let mine = object(bench.rank());
    assert_eq!(
        bench.group.allgather_object(&mine).expect("succeeds"),
        expected
    );
    for root in 0..bench.size() {
        let got = bench.group.gather_object(&mine, root).expect("succeeds");
        assert_eq!(got, (bench.rank() == root).then(|| expected.clone()));
    }
    Ok(())
}

fn objects_from_root(bench: &Bench) -> Outcome {
    bench.needs(COLLECTIVES)?;
    bench.needs(&[CallKind::Scatter])?;
    for root in 0..bench.size() {
        let is_root = bench.rank() == root;
        let whole = object(root + 3);
        let got = bench
            .group
            .broadcast_object(is_root.then_some(&whole), root);
        assert_eq!(got.expect("succeeds"), whole);
        let parts: Vec<_> = (0..bench.size()).map(object).collect();
        let got = bench
            .group
            .scatter_object(is_root.then_some(&parts[..]), root);
        assert_eq!(got.expect("succeeds"), object(bench.rank()));
    }
    Ok(())
}

fn object_types(bench: &Bench) -> Outcome {
    bench.needs(COLLECTIVES)?;
    bench.needs_ranks(2)?;
    // The same bytes, with another meaning.
    let err = match bench.rank() {
        1 => bench.group.allgather_object(&-1i64).map(drop),
        _ => bench.group.allgather_object(&1u64).map(drop),
    };
    let err = err.expect_err("they differ");
    assert_eq!(err.kind(), ErrorKind::Mismatch, "{err}");
    let other = if bench.rank() == 1 { 0 } else { 1 };
    assert_eq!(err.peer(), Some(other), "{err}");
    bench.group.barrier().expect("the ranks are in step");
    Ok(())
}

fn sparse(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllGather])?;
    // Rank r has rows r and 100 (row 100 twice), each of two values; the last rank has none.
    let row_len = 2;
    let rows_of = |rank: usize| -> Vec<(i64, f32)> {
        let alone = bench.size() == 1;
        match rank + 1 == bench.size() && !alone {
            true => Vec::new(),
            false => vec![(rank as i64, 1.0), (100, 2.0), (100, 0.5)],
        }
    };
    let mine = rows_of(bench.rank());
    let input = Sparse {
        indices: mine.iter().map(|row| row.0).collect(),
        dims: 1,
        values: Buffer::from_vec(mine.iter().flat_map(|row| [row.1; 2]).collect::<Vec<_>>()),
    };
    let sum = bench.group.allreduce_sparse(input).expect("succeeds");
    let mut expected = BTreeMap::new();
    for (index, value) in (0..bench.size()).flat_map(rows_of) {
        *expected.entry(index).or_insert(0.0) += value;
    }
    let got: BTreeMap<i64, f32> = sum
        .indices
        .iter()
        .zip(values::<f32>(&sum.values).chunks_exact(row_len))
        .map(|(&index, row)| {
            assert_eq!(row[0], row[1]);
            (index, row[0])
        })
        .collect();
    assert_eq!(got, expected);
    Ok(())
}

fn slices(bench: &Bench) -> Outcome {
    bench.needs(COLLECTIVES)?;
    let n = bench.size();
    let mut numbers = [bench.rank() as f64, 1.0];
    bench
        .group
        .allreduce_in_place(&mut numbers, ReduceOp::Sum)
        .expect("succeeds");
    assert_eq!(numbers, [(n * (n - 1) / 2) as f64, n as f64]);
    let mut word = [bench.rank() as u8; 3];
    bench
        .group
        .broadcast_in_place(&mut word, n - 1)
        .expect("succeeds");
    assert_eq!(word, [n as u8 - 1; 3]);
    let all = bench
        .group
        .allgather_slice(&[bench.rank() as i32])
        .expect("succeeds");
    assert_eq!(all, (0..n as i32).collect::<Vec<_>>());
    Ok(())
}

fn slices_and_buffers(bench: &Bench) -> Outcome {
    bench.needs(COLLECTIVES)?;
    for (round, len) in [1, 100, 20_000].into_iter().enumerate() {
        let mut numbers = vec![bench.rank() as f32; len];
        match (bench.rank() + round).is_multiple_of(2) {
            true => {
                let done = bench.group.allreduce_in_place(&mut numbers, ReduceOp::Max);
                done.expect("succeeds");
            }
            false => {
                let buf = Buffer::from_vec(numbers);
                let max = bench.group.allreduce(buf, ReduceOp::Max).expect("accepted");
                numbers = values(&max.wait().expect("succeeds"));
            }
        }
        assert!(numbers.iter().all(|&x| x == (bench.size() - 1) as f32));
    }
    Ok(())
}

fn monitored(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::Send, CallKind::Recv])?;
    bench.needs_tags()?;
    for _ in 0..3 {
        bench
            .group
            .monitored_barrier(Duration::from_secs(60))
            .expect("everybody comes");
    }
    Ok(())
}

fn refused(bench: &Bench) -> Outcome {
    bench.needs(COLLECTIVES)?;
    let size = bench.size();
    let f32s = |len| Buffer::zeroed(DType::F32, len);
    let before = (bench.group.sequence(), bench.group.p2p_sequence());
    let bad = [
        Call::AllReduce {
            buf: f32s(1),
            op: ReduceOp::BitAnd,
        },
        Call::AllReduce {
            buf: Buffer::zeroed(DType::I32, 1),
            op: ReduceOp::Avg,
        },
        Call::Broadcast {
            data: f32s(1).into(),
            root: size,
        },
        Call::AllGather {
            input: f32s(2).freeze(),
            output: f32s(2 * size + 1),
        },
        Call::AllGather {
            input: f32s(1).freeze(),
            output: Buffer::zeroed(DType::I32, size),
        },
        Call::AllToAll {
            input: f32s(size + 1).freeze(),
            output: f32s(size),
            // More to itself than it expects.
            send_counts: (0..size)
                .map(|to| 1 + usize::from(to == bench.rank()))
                .collect(),
            recv_counts: vec![1; size],
        },
        Call::Send {
            data: f32s(1).freeze(),
            peer: bench.rank(),
            tag: 0,
        },
        Call::Batch(Vec::new()),
    ];
    for call in bad {
        let kind = call.kind();
        let number = match kind.is_point_to_point() {
            true => before.1,
            false => before.0,
        };
        let err = bench
            .group
            .call(call, &CallOptions::default())
            .expect_err("makes no sense");
        assert_eq!(err.kind(), ErrorKind::Invalid, "{kind}: {err}");
        assert_eq!(err.place().rank, Some(bench.rank()), "{err} names the rank");
        assert_eq!(
            err.place().seq,
            Some(number),
            "{err} says where it would be"
        );
    }
    let reserved = bench
        .group
        .send(f32s(1).freeze(), (bench.rank() + 1) % size, u32::MAX);
    assert_eq!(reserved.expect_err("reserved").kind(), ErrorKind::Invalid);
    assert_eq!(
        (bench.group.sequence(), bench.group.p2p_sequence()),
        before,
        "refused calls take no number"
    );
    bench.group.barrier().expect("the group is as before");
    Ok(())
}
