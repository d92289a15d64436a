//! Sends and receives: matching, lengths, and their independence of collectives.

mod common;

use std::time::Duration;

use common::{FORMS, on_each};
use phalanx_pg::{Buffer, Call, ErrorKind, ProcessGroupExt, ReduceOp};

fn byte(value: u8) -> Buffer {
    Buffer::from_vec(vec![value])
}

#[test]
fn messages_match_by_peer_and_tag_and_wait_until_received() {
    for form in FORMS {
        form.run(2, |group| {
            if group.rank() == 0 {
                for (value, tag) in [(1, 7), (2, 8), (3, 7)] {
                    group
                        .send(byte(value).freeze(), 1, tag)
                        .unwrap()
                        .wait()
                        .unwrap();
                }
                group.barrier().unwrap();
                return;
            }
            group.barrier().unwrap();
            let mut got = Vec::new();
            for tag in [8, 7, 7] {
                let work = group.recv(byte(0), 0, tag).unwrap();
                got.push(work.wait().unwrap().as_slice::<u8>().unwrap()[0]);
            }
            assert_eq!(got, [2, 1, 3]);
        });
    }
}

#[test]
fn receiving_from_anybody_says_who_it_was() {
    for form in FORMS {
        form.run(4, |group| {
            if group.rank() != 0 {
                let own = byte(group.rank() as u8).freeze();
                return group.send(own, 0, 5).unwrap().wait().unwrap();
            }
            let mut sources = Vec::new();
            for _ in 1..4 {
                let (buf, source) = group.recv_any(byte(0), 5).unwrap().wait().unwrap();
                assert_eq!(usize::from(buf.as_slice::<u8>().unwrap()[0]), source);
                sources.push(source);
            }
            sources.sort_unstable();
            assert_eq!(sources, [1, 2, 3]);
        });
    }
}

#[test]
fn a_posted_receive_does_not_hold_up_collectives() {
    for form in FORMS {
        form.run(2, |group| {
            let mut sum = [1i32];
            if group.rank() == 0 {
                let posted = group.recv(byte(0), 1, 0).unwrap();
                group.allreduce_in_place(&mut sum, ReduceOp::Sum).unwrap();
                assert!(!posted.is_done());
                group.barrier().unwrap();
                assert_eq!(posted.wait().unwrap().as_slice::<u8>().unwrap(), [9]);
            } else {
                group.allreduce_in_place(&mut sum, ReduceOp::Sum).unwrap();
                group.barrier().unwrap();
                group.send(byte(9).freeze(), 0, 0).unwrap().wait().unwrap();
            }
            assert_eq!(sum, [2]);
        });
    }
}

#[test]
fn a_batch_is_not_blocked_by_the_order_of_its_calls() {
    for form in FORMS {
        form.run(3, |group| {
            let (rank, size) = (group.rank(), group.size());
            let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
            // Large, so that both directions are full at the same time.
            let len = 1 << 20;
            let calls = vec![
                Call::Send {
                    data: Buffer::from_vec(vec![rank as i32; len]).freeze(),
                    peer: next,
                    tag: 0,
                },
                Call::Recv {
                    buf: Buffer::from_vec(vec![0i32; len]),
                    peer: Some(last),
                    tag: 0,
                },
            ];
            let parts = group.batch_p2p(calls).unwrap().wait().unwrap();
            assert!(parts[0].is_none());
            let got = parts[1].as_ref().unwrap().as_slice::<i32>().unwrap();
            assert!(got.iter().all(|&v| v == last as i32));
            assert_eq!(group.sequence(), 0);
        });
    }
}

#[test]
fn a_message_of_the_wrong_length_is_an_error_that_leaves_the_group_usable() {
    for form in FORMS {
        form.run(2, |group| {
            if group.rank() == 0 {
                let data = Buffer::from_vec(vec![0u8; 12]).freeze();
                group.send(data, 1, 0).unwrap().wait().unwrap();
            } else {
                let room = Buffer::from_vec(vec![0f32; 2]);
                let err = group.recv(room, 0, 0).unwrap().wait().unwrap_err();
                assert_eq!(err.kind(), ErrorKind::Mismatch);
                assert_eq!(err.peer(), Some(0));
                let text = err.to_string();
                assert!(text.contains("sent 12 bytes, 8 were expected"), "{text}");
                assert!(text.contains("recv"), "{text}");
            }
            group.barrier().unwrap();
        });
    }
}

#[test]
fn a_sender_gets_its_memory_back() {
    for form in FORMS {
        form.run(2, |group| match group.rank() {
            0 => {
                let data = byte(1).freeze();
                let work = group.send(data.clone(), 1, 0).unwrap();
                work.wait().unwrap();
                assert!(data.try_thaw().is_ok());
                group.barrier().unwrap();
            }
            _ => {
                group.barrier().unwrap();
                group.recv(byte(0), 0, 0).unwrap().wait().unwrap();
            }
        });
    }
}

#[test]
fn a_monitored_barrier_names_the_missing() {
    for form in FORMS {
        let errors = on_each(form.groups(3), |group| match group.rank() {
            2 => {
                // Alive, and elsewhere, until the others have given up.
                let wait = group.recv_any(byte(0), 1).unwrap().wait();
                wait.map(drop)
            }
            rank => {
                let limit = Duration::from_millis(200 << rank);
                let result = group.monitored_barrier(limit);
                group.abort("somebody is missing");
                result
            }
        });
        let texts: Vec<String> = errors
            .iter()
            .map(|e| e.as_ref().unwrap_err().to_string())
            .collect();
        assert!(
            texts[0].contains("1 of 3 ranks did not arrive in time: 2"),
            "{texts:?}"
        );
        assert!(texts[2].contains("somebody is missing"), "{texts:?}");
    }
}
