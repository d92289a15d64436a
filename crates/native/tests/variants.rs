//! The suite again under other circumstances, and the bits that must not depend on any.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{DEADLINE, connect, connect_across};
use phalanx_conformance::group::{Case, Level, cases, run_cases};
use phalanx_pg::reduce::{Contribution, reduce};
use phalanx_pg::{
    Buffer, Call, CallOptions, Checked, DType, Device, ProcessGroup, ProcessGroupExt, Recorded,
    Recorder, RecorderOptions, ReduceOp,
};
use phalanx_testkit::{Rank, World};

type Group = Arc<dyn ProcessGroup>;

fn suite(ctx: &Rank, group: &Group, chosen: &[Case], wrap: &dyn Fn(Group) -> Group) {
    let report = run_cases(group, Level::Sample, chosen, wrap);
    group.shutdown().unwrap();
    println!("{report}");
    // Small worlds lack peers for some cases; nothing else may be left out.
    let unexpected = |(_, why): &&(&str, String)| !(why.starts_with("needs ") && ctx.size() < 4);
    assert_eq!(report.skipped.iter().find(unexpected), None, "{report}");
    assert_eq!(report.passed.len() + report.skipped.len(), chosen.len());
}

#[test]
fn the_suite_passes_without_special_instructions() {
    for hosts in [["a", "a", "a"], ["a", "b", "a"]] {
        let world = World::new(3).env("PHALANX_KERNELS", "portable");
        world.deadline(DEADLINE).run(|ctx| {
            suite(ctx, &connect_across(ctx, &hosts), &cases(), &|group| group);
        });
    }
}

#[test]
fn the_suite_passes_under_checked() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        // A group is checked once; these do it themselves.
        let mut chosen = cases();
        chosen.retain(|case| !case.name().contains("under Checked"));
        assert_eq!(chosen.len() + 2, cases().len(), "a case has a new name");
        let checked = |group| Checked::new(group).unwrap() as Group;
        suite(ctx, &connect(ctx), &chosen, &checked);
    });
}

#[test]
fn the_suite_passes_under_recorded() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        let recorder = Arc::new(Recorder::new(RecorderOptions::default()));
        let recorded = |group| Recorded::new(group, &recorder) as Group;
        suite(ctx, &connect(ctx), &cases(), &recorded);
        assert!(recorder.dump().contains("native:"));
    });
}

/// Elements of an all-reduce in shared memory that a blocking caller tries to finish at once.
const QUICK_LEN: usize = 20_000;

#[test]
fn memory_is_the_callers_again_once_all_are_done_with_it() {
    // More than a small machine has cores: ranks are interrupted in the middle.
    World::new(5).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        let blocking = group.with(CallOptions::blocking());
        let mut rng = fastrand::Rng::with_seed(ctx.rank() as u64);
        let mut data = group.allocate(Device::Cpu, DType::F32, QUICK_LEN).unwrap();
        for round in 0..400 {
            let value = (round + ctx.rank()) as f32;
            // Who still worked on the operation before would write over this.
            data.as_mut_slice::<f32>().unwrap().fill(value);
            std::thread::sleep(Duration::from_micros(rng.u64(0..3) * 40));
            data = blocking
                .allreduce(data, ReduceOp::Sum)
                .unwrap()
                .wait()
                .unwrap();
            let sum = (5 * round + 10) as f32;
            let wrong = data
                .as_slice::<f32>()
                .unwrap()
                .iter()
                .position(|&x| x != sum);
            assert_eq!(wrong, None, "round {round}");
        }
        group.shutdown().unwrap();
    });
}

const FLOATS: [DType; 5] = [
    DType::F16,
    DType::BF16,
    DType::F32,
    DType::F64,
    DType::Complex64,
];

/// On every path: in the slot, beside it, staged, shared, in blocks; not of even lengths.
const LENS: [usize; 5] = [5, 333, 5001, 20_011, 140_003];

const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::PremulSum(0.3)];

/// What a rank contributes: numbers of very different sizes, so that every order of summation has
/// bits of its own. The first elements are the same at every length.
fn numbers(dtype: DType, rank: usize, len: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(rank as u64 + 1);
    let mut number = || {
        let exponent = rng.i32(-6..6);
        (rng.f64() - 0.5) * 2f64.powi(exponent)
    };
    let element = |_| match dtype {
        DType::F16 => half::f16::from_f64(number()).to_ne_bytes().to_vec(),
        DType::BF16 => half::bf16::from_f64(number()).to_ne_bytes().to_vec(),
        DType::F32 => (number() as f32).to_ne_bytes().to_vec(),
        DType::F64 => number().to_ne_bytes().to_vec(),
        _ => [number(), number()]
            .iter()
            .flat_map(|part| (*part as f32).to_ne_bytes())
            .collect(),
    };
    (0..len).flat_map(element).collect()
}

fn buffer(group: &Group, dtype: DType, bytes: &[u8], registered: bool) -> Buffer {
    let len = bytes.len() / dtype.size();
    let mut buffer = match registered {
        true => group.allocate(Device::Cpu, dtype, len).unwrap(),
        false => Buffer::zeroed(dtype, len),
    };
    buffer.as_bytes_mut().unwrap().copy_from_slice(bytes);
    buffer
}

/// Checks all calls that reduce against `whole`, the result at the greatest length.
fn same_bits(group: &Group, dtype: DType, op: ReduceOp, whole: &[u8]) {
    let (rank, size, root) = (group.rank(), group.size(), 1);
    for len in LENS {
        // Ranks mix memory and modes in every way.
        for way in 0..4 {
            let registered = (way + rank) & 1 == 0;
            let options = match (way / 2 + rank) & 1 {
                0 => CallOptions::blocking(),
                _ => CallOptions::default(),
            };
            let bytes = numbers(dtype, rank, len);
            let input = || buffer(group, dtype, &bytes, registered);
            let run = |call| {
                let done = group.call(call, &options).unwrap().wait().unwrap();
                done.buffer.unwrap()
            };
            let what = format!("{len} x {dtype}, {op}, way {way}, rank {rank}");
            let sum = run(Call::AllReduce { buf: input(), op });
            assert_same(&sum, &whole[..bytes.len()], &format!("allreduce of {what}"));
            let sum = run(Call::Reduce {
                buf: input(),
                op,
                root,
            });
            if rank == root {
                assert_same(&sum, &whole[..bytes.len()], &format!("reduce of {what}"));
            }
            let part = len / size;
            let cut = buffer(
                group,
                dtype,
                &bytes[..part * size * dtype.size()],
                registered,
            );
            let output = Buffer::zeroed(dtype, part);
            let input = cut.freeze();
            let sum = run(Call::ReduceScatter { input, output, op });
            let start = rank * part * dtype.size();
            let expected = &whole[start..start + sum.byte_len()];
            assert_same(&sum, expected, &format!("reduce_scatter of {what}"));
        }
    }
}

fn assert_same(sum: &Buffer, expected: &[u8], what: &str) {
    let sum = sum.as_bytes().unwrap();
    let differs = sum.iter().zip(expected).position(|(a, b)| a != b);
    assert_eq!((sum.len(), differs), (expected.len(), None), "{what}");
}

/// What three ranks sum up to, at the greatest length.
fn rule_book(dtype: DType, op: ReduceOp) -> Vec<u8> {
    let inputs: Vec<Vec<u8>> = (0..3).map(|rank| numbers(dtype, rank, LENS[4])).collect();
    let parts = inputs.iter().map(|bytes| Contribution::new(op, bytes));
    let mut whole = vec![0; inputs[0].len()];
    reduce(op, dtype, &parts.collect::<Vec<_>>(), &mut whole);
    whole
}

#[test]
fn streams_change_no_bit() {
    // In these maps the order of the hosts is that of the ranks.
    for hosts in [["a", "a", "b"], ["a", "b", "c"]] {
        for (streams, piece) in [("2", "4099"), ("5", "65536")] {
            let world = World::new(3).env("PHALANX_STREAMS", streams);
            let world = world.env("PHALANX_PIECE", piece).deadline(DEADLINE);
            world.run(|ctx| {
                let group = connect_across(ctx, &hosts);
                for dtype in [DType::BF16, DType::F32, DType::Complex64] {
                    let op = ReduceOp::Sum;
                    same_bits(&group, dtype, op, &rule_book(dtype, op));
                }
                group.shutdown().unwrap();
            });
        }
    }
}

#[test]
fn one_host_gives_the_bits_of_the_rule_book() {
    let hints = [
        ("PHALANX_HUGE_PAGES", "0"),
        ("PHALANX_KERNELS", "portable"),
        ("PHALANX_HUGE_PAGES", "1"),
    ];
    for (name, value) in hints {
        let world = World::new(3).env(name, value);
        world.deadline(DEADLINE).run(|ctx| {
            let group = connect(ctx);
            for (dtype, op) in FLOATS
                .into_iter()
                .flat_map(|dtype| OPS.map(|op| (dtype, op)))
            {
                if !op.is_defined_for(dtype) {
                    continue;
                }
                same_bits(&group, dtype, op, &rule_book(dtype, op));
            }
            group.shutdown().unwrap();
        });
    }
}

#[test]
fn for_one_map_of_hosts_nothing_else_changes_a_bit() {
    for hosts in [["a", "a", "b"], ["a", "b", "c"]] {
        World::new(3).deadline(DEADLINE).run(|ctx| {
            let group = connect_across(ctx, &hosts);
            for (dtype, op) in FLOATS
                .into_iter()
                .flat_map(|dtype| OPS.map(|op| (dtype, op)))
            {
                if !op.is_defined_for(dtype) {
                    continue;
                }
                let own = numbers(dtype, ctx.rank(), LENS[4]);
                let whole = group
                    .allreduce(buffer(&group, dtype, &own, true), op)
                    .unwrap();
                let whole = whole.wait().unwrap();
                same_bits(&group, dtype, op, whole.as_bytes().unwrap());
            }
            group.shutdown().unwrap();
        });
    }
}
