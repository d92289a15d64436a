//! What survivors see when a rank dies, aborts, is late or calls something else.

mod common;

use std::time::{Duration, Instant};

use common::{FORMS, Group, first_kind, on_each, options};
use phalanx_pg::{
    Buffer, Call, CallKind, CallOptions, Error, ErrorKind, ProcessGroupExt, ReduceOp,
};

fn word() -> Buffer {
    Buffer::from_vec(vec![1i32])
}

fn sum(group: &Group) -> Result<Buffer, Error> {
    group.allreduce(word(), ReduceOp::Sum)?.wait()
}

/// Waits until the survivors of rank 2 of 4 have begun to wait for it.
fn await_survivors(group: &Group) {
    for peer in [0, 1, 3] {
        group.recv(word(), peer, 9).unwrap().wait().unwrap();
    }
}

/// The errors of a running and a queued collective, two posted receives, and a later call.
fn meet_the_end(group: &Group) -> [Error; 5] {
    let posted = group.recv(word(), 2, 0).unwrap();
    let any = group.recv_any(word(), 1).unwrap();
    let running = group.allreduce(word(), ReduceOp::Sum).unwrap();
    let queued = group.allreduce(word(), ReduceOp::Sum).unwrap();
    // Not waited for: rank 2 may go as soon as it has the message.
    drop(group.send(word().freeze(), 2, 9).unwrap());
    [
        running.wait().unwrap_err(),
        queued.wait().unwrap_err(),
        posted.wait().map(drop).unwrap_err(),
        any.wait().map(drop).unwrap_err(),
        sum(group).unwrap_err(),
    ]
}

#[test]
fn peers_learn_which_rank_dropped_its_group() {
    for form in FORMS {
        let results = on_each(form.groups(4), |group| {
            sum(&group).unwrap();
            match group.rank() {
                2 => {
                    await_survivors(&group);
                    None // and drops its group
                }
                _ => Some(meet_the_end(&group)),
            }
        });
        for errors in results.into_iter().flatten() {
            for err in &errors {
                assert_eq!(first_kind(err), ErrorKind::Aborted, "{err}");
                assert_eq!(err.peer(), Some(2), "{err}");
                let text = err.to_string();
                assert!(
                    text.contains("rank 2 dropped the group without a shutdown"),
                    "{text}"
                );
            }
            let [running, _, posted, ..] = &errors;
            assert_eq!(running.kind(), ErrorKind::Aborted);
            assert_eq!(running.place().call, Some(CallKind::AllReduce));
            assert_eq!(running.place().seq, Some(1));
            assert_eq!(posted.kind(), ErrorKind::Aborted);
            assert_eq!(posted.place().call, Some(CallKind::Recv));
        }
    }
}

#[test]
fn what_a_rank_has_finished_counts_after_it_has_left() {
    for form in FORMS {
        for round in 0..10 {
            on_each(form.groups(3), move |group| {
                // Long, so that others still receive when rank 2 is through.
                let ones = || Buffer::from_vec(vec![1i32; 1 << 20]);
                let sum = group.allreduce(ones(), ReduceOp::Sum).unwrap().wait();
                let sum = sum.unwrap_or_else(|err| panic!("{form:?}, round {round}: {err}"));
                assert!(sum.as_slice::<i32>().unwrap().iter().all(|&x| x == 3));
                if group.rank() == 2 {
                    return;
                }
                let err = group.allreduce(ones(), ReduceOp::Sum).unwrap().wait();
                let err = err.unwrap_err();
                assert_eq!(err.kind(), ErrorKind::Aborted, "{err}");
                assert_eq!(err.message(), "rank 2 dropped the group without a shutdown");
                assert_eq!(err.peer(), Some(2));
            });
        }
    }
}

#[test]
fn a_receive_from_anybody_waits_while_somebody_is_there() {
    for form in FORMS {
        on_each(form.groups(3), |group| match group.rank() {
            0 => {
                let first = group.recv_any(word(), 0).unwrap();
                let second = group.recv_any(word(), 0).unwrap();
                let third = group.recv_any(word(), 0).unwrap();
                first.wait().unwrap();
                second.wait().unwrap();
                let err = third.wait().map(drop).unwrap_err();
                assert_eq!(err.kind(), ErrorKind::Aborted, "{err}");
            }
            rank => {
                // Rank 1 has left long before rank 2 sends.
                std::thread::sleep(Duration::from_millis(50 * (rank as u64 - 1)));
                let sent = group.send(word().freeze(), 0, 0).unwrap();
                sent.wait().unwrap();
            }
        });
    }
}

#[test]
fn a_rank_that_left_while_others_were_idle_fails_their_next_operation() {
    for form in FORMS {
        let mut groups = form.groups(3);
        drop(groups.pop());
        let errors = on_each(groups, |group| {
            let first = sum(&group).unwrap_err();
            let send = group.send(word().freeze(), 1 - group.rank(), 0);
            let send = send.and_then(phalanx_pg::Work::wait).unwrap_err();
            (first, send, sum(&group).unwrap_err())
        });
        for (first, send, later) in errors {
            assert_eq!((first.kind(), first.peer()), (ErrorKind::Aborted, Some(2)));
            assert_eq!(first.place().seq, Some(0));
            assert_eq!(first_kind(&send), ErrorKind::Aborted, "{send}");
            assert_eq!(later.kind(), ErrorKind::Broken);
            assert_eq!(
                (first_kind(&later), later.peer()),
                (ErrorKind::Aborted, Some(2))
            );
        }
    }
}

#[test]
fn an_abort_fails_everybody_s_pending_operations_with_its_reason() {
    for form in FORMS {
        let results = on_each(form.groups(4), |group| {
            sum(&group).unwrap();
            if group.rank() == 2 {
                await_survivors(&group);
                group.abort("the loss is not a number");
                // Alive until the others have seen it.
                std::thread::sleep(Duration::from_millis(100));
                return Some(sum(&group).unwrap_err());
            }
            let errors = meet_the_end(&group);
            for err in &errors {
                assert_eq!(first_kind(err), ErrorKind::Aborted, "{err}");
                assert!(
                    err.to_string().contains("the loss is not a number"),
                    "{err}"
                );
                assert_eq!(err.peer(), Some(2), "{err}");
            }
            None
        });
        let own = results[2].as_ref().unwrap();
        assert_eq!(first_kind(own), ErrorKind::Aborted);
    }
}

#[test]
fn a_timeout_names_who_did_not_come_on_every_rank() {
    for form in FORMS {
        let errors = on_each(form.groups_with(4, &options(300)), |group| {
            if group.rank() == 3 {
                // Comes after the others have given up, and is told.
                std::thread::sleep(Duration::from_millis(600));
            } else {
                // Rank 0 last: the others' deadlines pass first, and they must not blame it.
                std::thread::sleep(Duration::from_millis(30 * (2 - group.rank() as u64)));
            }
            sum(&group).unwrap_err()
        });
        for err in &errors {
            assert_eq!(err.kind(), ErrorKind::Timeout, "{err}");
            assert_eq!(err.peer(), Some(3), "{err}");
            assert!(
                err.to_string().contains("rank 3 did not come in time"),
                "{err}"
            );
        }
    }
}

#[test]
fn a_receive_that_times_out_breaks_the_group_with_the_first_cause() {
    for form in FORMS {
        let results = on_each(form.groups(3), |group| {
            if group.rank() != 0 {
                return sum(&group).unwrap_err();
            }
            let never = group.recv(word(), 1, 0).unwrap();
            let limit = CallOptions::default().with_timeout(Duration::from_millis(100));
            let start = Instant::now();
            let err = group.with(limit).recv(word(), 2, 4).unwrap().wait();
            let err = err.map(drop).unwrap_err();
            assert!(start.elapsed() >= Duration::from_millis(100));
            assert_eq!(err.kind(), ErrorKind::Timeout);
            assert_eq!(err.place().call, Some(CallKind::Recv));
            let other = never.wait().map(drop).unwrap_err();
            assert_eq!(other.kind(), ErrorKind::Broken);
            assert_eq!(first_kind(&other), ErrorKind::Timeout);
            sum(&group).unwrap_err();
            err
        });
        for err in &results {
            assert_eq!(first_kind(err), ErrorKind::Timeout, "{err}");
            assert_eq!(err.peer(), Some(2), "{err}");
            assert!(
                err.to_string().contains("rank 2 sent nothing with tag 4"),
                "{err}"
            );
        }
    }
}

#[test]
fn ranks_that_differ_in_length_get_an_error_and_stay_in_step() {
    for form in FORMS {
        form.run(3, |group| {
            let len = if group.rank() == 1 { 2 } else { 1 };
            let different = |len| Call::AllReduce {
                buf: Buffer::from_vec(vec![1f32; len]),
                op: ReduceOp::Sum,
            };
            let batch = Call::Batch(vec![different(1), different(len), different(1)]);
            for call in [different(len), batch] {
                let work = group.call(call, &CallOptions::default()).unwrap();
                let err = work.wait().unwrap_err();
                assert_eq!(err.kind(), ErrorKind::Mismatch, "{err}");
                let other = if group.rank() == 1 { 0 } else { 1 };
                assert_eq!(err.peer(), Some(other), "{err}");
            }
            assert_eq!(sum(group).unwrap().as_slice::<i32>().unwrap(), [3]);
        });
    }
}

#[test]
fn a_group_that_was_shut_down_says_so() {
    for form in FORMS {
        on_each(form.groups(3), |group| {
            let peer = (group.rank() + 1) % 3;
            let received = group.recv_any(word(), 0).unwrap();
            group
                .send(word().freeze(), peer, 0)
                .unwrap()
                .wait()
                .unwrap();
            let pending = group.allreduce(word(), ReduceOp::Sum).unwrap();
            group.shutdown().unwrap();
            assert!(pending.is_done() && received.is_done());
            assert_eq!(sum(&group).unwrap_err().kind(), ErrorKind::Closed);
            let late = group.send(word().freeze(), peer, 0).unwrap_err();
            assert_eq!(late.kind(), ErrorKind::Closed);
            assert_eq!(group.shutdown().unwrap_err().kind(), ErrorKind::Closed);
            assert!(group.split(&[0, 1, 2], "later").is_err());
        });
    }
}

#[test]
fn work_that_outlives_its_group_ends() {
    for form in FORMS {
        let mut groups = form.groups(2);
        let group = groups.remove(0);
        let posted = group.recv(word(), 1, 0).unwrap();
        let running = group.allreduce(word(), ReduceOp::Sum).unwrap();
        drop(group);
        assert!(posted.wait().is_err());
        assert!(running.wait().is_err());
    }
}

#[test]
fn a_rank_that_goes_on_after_the_others_have_shut_down_is_told_so() {
    for form in FORMS {
        on_each(form.groups(2), |group| {
            if group.rank() == 1 {
                return group.shutdown().unwrap();
            }
            // Meets the other's last barrier.
            group.barrier().unwrap();
            let posted = group.recv(word(), 1, 0).and_then(phalanx_pg::Work::wait);
            for err in [posted.unwrap_err(), sum(&group).unwrap_err()] {
                assert_eq!(
                    (first_kind(&err), err.peer()),
                    (ErrorKind::PeerLost, Some(1))
                );
                assert!(err.to_string().contains("has shut the group down"), "{err}");
            }
        });
    }
}

#[test]
fn ranks_that_call_different_things_all_get_both_sides_and_stay_in_step() {
    fn allreduce(buf: Buffer, op: ReduceOp) -> Call {
        Call::AllReduce { buf, op }
    }
    fn floats(len: usize) -> Buffer {
        Buffer::from_vec(vec![1f32; len])
    }
    fn add() -> Call {
        allreduce(word(), ReduceOp::Sum)
    }
    type Make = fn() -> Call;
    let pairs: [(Make, Make, &str); 6] = [
        (
            || Call::Barrier,
            || allreduce(floats(0), ReduceOp::Sum),
            "call",
        ),
        (
            || allreduce(floats(2), ReduceOp::Sum),
            || Call::Broadcast {
                data: floats(2).into(),
                root: 1,
            },
            "call",
        ),
        (add, || allreduce(floats(1), ReduceOp::Sum), "element type"),
        (add, || allreduce(word(), ReduceOp::Max), "operator"),
        (
            add,
            || Call::Batch(vec![add()]),
            "number of calls in the batch",
        ),
        (
            || Call::Batch(vec![add(), add()]),
            || Call::Batch(vec![add(), add(), add()]),
            "number of calls in the batch",
        ),
    ];
    for form in FORMS {
        form.run(3, move |group| {
            for (seq, (many, odd, aspect)) in pairs.iter().enumerate() {
                let call = if group.rank() == 1 { odd() } else { many() };
                let work = group.call(call, &CallOptions::default()).unwrap();
                let err = work.wait().unwrap_err();
                assert_eq!(err.kind(), ErrorKind::Mismatch, "{err}");
                assert_eq!(err.place().seq, Some(seq as u64));
                let text = err.to_string();
                assert!(
                    text.contains("called") && text.contains(aspect) && text.contains("rank 1"),
                    "{text}"
                );
            }
            assert_eq!(sum(group).unwrap().as_slice::<i32>().unwrap(), [3]);
        });
    }
}

#[test]
fn a_shutdown_that_meets_another_call_fails_and_says_so() {
    for form in FORMS {
        on_each(form.groups(2), |group| {
            let err = match group.rank() {
                0 => sum(&group).unwrap_err(),
                _ => group.shutdown().unwrap_err(),
            };
            assert_eq!(err.kind(), ErrorKind::Mismatch, "{err}");
            let own = ["allreduce #0", "shutdown #0"][group.rank()];
            assert!(err.to_string().contains(own), "{err}");
            group.shutdown().unwrap();
        });
    }
}

#[test]
fn a_shutdown_that_takes_too_long_says_what_it_is() {
    for form in FORMS {
        on_each(form.groups_with(2, &options(200)), |group| {
            if group.rank() == 1 {
                std::thread::sleep(Duration::from_millis(400));
                return;
            }
            let err = group.shutdown().unwrap_err();
            assert_eq!(err.kind(), ErrorKind::Timeout, "{err}");
            assert!(err.to_string().contains(": shutdown #0 after"), "{err}");
        });
    }
}

#[test]
fn an_abort_after_the_shutdown_changes_nothing() {
    for form in FORMS {
        on_each(form.groups(2), |group| {
            group.shutdown().unwrap();
            group.abort("too late");
            assert_eq!(sum(&group).unwrap_err().kind(), ErrorKind::Closed);
            let send = group.send(word().freeze(), 1 - group.rank(), 0);
            assert_eq!(send.unwrap_err().kind(), ErrorKind::Closed);
        });
    }
}

#[test]
fn a_split_with_a_rank_that_has_left_does_not_wait_for_it() {
    for form in FORMS {
        on_each(form.groups(3), move |group| {
            sum(&group).unwrap();
            if group.rank() == 2 {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
            let err = group.split(&[0, 1, 2], "all").map(drop).unwrap_err();
            assert_eq!(first_kind(&err), ErrorKind::Aborted, "{err}");
            assert_eq!(err.peer(), Some(2), "{err}");
            // The two who are left may go on without it.
            let pair = group.split(&[0, 1], "pair").unwrap().unwrap();
            pair.barrier().unwrap();
            pair.shutdown().unwrap();
        });
    }
}
