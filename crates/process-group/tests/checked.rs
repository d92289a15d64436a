//! Ranks that differ are told, all of them, and before anything is sent.

mod common;

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use common::{Group, assert_usable, floats, ranks};
use phalanx_pg::{
    Buffer, Call, CallKind, CallOptions, Capabilities, Checked, DType, Device, Error, ErrorKind,
    ProcessGroup, ProcessGroupExt, RawWork, ReduceOp, Result,
};

const SHORT: Duration = Duration::from_millis(300);

fn allreduce(len: usize, op: ReduceOp) -> Call {
    let buf = floats(len);
    Call::AllReduce { buf, op }
}

fn sum(len: usize) -> Call {
    allreduce(len, ReduceOp::Sum)
}

fn broadcast(len: usize, root: usize) -> Call {
    let data = floats(len).into();
    Call::Broadcast { data, root }
}

fn allgather(len: usize, size: usize) -> Call {
    Call::AllGather {
        input: floats(len).freeze(),
        output: floats(len * size),
    }
}

fn on_cuda() -> Call {
    // SAFETY: no element is ever reached, for there is none.
    let buf = unsafe {
        Buffer::from_raw(
            NonNull::<u64>::dangling().cast(),
            DType::F32,
            0,
            Device::Cuda(0),
            0,
            Box::new(()),
        )
    };
    let op = ReduceOp::Sum;
    Call::AllReduce { buf, op }
}

/// A call as a rank of a group of this size makes it.
type Make = fn(rank: usize, size: usize) -> Call;

/// What most ranks call, what one rank calls, how the two look, what differs.
const MISMATCHES: &[(Make, Make, &str, &str, &str)] = &[
    (
        |_, _| sum(100),
        |_, _| broadcast(100, 0),
        "allreduce #0 f32 x 100 sum",
        "broadcast #0 f32 x 100 root 0",
        "call, operator, root",
    ),
    (
        |_, _| Call::Barrier,
        |_, _| sum(1),
        "barrier #0",
        "allreduce #0 f32 x 1 sum",
        "call, element type, device, length, operator",
    ),
    (
        |_, _| sum(5),
        |_, _| {
            let buf = Buffer::zeroed(DType::F64, 5);
            let op = ReduceOp::Sum;
            Call::AllReduce { buf, op }
        },
        "f32 x 5",
        "f64 x 5",
        "element type",
    ),
    (
        |_, _| sum(0),
        |_, _| on_cuda(),
        "f32 x 0 sum",
        "f32 x 0 on cuda sum",
        "device",
    ),
    (|_, _| sum(5), |_, _| sum(6), "f32 x 5", "f32 x 6", "length"),
    (
        |_, size| allgather(5, size),
        |_, size| allgather(6, size),
        "allgather #0 f32 x 5",
        "allgather #0 f32 x 6",
        "length",
    ),
    (
        |_, _| sum(5),
        |_, _| allreduce(5, ReduceOp::Max),
        "f32 x 5 sum",
        "f32 x 5 max",
        "operator",
    ),
    (
        |_, _| broadcast(5, 0),
        |_, _| broadcast(5, 1),
        "root 0",
        "root 1",
        "root",
    ),
    (
        |_, _| Call::Batch(vec![sum(2), sum(3)]),
        |_, _| Call::Batch(vec![sum(2), sum(2), sum(1)]),
        "batch of 2 allreduce #0 f32 x 5 sum",
        "batch of 3 allreduce #0 f32 x 5 sum",
        "number of calls in the batch",
    ),
    (
        |_, _| Call::Batch(vec![sum(2), sum(3)]),
        |_, _| Call::Batch(vec![sum(3), sum(2)]),
        "batch of 2 allreduce #0 f32 x 5 sum",
        "batch of 2 allreduce #0 f32 x 5 sum",
        "calls of the batch",
    ),
    (
        |_, _| sum(5),
        |_, _| Call::Batch(vec![sum(5)]),
        "allreduce #0 f32 x 5 sum",
        "batch of 1 allreduce #0 f32 x 5 sum",
        "number of calls in the batch",
    ),
];

#[test]
fn every_difference_is_an_error_on_every_rank_and_leaves_the_group_usable() {
    for size in 2..=4 {
        ranks(size, move |rank, group| {
            let group = Checked::new(group).unwrap();
            for (i, &(most, one, most_shown, one_shown, aspects)) in MISMATCHES.iter().enumerate() {
                let odd_one = i % size;
                let make = if rank == odd_one { one } else { most };
                let err = group
                    .submit(make(rank, size), &CallOptions::default())
                    .unwrap_err();
                assert_eq!(err.kind(), ErrorKind::Mismatch, "{err}");
                let at = |text: &str| text.replace("#0", &format!("#{i}"));
                let (mine, theirs) = match rank == odd_one {
                    true => (at(one_shown), at(most_shown)),
                    false => (at(most_shown), at(one_shown)),
                };
                let text = err.message();
                let (others, own) = text.split_once(", this rank").expect("both sides");
                assert!(others.contains(&theirs), "{theirs:?} in {others:?}");
                assert!(own.contains(&mine), "{mine:?} in {own:?}");
                assert!(own.starts_with(&format!(" ({rank}) called")), "{own:?}");
                let differ = format!("; they differ in: {aspects}");
                assert!(text.ends_with(&differ), "{differ:?} in {text:?}");
                assert_eq!(err.place().rank, Some(rank));
                assert_eq!(err.place().seq, Some(i as u64));
                if rank != odd_one {
                    assert_eq!(err.peer(), Some(odd_one));
                    assert!(others.starts_with(&format!("rank {odd_one} called")));
                }
                assert_usable(&*group);
            }
            group.shutdown().unwrap();
        });
    }
}

#[test]
fn several_sides_are_all_shown() {
    let errors = ranks(4, |rank, group| {
        let group = Checked::new(group).unwrap();
        let lens = [7, 7, 8, 9];
        let err = group
            .allreduce(floats(lens[rank]), ReduceOp::Sum)
            .unwrap_err();
        group.shutdown().unwrap();
        err.message().to_owned()
    });
    assert_eq!(
        errors[3],
        "ranks 0, 1 called allreduce #0 f32 x 7 sum, rank 2 called allreduce #0 f32 x 8 sum, this \
         rank (3) called allreduce #0 f32 x 9 sum; they differ in: length"
    );
}

#[test]
fn a_call_past_the_check_shows_in_the_sequence_number() {
    ranks(2, |rank, inner| {
        let group = Checked::new(inner.clone()).unwrap();
        let stray = (rank == 1).then(|| inner.barrier_async().unwrap());
        let err = group.allreduce(floats(1), ReduceOp::Sum).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Mismatch);
        assert!(
            err.message().ends_with("differ in: sequence number"),
            "{err}"
        );
        // Once the stray call is answered the ranks are in step again.
        stray
            .unwrap_or_else(|| inner.barrier_async().unwrap())
            .wait()
            .unwrap();
        assert_usable(&*group);
        group.shutdown().unwrap();
    });
}

#[test]
fn what_may_differ_passes() {
    ranks(3, |rank, group| {
        let group = Checked::new(group).unwrap();
        let mode = match rank {
            0 => CallOptions::blocking(),
            _ => CallOptions::default().with_timeout(Duration::from_secs(30 + rank as u64)),
        };
        let factor = 10f64.powi(rank as i32);
        let buf = Buffer::from_vec(vec![1.0f32]);
        let work = group.with(mode).allreduce(buf, ReduceOp::PremulSum(factor));
        let total = work.unwrap().wait().unwrap();
        assert_eq!(total.as_slice::<f32>().unwrap(), [111.0]);
        let all = group.gather(floats(2).freeze(), 1).unwrap().wait().unwrap();
        assert_eq!(all.is_some(), rank == 1);
        group.barrier().unwrap();
        assert_eq!(group.sequence(), 3);
        group.shutdown().unwrap();
    });
}

/// Rank `i` sends `i + j` elements of value `i` to rank `j`.
fn alltoall(rank: usize, size: usize) -> Call {
    let send_counts: Vec<usize> = (0..size).map(|to| rank + to).collect();
    let recv_counts = send_counts.clone();
    let len = send_counts.iter().sum();
    Call::AllToAll {
        input: Buffer::from_vec(vec![rank as f32; len]).freeze(),
        output: floats(len),
        send_counts,
        recv_counts,
    }
}

#[test]
fn an_all_to_all_may_be_uneven_as_long_as_both_ends_agree() {
    ranks(3, |rank, group| {
        let group = Checked::new(group).unwrap();
        let call = |call| group.call(call, &CallOptions::default());
        let done = call(alltoall(rank, 3)).unwrap().wait().unwrap();
        let expected: Vec<f32> = (0..3usize)
            .flat_map(|from| vec![from as f32; rank + from])
            .collect();
        assert_eq!(
            done.buffer.unwrap().as_slice::<f32>().unwrap(),
            &expected[..]
        );

        let mut wrong = alltoall(rank, 3);
        if let Call::AllToAll { recv_counts, .. } = &mut wrong
            && rank == 2
        {
            // Two elements are due from rank 0 and three from rank 1.
            recv_counts.swap(0, 1);
        }
        let err = call(wrong).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Mismatch);
        let told = "rank 0 sends 2 elements to rank 2, which expects 3";
        assert!(err.message().contains(told), "{err}");

        let batch = Call::Batch(vec![alltoall(rank, 3), alltoall(rank, 3)]);
        call(batch).unwrap().wait().unwrap();
        assert_usable(&*group);
        group.shutdown().unwrap();
    });
}

#[test]
fn messages_between_two_ranks_need_no_third() {
    ranks(3, |rank, group| {
        let group = Checked::new(group).unwrap();
        match rank {
            0 => {
                let data = Buffer::from_vec(vec![9u8]).freeze();
                group.send(data, 1, 5).unwrap().wait().unwrap();
            }
            1 => {
                let room = Buffer::zeroed(DType::U8, 1);
                let got = group.recv(room, 0, 5).unwrap().wait().unwrap();
                assert_eq!(got.as_slice::<u8>().unwrap(), [9]);
            }
            _ => {}
        }
        assert_eq!(group.sequence(), 0);
        group.shutdown().unwrap();
    });
}

#[test]
fn submitting_waits_for_everybody() {
    let arrived = Arc::new(AtomicBool::new(false));
    ranks(2, move |rank, group| {
        let group = Checked::new(group).unwrap();
        if rank == 1 {
            thread::sleep(Duration::from_millis(50));
            arrived.store(true, Ordering::SeqCst);
        }
        let work = group.allreduce(floats(1), ReduceOp::Sum).unwrap();
        assert!(arrived.load(Ordering::SeqCst), "before rank 1 came");
        work.wait().unwrap();
        group.shutdown().unwrap();
    });
}

#[test]
fn a_missing_rank_is_named_with_its_last_call_and_told_when_it_comes() {
    ranks(3, |rank, group| {
        let group = Checked::new(group).unwrap();
        group.broadcast(floats(4), 1).unwrap().wait().unwrap();
        if rank == 2 {
            thread::sleep(SHORT * 4);
            let late = group.allreduce(floats(2), ReduceOp::Sum);
            let err = late.and_then(|work| work.wait()).unwrap_err();
            let text = err.to_string();
            assert!(text.contains("did not come within"), "{text}");
            return;
        }
        // The second rank comes later than the first: each counts for itself.
        thread::sleep(SHORT / 3 * rank as u32);
        let start = Instant::now();
        let hasty = group.with(CallOptions::default().with_timeout(SHORT));
        let err = hasty.allreduce(floats(2), ReduceOp::Sum).unwrap_err();
        assert!(start.elapsed() >= SHORT);
        assert_eq!((err.kind(), err.peer()), (ErrorKind::Timeout, Some(2)));
        let told = "rank 2 (its last call: broadcast #0 f32 x 4 root 1) did not come within";
        assert!(err.message().starts_with(told), "{err}");
        let own = format!("this rank ({rank}) called allreduce #1 f32 x 2 sum");
        assert!(err.message().ends_with(&own), "{err}");
        let later = group.barrier().unwrap_err();
        assert_eq!(later.kind(), ErrorKind::Broken);
        assert_eq!(later.cause().unwrap().kind(), ErrorKind::Timeout);
        // Both wait for the late one: leaving earlier would be another reason to fail.
        thread::sleep(SHORT * 5);
    });
}

#[test]
fn ranks_that_never_called_anything_are_named_all() {
    ranks(3, |rank, group| {
        let group = Checked::new(group).unwrap();
        if rank == 0 {
            let hasty = group.with(CallOptions::default().with_timeout(SHORT));
            let err = hasty.barrier().unwrap_err();
            let told =
                "rank 1 (it has called nothing yet), rank 2 (it has called nothing yet) did not";
            assert!(err.message().starts_with(told), "{err}");
        } else {
            thread::sleep(SHORT * 3);
        }
    });
}

#[test]
fn a_rank_that_is_gone_is_named_at_once() {
    let both_done = Arc::new(Barrier::new(2));
    ranks(2, move |rank, group| {
        let group = Checked::new(group).unwrap();
        assert_usable(&*group);
        both_done.wait();
        if rank == 0 {
            let err = group.allreduce(floats(2), ReduceOp::Sum).unwrap_err();
            assert_eq!((err.kind(), err.peer()), (ErrorKind::Aborted, Some(1)));
            let told = "rank 1 (its last call: allreduce #0 i64 x 3 sum)";
            assert!(err.message().contains(told), "{err}");
        }
    });
}

#[test]
fn a_rank_known_to_be_gone_leaves_the_group_to_slower_ranks() {
    ranks(3, |rank, group| {
        let side = group.split(&[0, 1, 2], "checks").unwrap().unwrap();
        let checked = Checked::with_side(Arc::clone(&group), Arc::clone(&side)).unwrap();
        assert_usable(&*checked);
        if rank == 2 {
            return; // and is gone
        }
        // The side is broken before the check begins.
        let early = side.recv(floats(1), 2, 5).and_then(|work| work.wait());
        early.expect_err("nobody sends");
        let err = checked.allreduce(floats(2), ReduceOp::Sum).unwrap_err();
        assert_eq!((err.kind(), err.peer()), (ErrorKind::Aborted, Some(2)));
        // No rank that was told has ended the group itself: what it reports is who left.
        let below = group.allreduce(floats(2), ReduceOp::Sum);
        let below = below.and_then(|work| work.wait()).unwrap_err();
        assert_eq!(below.peer(), Some(2), "{below}");
    });
}

#[test]
fn an_abort_ends_a_check_that_waits() {
    ranks(2, |rank, group| {
        let group = Checked::new(group).unwrap();
        if rank == 1 {
            thread::sleep(SHORT);
            group.abort("enough of this");
            thread::sleep(SHORT);
            return;
        }
        let err = group.barrier().unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Aborted, "{err}");
        assert!(err.to_string().contains("enough of this"), "{err}");
        assert_eq!(group.barrier().unwrap_err().kind(), ErrorKind::Broken);
    });
}

#[test]
fn threads_of_a_rank_are_checked_one_after_the_other() {
    ranks(2, |_, group| {
        let group = Checked::new(group).unwrap();
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let group = Arc::clone(&group);
                thread::spawn(move || (0..25).for_each(|_| assert_usable(&*group)))
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(group.sequence(), 100);
        group.shutdown().unwrap();
    });
}

#[test]
fn a_thread_waits_for_its_turn_no_longer_than_its_timeout() {
    ranks(2, |rank, group| {
        let group = Checked::new(group).unwrap();
        if rank == 1 {
            thread::sleep(SHORT * 3);
            return;
        }
        let first = {
            let group = Arc::clone(&group);
            thread::spawn(move || group.barrier().unwrap_err())
        };
        thread::sleep(SHORT / 3);
        let hasty = group.with(CallOptions::default().with_timeout(SHORT / 3));
        let err = hasty.barrier().unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Timeout);
        assert!(err.message().contains("another call of this rank"), "{err}");
        first.join().unwrap();
    });
}

#[test]
fn a_split_of_a_checked_group_is_checked() {
    ranks(3, |rank, group| {
        let group = Checked::new(group).unwrap();
        let pair = group.split(&[2, 0], "pair").unwrap();
        assert_eq!(pair.is_none(), rank == 1);
        if let Some(pair) = pair {
            let err = pair.allreduce(floats(1 + rank), ReduceOp::Sum).unwrap_err();
            assert_eq!(err.kind(), ErrorKind::Mismatch);
            assert_usable(&*pair);
            pair.shutdown().unwrap();
        }
        group.shutdown().unwrap();
    });
}

/// A backend that has collectives only.
#[derive(Debug)]
struct WithoutMessages(Group);

impl ProcessGroup for WithoutMessages {
    fn rank(&self) -> usize {
        self.0.rank()
    }
    fn size(&self) -> usize {
        self.0.size()
    }
    fn backend(&self) -> &str {
        self.0.backend()
    }
    fn name(&self) -> &str {
        self.0.name()
    }
    fn global_ranks(&self) -> &[usize] {
        self.0.global_ranks()
    }
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.0.capabilities();
        capabilities.calls = capabilities.calls.without(CallKind::Send);
        capabilities
    }
    fn timeout(&self) -> Duration {
        self.0.timeout()
    }
    fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        match call.is_point_to_point() {
            true => Err(Error::unsupported("no messages")),
            false => self.0.submit(call, options),
        }
    }
    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Group>> {
        let group = self.0.split(ranks, name)?;
        Ok(group.map(|group| Arc::new(Self(group)) as Group))
    }
    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }
    fn shutdown(&self) -> Result<()> {
        self.0.shutdown()
    }
    fn sequence(&self) -> u64 {
        self.0.sequence()
    }
    fn p2p_sequence(&self) -> u64 {
        self.0.p2p_sequence()
    }
}

#[test]
fn a_backend_without_messages_is_checked_by_its_collectives() {
    ranks(3, |rank, group| {
        let group = Checked::new(Arc::new(WithoutMessages(group))).unwrap();
        let err = group.broadcast(floats(1), rank % 2).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Mismatch);
        assert_usable(&*group);
        if rank > 0 {
            let hasty = group.with(CallOptions::default().with_timeout(SHORT));
            let err = hasty.barrier().unwrap_err();
            assert!(!err.leaves_group_usable(), "{err}");
            assert!(err.message().contains("checking barrier #1"), "{err}");
        }
        thread::sleep(SHORT * 2);
    });
}

#[test]
fn the_group_for_checks_has_the_same_ranks() {
    ranks(2, |_, group| {
        let name = format!("only {}", group.rank());
        let alone = group.split(&[group.rank()], &name).unwrap().unwrap();
        let err = Checked::with_side(group.clone(), alone).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Invalid);
        group.shutdown().unwrap();
    });
}
