//! What must happen when something goes wrong: an error that says who and what, never a hang.

use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_pg::{
    Buffer, Call, CallKind, CallOptions, Checked, DType, Error, ErrorKind, PeerDeath, ProcessGroup,
    ProcessGroupExt, RawWork, ReduceOp,
};

use phalanx_store::Store;

use super::{Bench, Case, Outcome, Skip};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "an operation that a rank does not reach times out",
        body: timeout,
    },
    Case {
        name: "a group that failed stays failed with its first cause",
        body: stays_broken,
    },
    Case {
        name: "an abort fails the others' pending operations with its reason",
        body: abort,
    },
    Case {
        name: "a receive that nobody sends to times out",
        body: recv_timeout,
    },
    Case {
        name: "a long send that nobody takes is kept or times out",
        body: send_timeout,
    },
    Case {
        name: "a closed group says so",
        body: closed,
    },
    Case {
        name: "a rank that drops its group takes nothing back",
        body: dropped,
    },
    Case {
        name: "different calls are told apart under Checked",
        body: mismatches,
    },
    Case {
        name: "equal calls pass under Checked",
        body: matches,
    },
    Case {
        name: "a monitored barrier names who is missing",
        body: monitored_missing,
    },
];

/// Long enough for any error to arrive, short enough to call it a hang.
const PATIENCE: Duration = Duration::from_secs(60);

fn broken(err: &Error) -> bool {
    !err.leaves_group_usable()
}

/// One all-reduce with a short time limit.
fn try_allreduce(group: &dyn ProcessGroup, limit: Duration) -> Result<Buffer, Error> {
    let buf = Buffer::from_vec(vec![1.0f32; 100]);
    let options = CallOptions::default().with_timeout(limit);
    group.with(options).allreduce(buf, ReduceOp::Sum)?.wait()
}

fn timeout(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce])?;
    bench.needs_ranks(2)?;
    if bench.rank() + 1 == bench.size() {
        // The last rank comes to nothing; it stays alive until the others have seen it.
        std::thread::sleep(Duration::from_millis(1500));
        return Ok(());
    }
    let start = Instant::now();
    let err = try_allreduce(&*bench.group, Duration::from_millis(300)).expect_err("one is missing");
    assert!(start.elapsed() < PATIENCE);
    assert!(broken(&err), "{err:?}");
    assert_eq!(
        err.place().call,
        Some(CallKind::AllReduce),
        "{err} names the operation"
    );
    assert_eq!(err.place().seq, Some(0), "{err} names the sequence number");
    assert_eq!(
        err.place().rank,
        Some(bench.rank()),
        "{err} names the own rank"
    );
    assert!(err.place().elapsed.is_some(), "{err} says how long it took");
    Ok(())
}

fn stays_broken(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce])?;
    bench.needs_ranks(2)?;
    if bench.rank() == 0 {
        bench.group.abort("the first cause");
        bench.group.abort("a later cause");
    }
    let first = try_allreduce(&*bench.group, PATIENCE).expect_err("aborted");
    let second = try_allreduce(&*bench.group, PATIENCE).expect_err("still aborted");
    for err in [&first, &second] {
        assert!(err.to_string().contains("the first cause"), "{err}");
    }
    assert_eq!(second.kind(), ErrorKind::Broken, "{second:?}");
    assert!(
        bench.group.shutdown().is_err(),
        "a broken group has no orderly end"
    );
    Ok(())
}

fn abort(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce])?;
    bench.needs_ranks(2)?;
    if !bench.group.capabilities().abort {
        return Err(Skip("the backend cannot interrupt operations".into()));
    }
    if bench.rank() == 0 {
        std::thread::sleep(Duration::from_millis(200));
        bench.group.abort("rank 0 has had enough");
        return Ok(());
    }
    let start = Instant::now();
    let err = try_allreduce(&*bench.group, PATIENCE).expect_err("rank 0 aborts");
    assert!(start.elapsed() < PATIENCE / 2, "an abort arrives at once");
    assert!(err.to_string().contains("rank 0 has had enough"), "{err}");
    Ok(())
}

fn recv_timeout(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::Send, CallKind::Recv])?;
    bench.needs_ranks(2)?;
    if bench.rank() != 0 {
        std::thread::sleep(Duration::from_millis(1200));
        return Ok(());
    }
    let group = &bench.group;
    let first = group.p2p_sequence();
    // With all the time there is: they end with the group.
    let receive = |peer| Call::Recv {
        buf: Buffer::zeroed(DType::I32, 1),
        peer,
        tag: bench.tag(76),
    };
    let mut patient = Vec::new();
    let known = group.capabilities();
    // Without tags the late one would wait behind them, and its time not have begun.
    if known.tags {
        patient.push(receive(Some(1)));
    }
    if known.tags && known.recv_any {
        patient.push(receive(None));
    }
    if known.tags && known.calls.contains(CallKind::Batch) {
        patient.push(Call::Batch(vec![receive(Some(1)), receive(Some(1))]));
    }
    let submit = |call| group.call(call, &CallOptions::default()).expect("accepted");
    let patient: Vec<RawWork> = patient.into_iter().map(submit).collect();
    let number = first + patient.len() as u64;
    let options = CallOptions::default().with_timeout(Duration::from_millis(200));
    let room = Buffer::zeroed(DType::I32, 1);
    let late = group.with(options).recv(room, 1, bench.tag(77));
    let late = late.expect("accepted").wait().expect_err("nobody sends");
    assert_eq!(late.kind(), ErrorKind::Timeout, "{late:?}");
    names_message(bench, &late, number);
    assert_eq!(late.place().call, Some(CallKind::Recv), "{late}");
    for (work, own) in patient.into_iter().zip(first..) {
        let broken = work.wait().expect_err("the group is broken");
        names_message(bench, &broken, own);
        if let Some(cause) = broken.cause() {
            assert_eq!(cause.place().seq, Some(number), "{broken}");
        }
    }
    assert_eq!(group.p2p_sequence(), number + 1, "each takes a number");
    let data = Buffer::zeroed(DType::I32, 1).freeze();
    let refused = group.send(data, 1, bench.tag(78)).map(drop);
    let refused = refused.expect_err("the group is broken");
    assert_eq!(refused.place().call, Some(CallKind::Send), "{refused}");
    assert_eq!(refused.place().seq, Some(number + 1), "{refused}");
    Ok(())
}

fn send_timeout(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::Send, CallKind::Recv])?;
    bench.needs_ranks(2)?;
    if bench.rank() != 0 {
        std::thread::sleep(Duration::from_millis(1200));
        return Ok(());
    }
    let number = bench.group.p2p_sequence();
    let options = CallOptions::default().with_timeout(Duration::from_millis(200));
    let data = Buffer::zeroed(DType::F32, LONG).freeze();
    let sent = bench.group.with(options).send(data, 1, bench.tag(79));
    // A backend may take a copy, and then the send is over.
    if let Err(err) = sent.expect("accepted").wait() {
        assert_eq!(err.kind(), ErrorKind::Timeout, "{err:?}");
        names_message(bench, &err, number);
        assert_eq!(err.place().call, Some(CallKind::Send), "{err}");
    }
    Ok(())
}

/// That the error of a message between this rank and rank 1 says which one it was.
fn names_message(bench: &Bench, err: &Error, number: u64) {
    let place = err.place();
    assert_eq!(place.rank, Some(bench.rank()), "{err} names the own rank");
    assert_eq!(err.peer(), Some(1), "{err} names the peer");
    assert!(place.call.is_some(), "{err} names the operation");
    assert_eq!(place.seq, Some(number), "{err} names the sequence number");
    assert!(place.elapsed.is_some(), "{err} says how long it took");
}

fn closed(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce])?;
    try_allreduce(&*bench.group, PATIENCE).expect("it works before");
    bench.group.shutdown().expect("an orderly end");
    let err = try_allreduce(&*bench.group, PATIENCE).expect_err("it is over");
    assert_eq!(err.kind(), ErrorKind::Closed, "{err:?}");
    bench.group.abort("too late");
    let err = try_allreduce(&*bench.group, PATIENCE).expect_err("it is still over");
    assert_eq!(err.kind(), ErrorKind::Closed, "after an abort: {err:?}");
    Ok(())
}

fn dropped(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce])?;
    bench.needs_ranks(2)?;
    let all: Vec<usize> = (0..bench.size()).collect();
    let leaver = bench.size() - 1;
    for round in 0..5 {
        let name = format!("dropped {round}");
        let group = bench.group.split(&all, &name).expect("it can be split");
        let group = group.expect("every rank is a member");
        let sum = try_allreduce(&*group, PATIENCE);
        let sum = sum.unwrap_or_else(|err| panic!("the other has left, but had finished: {err}"));
        let expected = vec![bench.size() as f32; 100];
        assert_eq!(sum.as_slice::<f32>().expect("floats"), expected);
        if bench.rank() == leaver {
            continue; // and drops it
        }
        let err = try_allreduce(&*group, PATIENCE).expect_err("a rank is missing");
        assert!(broken(&err), "{err:?}");
    }
    Ok(())
}

fn mismatches(bench: &Bench) -> Outcome {
    bench.needs(&[
        CallKind::AllReduce,
        CallKind::AllGather,
        CallKind::Broadcast,
    ])?;
    bench.needs_ranks(2)?;
    let group = Checked::new(Arc::clone(&bench.group)).expect("succeeds");
    let odd = bench.rank() == 1;
    type Pair = (
        &'static str,
        fn(&dyn ProcessGroup, bool) -> Result<(), Error>,
    );
    let pairs: [Pair; 5] = [
        ("length", |g, odd| {
            let len = if odd { 5 } else { 4 };
            g.allreduce(Buffer::zeroed(DType::F32, len), ReduceOp::Sum)
                .map(drop)
        }),
        ("dtype", |g, odd| {
            let dtype = if odd { DType::I32 } else { DType::F32 };
            g.allreduce(Buffer::zeroed(dtype, 4), ReduceOp::Sum)
                .map(drop)
        }),
        ("operator", |g, odd| {
            let op = if odd { ReduceOp::Max } else { ReduceOp::Sum };
            g.allreduce(Buffer::zeroed(DType::F32, 4), op).map(drop)
        }),
        ("call", |g, odd| match odd {
            true => g.broadcast(Buffer::zeroed(DType::F32, 4), 0).map(drop),
            false => g
                .allreduce(Buffer::zeroed(DType::F32, 4), ReduceOp::Sum)
                .map(drop),
        }),
        ("root", |g, odd| {
            g.broadcast(Buffer::zeroed(DType::F32, 4), odd.into())
                .map(drop)
        }),
    ];
    for (aspect, call) in pairs {
        let err = call(&*group, odd).expect_err("ranks differ");
        assert_eq!(err.kind(), ErrorKind::Mismatch, "{aspect}: {err:?}");
        assert!(err.to_string().contains("rank"), "{err} shows both sides");
    }
    // Nothing was sent: the group below is as before.
    let sum = try_allreduce(&*group, PATIENCE).expect("equal calls still pass");
    assert_eq!(
        sum.as_slice::<f32>().expect("floats")[0],
        bench.size() as f32
    );
    Ok(())
}

fn matches(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce, CallKind::AllGather, CallKind::Barrier])?;
    let group = Checked::new(Arc::clone(&bench.group)).expect("succeeds");
    for _ in 0..10 {
        try_allreduce(&*group, PATIENCE).expect("equal calls");
        group.barrier().expect("equal calls");
    }
    Ok(())
}

fn monitored_missing(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::Send, CallKind::Recv])?;
    bench.needs_tags()?;
    bench.needs_ranks(2)?;
    let missing = bench.size() - 1;
    if bench.rank() == missing {
        std::thread::sleep(Duration::from_millis(1500));
        return Ok(());
    }
    let err = bench
        .group
        .monitored_barrier(Duration::from_millis(400))
        .expect_err("one is late");
    assert_eq!(err.kind(), ErrorKind::Timeout, "{err:?}");
    if bench.rank() == 0 {
        assert_eq!(err.peer(), Some(missing), "{err}");
        assert!(
            err.to_string().contains(&missing.to_string()),
            "{err} names the missing rank"
        );
    }
    Ok(())
}

/// What every other rank runs while rank `victim` dies: operations until one fails, which must
/// happen, say who died where the backend can tell, and leave the group failed for good.
///
/// Returns the error, for further checks.
///
/// # Panics
///
/// If no operation fails within `limit`, or the error is not what the capabilities promise.
pub fn survive(group: &Arc<dyn ProcessGroup>, victim: usize, limit: Duration) -> Error {
    let start = Instant::now();
    let err = loop {
        if let Err(err) = try_allreduce(&**group, limit) {
            break err;
        }
        assert!(
            start.elapsed() < limit,
            "rank {victim} died and nobody noticed"
        );
    };
    assert!(broken(&err), "{err:?}");
    if group.capabilities().on_peer_death == PeerDeath::Error {
        assert_eq!(err.peer(), Some(victim), "{err} names the rank that died");
    }
    assert!(
        err.place().call.is_some() && err.place().seq.is_some(),
        "{err} names the operation"
    );
    let later = try_allreduce(&**group, limit).expect_err("the group is broken");
    assert!(broken(&later), "{later:?}");
    err
}

/// More elements than travel with the first messages of a collective.
const LONG: usize = 300_000;

/// What all ranks run, three at least, to see that an abort ends what is blocked: on rank 0, which
/// aborts, on rank 1, and on the others when they next call. They meet in `store`.
///
/// # Panics
///
/// If somebody's operation does not end with the reason.
pub fn wake_by_abort(group: &Arc<dyn ProcessGroup>, store: &dyn Store) {
    let last = group.size() - 1;
    let met = || store.barrier("woken", group.size()).expect("all come here");
    if group.rank() > 1 {
        met();
        let err = group.barrier().expect_err("rank 0 has aborted");
        assert!(err.to_string().contains("no more of this"), "{err}");
        return;
    }
    let room = |len| Buffer::zeroed(DType::F32, len);
    let message = group.recv(room(1), last, 1).expect("accepted");
    let anybody = group.recv_any(room(1), 2).expect("accepted");
    let sum = group
        .allreduce(room(LONG), ReduceOp::Sum)
        .expect("accepted");
    if group.rank() == 0 {
        std::thread::sleep(Duration::from_millis(200));
        group.abort("no more of this");
        group.abort("something else");
    }
    let ends = [
        (0, sum.wait().map(drop)),
        (0, message.wait().map(drop)),
        (1, anybody.wait().map(drop)),
    ];
    for (number, end) in ends {
        let err = end.expect_err("rank 0 aborts");
        assert_eq!(err.place().seq, Some(number), "{err} says which it was");
        assert!(err.place().elapsed.is_some(), "{err} says how long it took");
        assert_eq!(err.kind(), ErrorKind::Aborted, "{err:?}");
        assert!(err.to_string().contains("no more of this"), "{err}");
    }
    met();
}

/// What all ranks run, three at least, to see that an operation which the last one does not reach
/// in time breaks the group for everybody, with that as the cause. They meet in `store`.
///
/// # Panics
///
/// If somebody's operation does not end so.
pub fn break_by_timeout(group: &Arc<dyn ProcessGroup>, store: &dyn Store) {
    let (rank, last) = (group.rank(), group.size() - 1);
    let over = |rank| format!("over {rank}");
    let sum = |options: CallOptions| {
        let ours = Buffer::zeroed(DType::F32, LONG);
        let sum = group.with(options).allreduce(ours, ReduceOp::Sum);
        sum.and_then(|work| work.wait()).expect_err("one is late")
    };
    if rank == last {
        (0..last).for_each(|rank| store.wait(&[&over(rank)]).expect("all come here"));
        let err = sum(CallOptions::default());
        assert!(err.to_string().contains("reports"), "{err}");
        return;
    }
    if rank == 0 {
        let err = sum(CallOptions::blocking().with_timeout(Duration::from_millis(300)));
        assert_eq!(err.kind(), ErrorKind::Timeout, "{err:?}");
        let place = err.place();
        let named = (place.call, place.seq);
        assert_eq!(named, (Some(CallKind::AllReduce), Some(0)), "{err}");
    } else {
        // Without end: whoever is not woken hangs.
        let err = sum(CallOptions::default().with_timeout(Duration::from_secs(3600)));
        assert_eq!(err.kind(), ErrorKind::Timeout, "{err:?}");
        assert!(err.to_string().contains("rank 0 reports"), "{err}");
    }
    let later = group.barrier().expect_err("the group is broken");
    assert_eq!(later.kind(), ErrorKind::Broken, "{later:?}");
    assert_eq!(later.cause().map(Error::kind), Some(ErrorKind::Timeout));
    store.set(&over(rank), b"").expect("the store is there");
}

/// What three ranks run, whose group gives up after a few seconds, to see that forming a group is
/// bounded: those who come in time are told that the last one is late, the last one that they have
/// given up, and their group goes on. They meet in `store`.
///
/// # Panics
///
/// If somebody's attempt does not end so.
pub fn form_too_late(group: &Arc<dyn ProcessGroup>, store: &dyn Store) {
    let (rank, everybody) = (group.rank(), [0, 1, 2]);
    let gave_up = |rank| format!("gave up {rank}");
    let wait_for = |rank| store.wait(&[&gave_up(rank)]).expect("all come here");
    let late = rank == 2;
    if late {
        (0..2).for_each(wait_for);
    }
    let err = group.new_group(&everybody, "part").expect_err("too late");
    assert_eq!(err.kind(), ErrorKind::Timeout, "{err:?}");
    assert_eq!(err.place().action, Some("new_group"), "{err}");
    let (first, who) = match late {
        true => (0, "ranks 0, 1"),
        false => (2, "rank 2"),
    };
    assert_eq!(err.peer(), Some(first), "{err}");
    assert!(
        err.message().starts_with(&format!("{who} did not join")),
        "{err}"
    );
    store.set(&gave_up(rank), b"").expect("the store is there");
    wait_for(2);
    let part = group.new_group(&everybody, "again").expect("all are there");
    let part = part.expect("a member");
    part.barrier().expect("all are in it");
    part.shutdown().expect("all come to the end");
}
