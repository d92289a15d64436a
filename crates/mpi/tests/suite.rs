//! The process group suite, one real process per rank, started by mpirun.

mod common;

use common::{connect, mpirun};
use phalanx_conformance::group::{Level, run_rank};
use phalanx_pg::{Buffer, ProcessGroupExt, ReduceOp};
use phalanx_testkit::Rank;

fn suite(ctx: &Rank) {
    let group = connect(ctx);
    let report = run_rank(&group, Level::Sample);
    group.shutdown().unwrap();
    println!("{report}");
    report.assert_complete(ctx.size());
}

#[test]
fn two_processes_sum_through_the_trait() {
    mpirun(2).run(|ctx| {
        let group = connect(ctx);
        let buf = Buffer::from_vec(vec![ctx.rank() as f32 + 1.0; 5]);
        let sum = group.allreduce(buf, ReduceOp::Sum).unwrap().wait().unwrap();
        assert_eq!(sum.as_slice::<f32>().unwrap(), [3.0; 5]);
        group.shutdown().unwrap();
    });
}

#[test]
fn the_suite_passes_with_one_to_three_processes() {
    for size in 1..=3 {
        mpirun(size).run(|ctx| {
            suite(ctx);
        });
    }
}

#[test]
fn the_suite_passes_with_four_processes() {
    mpirun(4).run(|ctx| {
        suite(ctx);
    });
}
