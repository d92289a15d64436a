//! Ranks that share a processor, where whoever runs does parts of a reduction: one real process per
//! rank, all on one processor, so on every machine.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{DEADLINE, connect, die, finished, registered};
use phalanx_pg::reduce::{Contribution, reduce};
use phalanx_pg::{
    Buffer, CallOptions, DType, Device, Element, Error, ErrorKind, ProcessGroup, ProcessGroupExt,
    ReduceOp,
};
use phalanx_testkit::{Rank, World};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A group whose ranks have one processor together.
fn crowd(ctx: &Rank) -> Arc<dyn ProcessGroup> {
    let allowed = sched_getaffinity(None).unwrap();
    let first = (0..CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu));
    let mut one = CpuSet::new();
    one.set(first.expect("a process has a processor"));
    sched_setaffinity(None, &one).unwrap();
    connect(ctx)
}

/// What a rank brings to an operation.
fn values<T: Element>(rank: usize, round: usize, len: usize, value: fn(f32) -> T) -> Vec<T> {
    let mut rng = fastrand::Rng::with_seed((rank * 1000 + round) as u64);
    (0..len).map(|_| value(rng.f32() - 0.5)).collect()
}

fn expected<T: Element>(ranks: usize, round: usize, len: usize, value: fn(f32) -> T) -> Buffer {
    let inputs: Vec<_> = (0..ranks)
        .map(|rank| Buffer::from_vec(values(rank, round, len, value)))
        .collect();
    let all: Vec<_> = inputs
        .iter()
        .map(|input| Contribution::new(ReduceOp::Sum, input.as_bytes().unwrap()))
        .collect();
    let mut result = Buffer::zeroed(T::DTYPE, len);
    reduce(
        ReduceOp::Sum,
        T::DTYPE,
        &all,
        result.as_bytes_mut().unwrap(),
    );
    result
}

/// One all-reduce or reduce in shared memory, compared with the rule book; the memory is used for the
/// next at once.
fn check<T: Element>(
    group: &Arc<dyn ProcessGroup>,
    mut buffer: Buffer,
    round: usize,
    value: fn(f32) -> T,
) -> Buffer {
    let (rank, ranks, len) = (group.rank(), group.size(), buffer.len());
    let own = values(rank, round, len, value);
    buffer.as_mut_slice::<T>().unwrap().copy_from_slice(&own);
    let options = match round % 2 {
        0 => CallOptions::blocking(),
        _ => CallOptions::default(),
    };
    let root = (round % 5 == 4).then_some(round % ranks);
    let work = match root {
        Some(root) => group.with(options).reduce(buffer, ReduceOp::Sum, root),
        None => group.with(options).allreduce(buffer, ReduceOp::Sum),
    };
    let buffer = work.unwrap().wait().unwrap();
    if root.is_none_or(|root| root == rank) {
        let wanted = expected(ranks, round, len, value);
        let same = buffer.as_bytes().unwrap() == wanted.as_bytes().unwrap();
        assert!(same, "round {round}, {len} x {}", T::DTYPE);
    }
    buffer
}

#[test]
fn reductions_give_the_bits_of_the_rule_book() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        let group = crowd(ctx);
        // One part, a few, and more than the ranks' share.
        for len in [4096, 20_001, 1 << 20] {
            let mut single = group.allocate(Device::Cpu, DType::F32, len).unwrap();
            let mut half = group.allocate(Device::Cpu, DType::BF16, len).unwrap();
            for round in 0..12 {
                single = check::<f32>(&group, single, round, |value| value);
                half = check(&group, half, round, half::bf16::from_f32);
            }
        }
        group.shutdown().unwrap();
    });
}

#[test]
fn several_at_once_do_not_disturb_each_other() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        let group = crowd(ctx);
        let (rank, sum) = (group.rank(), 6.0);
        // More than can be announced ahead, in buffers that begin anew as soon as they are back.
        for round in 0..5 {
            let works: Vec<_> = (0..20)
                .map(|at| {
                    let value = (rank + 1) as f32 * (at + round) as f32;
                    let buffer = registered(&group, 10_000 + 7000 * at, value);
                    group.allreduce(buffer, ReduceOp::Sum).unwrap()
                })
                .collect();
            for (at, work) in works.into_iter().enumerate() {
                let buffer = work.wait().unwrap();
                let wanted = sum * (at + round) as f32;
                let all = buffer.as_slice::<f32>().unwrap();
                assert!(all.iter().all(|&value| value == wanted), "{at} in {round}");
            }
        }
        group.shutdown().unwrap();
    });
}

/// All-reduces until one fails; how many succeeded, and why not more. Rank 3 dies after `last`, in the
/// middle of one that it has announced.
fn reduce_until_lost(group: &Arc<dyn ProcessGroup>, last: u32) -> (u32, Error) {
    let start = |options| {
        let buffer = registered(group, 1 << 20, 1.0);
        group.with(options).allreduce(buffer, ReduceOp::Sum)
    };
    for succeeded in 0.. {
        if group.rank() == 3 && succeeded == last {
            // The others may finish it alone, unless it had begun with a part.
            let _work = start(CallOptions::default());
            die();
        }
        let buffer = start(CallOptions::blocking()).and_then(|work| work.wait());
        match buffer {
            Ok(buffer) => {
                let all = buffer.as_slice::<f32>().unwrap();
                assert!(all.iter().all(|&value| value == 4.0));
            }
            Err(err) => return (succeeded, err),
        }
    }
    unreachable!("rank 3 dies")
}

#[test]
fn survivors_agree_on_what_succeeded() {
    for last in [1, 5, 9, 14, 20] {
        World::new(4).deadline(DEADLINE).check(
            |ctx| {
                let group = crowd(ctx);
                let (succeeded, err) = reduce_until_lost(&group, last);
                let lost = matches!(err.kind(), ErrorKind::PeerLost | ErrorKind::Broken);
                assert!(lost && err.peer() == Some(3), "{err:?}");
                assert!((last..=last + 1).contains(&succeeded));
                let key = |rank: usize| format!("succeeded/{rank}");
                let own = succeeded.to_le_bytes();
                ctx.store().set(&key(group.rank()), &own).unwrap();
                for rank in 0..3 {
                    let other = ctx.store().get(&key(rank)).unwrap();
                    assert_eq!(other, own, "as many as on rank {rank}");
                }
            },
            |outcome| finished(outcome, &[0, 1, 2]),
        );
    }
}

#[test]
fn survivors_agree_with_many_in_flight() {
    for round in 0..8 {
        World::new(6).deadline(DEADLINE).check(
            |ctx| {
                let group = crowd(ctx);
                if group.rank() == 2 {
                    let soon = Duration::from_micros(700 * round);
                    std::thread::spawn(move || {
                        std::thread::sleep(soon);
                        die();
                    });
                }
                // From the first on, before memory has become known to everybody.
                let works: Vec<_> = (0..25)
                    .map(|_| group.allreduce(registered(&group, 100_000, 1.0), ReduceOp::Sum))
                    .collect();
                let ended = works
                    .into_iter()
                    .map(|work| work.and_then(|work| work.wait()));
                let ended: Vec<bool> = ended.map(|result| result.is_ok()).collect();
                let succeeded = ended.iter().take_while(|&&ok| ok).count();
                assert!(ended[succeeded..].iter().all(|ok| !ok), "{ended:?}");
                if group.rank() == 2 {
                    std::thread::sleep(DEADLINE);
                }
                let key = |rank: usize| format!("succeeded/{rank}");
                let own = succeeded.to_le_bytes();
                ctx.store().set(&key(group.rank()), &own).unwrap();
                for rank in [0, 1, 3, 4, 5] {
                    let other = ctx.store().get(&key(rank)).unwrap();
                    assert_eq!(other, own, "as many as on rank {rank}: {ended:?}");
                }
            },
            |outcome| finished(outcome, &[0, 1, 3, 4, 5]),
        );
    }
}
