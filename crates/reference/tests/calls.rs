//! Every call on every element type against a naive oracle.

mod common;

use common::{FORMS, Form, Group};
use half::{bf16, f16};
use phalanx_pg::{Buffer, Call, CallKind, CallOptions, DType, Mode, ProcessGroupExt, ReduceOp};

/// Element `i` of rank `rank`: small, so that every type holds every result exactly.
fn value(rank: usize, i: usize) -> i64 {
    1 + ((rank * 5 + i * 3) % 2) as i64
}

fn buffer(dtype: DType, values: impl IntoIterator<Item = f64>) -> Buffer {
    let bytes: Vec<u8> = values
        .into_iter()
        .flat_map(|v| match dtype {
            DType::F16 => f16::from_f64(v).to_le_bytes().to_vec(),
            DType::BF16 => bf16::from_f64(v).to_le_bytes().to_vec(),
            DType::F32 => (v as f32).to_le_bytes().to_vec(),
            DType::F64 => v.to_le_bytes().to_vec(),
            DType::I8 | DType::U8 => vec![v as u8],
            DType::I16 => (v as i16).to_le_bytes().to_vec(),
            DType::I32 => (v as i32).to_le_bytes().to_vec(),
            DType::I64 => (v as i64).to_le_bytes().to_vec(),
            DType::Bool => vec![(v as u8) & 1],
            DType::Complex64 => [(v as f32).to_le_bytes(), [0; 4]].concat(),
            other => panic!("{other} is new"),
        })
        .collect();
    let mut buffer = Buffer::zeroed(dtype, bytes.len() / dtype.size());
    buffer.as_bytes_mut().unwrap().copy_from_slice(&bytes);
    buffer
}

fn input(dtype: DType, rank: usize, len: usize) -> Buffer {
    buffer(dtype, (0..len).map(|i| value(rank, i) as f64))
}

fn bytes(buffer: &Buffer) -> Vec<u8> {
    buffer.as_bytes().unwrap().to_vec()
}

/// Element `i` of a reduction over `size` ranks, computed in plain arithmetic.
fn reduced(op: ReduceOp, dtype: DType, size: usize, i: usize) -> f64 {
    let bool_bit = |v: i64| if dtype == DType::Bool { v & 1 } else { v };
    let values: Vec<i64> = (0..size).map(|rank| bool_bit(value(rank, i))).collect();
    let sum = values.iter().sum::<i64>() as f64;
    match op {
        ReduceOp::Sum if dtype == DType::Bool => sum.min(1.0),
        ReduceOp::Sum => sum,
        ReduceOp::Avg => f64::from(sum as f32 / size as f32),
        ReduceOp::Product => values.iter().product::<i64>() as f64,
        ReduceOp::Min => *values.iter().min().unwrap() as f64,
        ReduceOp::Max => *values.iter().max().unwrap() as f64,
        ReduceOp::BitAnd => values.iter().fold(-1, |a, b| a & b) as f64,
        ReduceOp::BitOr => values.iter().fold(0, |a, b| a | b) as f64,
        ReduceOp::BitXor => values.iter().fold(0, |a, b| a ^ b) as f64,
        // Rank r uses the factor r + 1.
        ReduceOp::PremulSum(_) => values
            .iter()
            .zip(1..)
            .map(|(v, factor)| v * factor)
            .sum::<i64>() as f64,
        other => panic!("{other} is new"),
    }
}

fn own_op(op: ReduceOp, rank: usize) -> ReduceOp {
    match op {
        ReduceOp::PremulSum(_) => ReduceOp::PremulSum((rank + 1) as f64),
        op => op,
    }
}

fn check_reductions(group: &Group, dtype: DType, op: ReduceOp, len: usize) {
    let (rank, size) = (group.rank(), group.size());
    let expected = |range: std::ops::Range<usize>| {
        let all = range.map(|i| reduced(op, dtype, size, i));
        // Averages of f64 are not rounded to f32.
        match (op, dtype) {
            (ReduceOp::Avg, DType::F64) => buffer(
                dtype,
                all.map(|v| (v as f32 * size as f32).round() as f64 / size as f64),
            ),
            _ => buffer(dtype, all),
        }
    };
    let what = format!("{op} of {len} x {dtype} on {size} ranks");
    let own = own_op(op, rank);
    let result = group
        .allreduce(input(dtype, rank, len), own)
        .unwrap()
        .wait()
        .unwrap();
    assert_eq!(bytes(&result), bytes(&expected(0..len)), "allreduce {what}");
    let root = len % size;
    let result = group
        .reduce(input(dtype, rank, len), own, root)
        .unwrap()
        .wait()
        .unwrap();
    if rank == root {
        assert_eq!(bytes(&result), bytes(&expected(0..len)), "reduce {what}");
    }
    let whole = input(dtype, rank, len * size).freeze();
    let result = group
        .reduce_scatter(whole, Buffer::zeroed(dtype, len), own)
        .unwrap()
        .wait()
        .unwrap();
    let mine = expected(rank * len..(rank + 1) * len);
    assert_eq!(bytes(&result), bytes(&mine), "reduce_scatter {what}");
}

fn check_moves(group: &Group, dtype: DType, len: usize) {
    let (rank, size) = (group.rank(), group.size());
    let root = (size - 1) / 2;
    let from = |rank| bytes(&input(dtype, rank, len));
    let all: Vec<u8> = (0..size).flat_map(from).collect();

    let own = input(dtype, rank, len);
    let result = group.broadcast(own, root).unwrap().wait().unwrap();
    assert_eq!(bytes(&result), from(root));

    let own = input(dtype, rank, len).freeze();
    let result = group.allgather_into(own.clone(), Buffer::zeroed(dtype, len * size));
    assert_eq!(bytes(&result.unwrap().wait().unwrap()), all);

    let result = group.gather(own, root).unwrap().wait().unwrap();
    assert_eq!(result.is_some(), rank == root);
    for (peer, part) in result.iter().flatten().enumerate() {
        assert_eq!(bytes(part), from(peer));
    }

    let parts = (rank == root).then(|| input(dtype, root, len * size).freeze());
    let result = group.scatter(parts, Buffer::zeroed(dtype, len), root);
    let whole = bytes(&input(dtype, root, len * size));
    let mine = rank * len * dtype.size()..(rank + 1) * len * dtype.size();
    assert_eq!(bytes(&result.unwrap().wait().unwrap()), whole[mine]);

    // Rank r sends r + i + len elements to rank i, all of them 1 + (r + i) % 2.
    let count = |from: usize, to: usize| from + to + len;
    let part = |from: usize, to: usize| vec![(1 + (from + to) % 2) as f64; count(from, to)];
    let sent: Vec<f64> = (0..size).flat_map(|to| part(rank, to)).collect();
    let expected: Vec<f64> = (0..size).flat_map(|from| part(from, rank)).collect();
    let result = group.alltoall_v(
        buffer(dtype, sent).freeze(),
        Buffer::zeroed(dtype, expected.len()),
        (0..size).map(|to| count(rank, to)).collect(),
        (0..size).map(|from| count(from, rank)).collect(),
    );
    let result = result.unwrap().wait().unwrap();
    assert_eq!(bytes(&result), bytes(&buffer(dtype, expected)));
    group.barrier().unwrap();
}

fn check_all(group: &Group, lens: &[usize]) {
    for dtype in DType::ALL {
        for &len in lens {
            check_moves(group, dtype, len);
            for op in ReduceOp::ALL {
                if op.is_defined_for(dtype) {
                    check_reductions(group, dtype, op, len);
                }
            }
        }
    }
}

#[test]
fn every_call_does_what_it_says_between_threads() {
    for size in 1..=5 {
        Form::Threads.run(size, |group| check_all(group, &[0, 1, 7]));
    }
}

#[test]
fn every_call_does_what_it_says_over_tcp() {
    for size in 1..=3 {
        Form::Tcp.run(size, |group| check_all(group, &[0, 7]));
    }
}

#[test]
fn large_messages_travel_in_chunks() {
    for form in FORMS {
        form.run(3, |group| check_moves(group, DType::F32, 300_001));
    }
}

#[test]
fn sums_are_made_in_rank_order_and_do_not_depend_on_where_a_vector_is_cut() {
    let terms = |rank: usize| -> Vec<f32> {
        let sign = if rank.is_multiple_of(2) { 1.0 } else { -1.0 };
        (0..100)
            .map(|i| sign * 10f32.powi(((i * 7 + rank * 3) % 9) as i32) / 3.0)
            .collect()
    };
    let expected: Vec<f32> = (0..100)
        .map(|i| (1..4).fold(terms(0)[i], |sum, rank| sum + terms(rank)[i]))
        .collect();
    for form in FORMS {
        let results = form.run(4, move |group| {
            let mut whole = terms(group.rank());
            group.allreduce_in_place(&mut whole, ReduceOp::Sum).unwrap();
            let mut pieces = terms(group.rank());
            let (a, rest) = pieces.split_at_mut(33);
            let (b, c) = rest.split_at_mut(1);
            for piece in [a, b, c] {
                group.allreduce_in_place(piece, ReduceOp::Sum).unwrap();
            }
            (whole, pieces)
        });
        for (whole, pieces) in results {
            assert_eq!(whole, expected);
            assert_eq!(pieces, expected);
        }
    }
}

#[test]
fn sixteen_bit_sums_are_rounded_once() {
    // 2048 + 1 is not an f16, 2048 + 1 + 1 is.
    let results = Form::Threads.run(3, |group| {
        let mut values = [f16::from_f32(if group.rank() == 0 { 2048.0 } else { 1.0 })];
        group
            .allreduce_in_place(&mut values, ReduceOp::Sum)
            .unwrap();
        values[0].to_f32()
    });
    assert_eq!(results, [2050.0; 3]);
}

#[test]
fn a_batch_of_collectives_takes_one_sequence_number() {
    for form in FORMS {
        form.run(3, |group| {
            let rank = group.rank();
            let bufs: Vec<Buffer> = (1..=4).map(|len| input(DType::F32, rank, len)).collect();
            let sums = group.allreduce_coalesced(bufs, ReduceOp::Sum).unwrap();
            assert_eq!(group.sequence(), 1);
            for (sum, len) in sums.wait().unwrap().iter().zip(1..) {
                let expected = (0..len).map(|i| reduced(ReduceOp::Sum, DType::F32, 3, i));
                assert_eq!(bytes(sum), bytes(&buffer(DType::F32, expected)));
            }
        });
    }
}

#[test]
fn a_thousand_operations_may_be_outstanding_and_callers_may_differ_in_mode() {
    for form in FORMS {
        form.run(3, |group| {
            let rank = group.rank();
            let modes = |i: usize| {
                if rank == 1 && i.is_multiple_of(3) {
                    Mode::Blocking
                } else {
                    Mode::Async
                }
            };
            let start = |i: usize| {
                let call = Call::AllReduce {
                    buf: Buffer::from_vec(vec![(i + rank) as i64]),
                    op: ReduceOp::Sum,
                };
                let options = CallOptions {
                    mode: modes(i),
                    timeout: None,
                };
                group.call(call, &options).unwrap()
            };
            let works: Vec<_> = (0..1000).map(start).collect();
            for (i, work) in works.into_iter().enumerate() {
                let sum = work.wait().unwrap().buffer.unwrap();
                assert_eq!(sum.as_slice::<i64>().unwrap(), [3 * i as i64 + 3]);
            }
        });
    }
}

#[test]
fn the_backend_claims_every_call() {
    let group = &Form::Threads.groups(1)[0];
    let capabilities = group.capabilities();
    assert!(
        CallKind::ALL
            .iter()
            .all(|&kind| capabilities.calls.contains(kind))
    );
    assert_eq!(group.backend(), "reference");
    group.shutdown().unwrap();
}
