//! Groups of some ranks.

use std::sync::Arc;

use phalanx_pg::{Buffer, CallKind, Error, ErrorKind, ProcessGroup, ProcessGroupExt, ReduceOp};

use super::inputs::values;
use super::{Bench, Case, Outcome};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "a new group has its members only, in order",
        body: new_group,
    },
    Case {
        name: "bad member lists are refused",
        body: bad_members,
    },
    Case {
        name: "a split by colour orders by key",
        body: by_color,
    },
    Case {
        name: "groups work at the same time from different threads",
        body: concurrent,
    },
    Case {
        name: "a group of a group knows its global ranks",
        body: nested,
    },
];

fn sum_of_ranks(group: &dyn ProcessGroup) -> i64 {
    let buf = Buffer::from_vec(vec![group.global_ranks()[group.rank()] as i64]);
    values::<i64>(
        &group
            .allreduce(buf, ReduceOp::Sum)
            .expect("accepted")
            .wait()
            .expect("succeeds"),
    )[0]
}

fn new_group(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce])?;
    let evens: Vec<usize> = (0..bench.size()).step_by(2).collect();
    let mut unsorted = evens.clone();
    unsorted.reverse();
    let group = bench.group.new_group(&unsorted, "evens").expect("succeeds");
    assert_eq!(
        group.is_some(),
        bench.rank().is_multiple_of(2),
        "members and only members get a group"
    );
    let Some(group) = group else { return Ok(()) };
    assert_eq!(
        (group.rank(), group.size()),
        (bench.rank() / 2, evens.len())
    );
    let global: Vec<usize> = evens
        .iter()
        .map(|&r| bench.group.global_ranks()[r])
        .collect();
    assert_eq!(group.global_ranks(), global);
    assert_eq!(sum_of_ranks(&*group), global.iter().sum::<usize>() as i64);
    assert_eq!(group.sequence(), 1, "a group counts for itself");
    leave(&*group)
}

fn bad_members(bench: &Bench) -> Outcome {
    let size = bench.size();
    for ranks in [&[][..], &[size], &[0, 0]] {
        let err = bench
            .group
            .new_group(ranks, "bad")
            .expect_err("makes no sense");
        assert_eq!(err.kind(), ErrorKind::Invalid, "{ranks:?}: {err}");
        says_where(bench, &err);
        let err = bench.group.split(ranks, "bad").expect_err("no sense");
        says_where(bench, &err);
    }
    assert!(bench.group.global_rank(size).is_err());
    assert!(bench.group.group_rank(usize::MAX).is_err());
    for rank in 0..size {
        let global = bench.group.global_rank(rank).expect("a member");
        assert_eq!(bench.group.group_rank(global).expect("a member"), rank);
    }
    Ok(())
}

/// That an error of forming a group says where it happened, and after how long.
fn says_where(bench: &Bench, err: &Error) {
    let place = err.place();
    assert_eq!(place.rank, Some(bench.rank()), "{err} names the own rank");
    assert!(place.action.is_some(), "{err} names what was asked for");
    assert!(place.elapsed.is_some(), "{err} says how long it took");
}

fn by_color(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce, CallKind::AllGather])?;
    let (me, size) = (bench.rank(), bench.size());
    // Two halves in reverse order; the last rank of an odd world stays out.
    let half = size / 2;
    let color = (me < half * 2).then_some((me % 2) as i64);
    let group = bench
        .group
        .split_by(color, -(me as i64), "half")
        .expect("succeeds");
    assert_eq!(group.is_some(), color.is_some());
    let Some(group) = group else { return Ok(()) };
    let members: Vec<usize> = (0..half * 2).rev().filter(|r| r % 2 == me % 2).collect();
    let global: Vec<usize> = members
        .iter()
        .map(|&r| bench.group.global_ranks()[r])
        .collect();
    assert_eq!(group.global_ranks(), global, "ordered by key");
    assert_eq!(
        group.rank(),
        members.iter().position(|&r| r == me).expect("a member")
    );
    assert_eq!(sum_of_ranks(&*group), global.iter().sum::<usize>() as i64);
    leave(&*group)
}

fn concurrent(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce])?;
    let everyone: Vec<usize> = (0..bench.size()).collect();
    let groups: Vec<Arc<dyn ProcessGroup>> = (0..3)
        .map(|i| bench.group.split(&everyone, &format!("concurrent {i}")))
        .map(|group| group.expect("succeeds").expect("a member"))
        .collect();
    let expected: usize = bench.group.global_ranks().iter().sum();
    std::thread::scope(|scope| {
        // Threads run in other orders on other ranks; only the order within a group counts.
        for i in 0..groups.len() {
            let group = &groups[(i + bench.rank()) % groups.len()];
            scope.spawn(move || {
                for _ in 0..100 {
                    assert_eq!(sum_of_ranks(&**group), expected as i64);
                }
            });
        }
    });
    groups.iter().try_for_each(|group| leave(&**group))
}

fn nested(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce])?;
    bench.needs_ranks(3)?;
    let ranks: Vec<usize> = (1..bench.size()).collect();
    let Some(outer) = bench.group.new_group(&ranks, "outer").expect("succeeds") else {
        return Ok(());
    };
    let last = outer.size() - 1;
    if let Some(inner) = outer.new_group(&[last], "inner").expect("succeeds") {
        let only = bench.group.global_ranks()[bench.size() - 1];
        assert_eq!(inner.global_ranks(), [only]);
        assert_eq!(sum_of_ranks(&*inner), only as i64);
        leave(&*inner)?;
    }
    leave(&*outer)
}

/// Dropping a group is an abort; an orderly end is not.
fn leave(group: &dyn ProcessGroup) -> Outcome {
    group.shutdown().expect("an orderly end");
    Ok(())
}
