//! Small all-reduces of a batch, which are one operation here, one real process per rank.

mod common;

use std::sync::Arc;

use common::{DEADLINE, connect, connect_across};
use phalanx_pg::reduce::{Contribution, reduce};
use phalanx_pg::{
    Buffer, Call, CallOptions, DType, Device, ProcessGroup, ProcessGroupExt, ReduceOp,
};
use phalanx_testkit::World;

/// Small and large ones, some of nothing: more than fit into a staging ring.
fn lens(rng: &mut fastrand::Rng) -> Vec<usize> {
    let len = |rng: &mut fastrand::Rng| match rng.u8(0..10) {
        0 => 0,
        1 => 1,
        2 => rng.usize(30_000..70_000),
        3..=5 => rng.usize(1000..5000),
        _ => rng.usize(1..200),
    };
    let count = rng.usize(1..150);
    (0..count).map(|_| len(rng)).collect()
}

/// What a rank brings to call `at`.
fn values(dtype: DType, rank: usize, at: usize, len: usize) -> Buffer {
    let mut rng = fastrand::Rng::with_seed((rank * 1000 + at) as u64);
    let mut buffer = Buffer::zeroed(dtype, len);
    match dtype {
        DType::F32 => fill(&mut buffer, || rng.f32() - 0.5),
        DType::F64 => fill(&mut buffer, || rng.f64() - 0.5),
        DType::BF16 => fill(&mut buffer, || half::bf16::from_f32(rng.f32() - 0.5)),
        _ => fill(&mut buffer, || rng.i32(-1000..1000)),
    }
    buffer
}

fn fill<T: phalanx_pg::Element>(buffer: &mut Buffer, mut value: impl FnMut() -> T) {
    let all = buffer.as_mut_slice::<T>().unwrap();
    all.iter_mut().for_each(|element| *element = value());
}

/// Different on each rank, and for some ranks from call to call.
fn operator(op: ReduceOp, rank: usize, at: usize) -> ReduceOp {
    match op {
        ReduceOp::PremulSum(_) if rank == 1 => ReduceOp::PremulSum(0.3 + (at % 3) as f64),
        ReduceOp::PremulSum(_) => ReduceOp::PremulSum(0.7 * (rank + 1) as f64),
        other => other,
    }
}

fn expected(dtype: DType, op: ReduceOp, ranks: usize, at: usize, len: usize) -> Buffer {
    let inputs: Vec<Buffer> = (0..ranks).map(|r| values(dtype, r, at, len)).collect();
    let ops: Vec<ReduceOp> = (0..ranks).map(|r| operator(op, r, at)).collect();
    let all: Vec<Contribution<'_>> = inputs
        .iter()
        .zip(&ops)
        .map(|(input, op)| Contribution::new(*op, input.as_bytes().unwrap()))
        .collect();
    let mut result = Buffer::zeroed(dtype, len);
    reduce(op, dtype, &all, result.as_bytes_mut().unwrap());
    result
}

fn check_batch(group: &Arc<dyn ProcessGroup>, dtype: DType, op: ReduceOp, round: u64) {
    let (rank, ranks) = (group.rank(), group.size());
    let lens = lens(&mut fastrand::Rng::with_seed(round));
    let mut own = fastrand::Rng::with_seed(round * 31 + rank as u64);
    let call = |(at, &len): (usize, &usize)| {
        let plain = values(dtype, rank, at, len);
        let buf = match own.bool() {
            true => plain,
            false => {
                let mut shared = group.allocate(Device::Cpu, dtype, len).unwrap();
                let from = plain.as_bytes().unwrap();
                shared.as_bytes_mut().unwrap().copy_from_slice(from);
                shared
            }
        };
        let op = operator(op, rank, at);
        Call::AllReduce { buf, op }
    };
    let calls = lens.iter().enumerate().map(call).collect();
    let options = match round % 2 {
        0 => CallOptions::blocking(),
        _ => CallOptions::default(),
    };
    let done = group.call(Call::Batch(calls), &options).unwrap();
    let parts = done.wait().unwrap().parts;
    assert_eq!(parts.len(), lens.len());
    for ((at, &len), part) in lens.iter().enumerate().zip(parts) {
        let found = part.buffer.unwrap();
        let wanted = expected(dtype, op, ranks, at, len);
        let same = found.as_bytes().unwrap() == wanted.as_bytes().unwrap();
        assert!(same, "call {at} of {len} x {dtype}, {op}, round {round}");
    }
}

const TYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::I32];
const OPERATORS: [ReduceOp; 4] = [
    ReduceOp::Sum,
    ReduceOp::Max,
    ReduceOp::Avg,
    ReduceOp::PremulSum(1.0),
];

#[test]
fn they_give_the_bits_of_single_ones() {
    for ranks in 1..=4 {
        World::new(ranks).deadline(DEADLINE).run(|ctx| {
            let group = connect(ctx);
            for round in 0..40 {
                let dtype = TYPES[round as usize % 4];
                let op = OPERATORS[round as usize / 4 % 4];
                if op.is_defined_for(dtype) {
                    check_batch(&group, dtype, op, round);
                }
            }
            group.shutdown().unwrap();
        });
    }
}

#[test]
fn zeros_of_both_signs_are_different_factors() {
    World::new(2).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        let call = |factor| Call::AllReduce {
            buf: Buffer::from_vec(vec![1.0f32; 3]),
            op: ReduceOp::PremulSum(factor),
        };
        let batch = Call::Batch(vec![call(0.0), call(-0.0)]);
        let done = group.call(batch, &CallOptions::blocking()).unwrap();
        let signs = done.wait().unwrap().parts.into_iter().map(|part| {
            let zero = part.buffer.unwrap().as_slice::<f32>().unwrap()[0];
            (zero, zero.is_sign_negative())
        });
        assert_eq!(signs.collect::<Vec<_>>(), [(0.0, false), (0.0, true)]);
        group.shutdown().unwrap();
    });
}

#[test]
fn between_hosts_they_are_as_before() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        let group = connect_across(ctx, &["a", "b", "a"]);
        for round in 0..4 {
            check_batch(&group, DType::I32, ReduceOp::Sum, round);
        }
        group.shutdown().unwrap();
    });
}

#[test]
fn batches_that_differ_are_an_error_on_every_rank() {
    // Cut otherwise; another number of operations, of which the first or the second differs; a single
    // call that is as long as what others join; nothing joined.
    let others = [
        vec![30, 10, 20],
        vec![10, 50_000, 30],
        vec![50_000, 10, 20],
        vec![60, 50_000, 1],
        vec![0, 30, 30],
    ];
    for (round, other) in others.into_iter().enumerate() {
        World::new(3).deadline(DEADLINE).run(|ctx| {
            let group = connect(ctx);
            let lens = match (ctx.rank(), round) {
                (2, _) => other.clone(),
                (_, 2) => vec![50_000, 10, 50_000],
                (_, 3) => vec![20, 40, 50_000],
                _ => vec![10, 20, 30],
            };
            let bufs = lens.iter().map(|&len| Buffer::from_vec(vec![1.0f32; len]));
            let sums = group.allreduce_coalesced(bufs.collect(), ReduceOp::Sum);
            let err = sums.unwrap().wait().unwrap_err();
            // They have different numbers of operations behind them, so they do not go on.
            assert!(!err.leaves_group_usable(), "{err}");
            let text = err.to_string();
            assert!(text.contains("ranks call different things"), "{text}");
            assert!(text.contains("in a batch of 3"), "{text}");
            assert!(text.contains("pieces, cut as"), "{text}");
        });
    }
}
