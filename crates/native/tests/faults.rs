//! What goes wrong, one by one, with real processes.

mod common;

use std::time::Duration;

use common::{DEADLINE, connect, connect_across, die, finished, init, registered, resume, stop};
use phalanx_native::NativeGroup;
use phalanx_pg::{
    Buffer, Call, CallKind, CallOptions, DType, Device, Error, ErrorKind, Payload, ProcessGroup,
    ProcessGroupExt, ReduceOp, Result,
};
use phalanx_testkit::{End, World};

/// Elements: more than travels with a descriptor or in a frame.
const LEN: usize = 30_000;

const HOSTS: [[&str; 3]; 2] = [["a", "a", "a"], ["a", "a", "b"]];

/// A call of this kind, of which rank 1 is a part.
fn call(kind: CallKind, group: &dyn ProcessGroup) -> Call {
    let (rank, size, root) = (group.rank(), group.size(), 0);
    let buffer = |len| Buffer::zeroed(DType::F32, len);
    let op = ReduceOp::Sum;
    match kind {
        CallKind::AllReduce => Call::AllReduce {
            buf: buffer(LEN),
            op,
        },
        CallKind::Broadcast => Call::Broadcast {
            data: Payload::from(buffer(LEN)),
            root,
        },
        CallKind::Reduce => Call::Reduce {
            buf: buffer(LEN),
            op,
            root,
        },
        CallKind::AllGather => Call::AllGather {
            input: buffer(LEN).freeze(),
            output: buffer(LEN * size),
        },
        CallKind::Gather => {
            let output = (rank == root).then(|| buffer(LEN * size));
            Call::Gather {
                input: buffer(LEN).freeze(),
                output,
                root,
            }
        }
        CallKind::Scatter => {
            let input = (rank == root).then(|| buffer(LEN * size).freeze());
            Call::Scatter {
                input,
                output: buffer(LEN),
                root,
            }
        }
        CallKind::ReduceScatter => Call::ReduceScatter {
            input: buffer(LEN * size).freeze(),
            output: buffer(LEN),
            op,
        },
        CallKind::AllToAll => Call::AllToAll {
            input: buffer(LEN * size).freeze(),
            output: buffer(LEN * size),
            send_counts: Vec::new(),
            recv_counts: Vec::new(),
        },
        CallKind::Send => Call::Send {
            data: buffer(LEN).freeze(),
            peer: 1,
            tag: 3,
        },
        CallKind::Recv => Call::Recv {
            buf: buffer(LEN),
            peer: Some(1),
            tag: 3,
        },
        // Small ones, which are one operation where ranks share a host.
        CallKind::Batch => {
            let sum = |len| Call::AllReduce {
                buf: buffer(len),
                op,
            };
            Call::Batch(vec![sum(LEN), sum(10), sum(LEN)])
        }
        _ => Call::Barrier,
    }
}

const KINDS: [CallKind; 13] = [
    CallKind::AllReduce,
    CallKind::Broadcast,
    CallKind::Reduce,
    CallKind::AllGather,
    CallKind::Gather,
    CallKind::Scatter,
    CallKind::ReduceScatter,
    CallKind::AllToAll,
    CallKind::Barrier,
    CallKind::Send,
    CallKind::Recv,
    CallKind::Batch,
    CallKind::Batch,
];

#[test]
fn a_rank_that_is_killed_ends_every_kind_of_call() {
    for (round, kind) in KINDS.into_iter().enumerate() {
        World::new(3).deadline(DEADLINE).check(
            |ctx| {
                let group = connect_across(ctx, &HOSTS[round % 2]);
                group.barrier().unwrap();
                if ctx.rank() == 1 {
                    std::thread::sleep(Duration::from_millis(50));
                    die();
                }
                let ended = group.call(call(kind, &*group), &CallOptions::blocking());
                let err = ended
                    .and_then(|work| work.wait())
                    .expect_err("rank 1 is dead");
                assert_eq!(err.kind(), ErrorKind::PeerLost, "{kind}: {err:?}");
                assert_eq!(err.peer(), Some(1), "{kind}: {err}");
                assert_eq!(err.place().call, Some(kind), "{err}");
            },
            |outcome| finished(outcome, &[0, 2]),
        );
    }
}

#[test]
fn a_stopped_rank_is_named_with_the_operation_that_it_did_not_reach() {
    for hosts in HOSTS {
        World::new(3).deadline(DEADLINE).run(|ctx| {
            let group = connect_across(ctx, &hosts);
            group.barrier().unwrap();
            let options = CallOptions::blocking().with_timeout(Duration::from_secs(2));
            if ctx.rank() == 1 {
                stop(ctx);
            }
            let sum = group
                .with(options)
                .allreduce(registered(&group, LEN, 1.0), ReduceOp::Sum);
            let err = sum
                .and_then(|work| work.wait())
                .expect_err("rank 1 was not there");
            if ctx.rank() == 1 {
                // It cannot know that it stood still; it sees what the others made of it.
                println!("resumed: {err}");
                return;
            }
            assert_eq!(err.kind(), ErrorKind::Timeout, "{err:?}");
            assert_eq!(err.peer(), Some(1), "{err}");
            let place = err.place();
            assert_eq!(
                (place.call, place.seq),
                (Some(CallKind::AllReduce), Some(1)),
                "{err}"
            );
            assert!(err.to_string().contains("rank 1 did not"), "{err}");
            // In the words of who noticed, however many passed them on.
            assert!(err.to_string().matches("reports").count() <= 1, "{err}");
            let survivors = ctx.store().add("survivors", 1).unwrap();
            if survivors == 2 {
                resume(ctx);
            }
        });
    }
}

#[test]
fn a_message_that_a_stopped_rank_holds_up_names_it() {
    for hosts in HOSTS {
        World::new(3).deadline(DEADLINE).run(|ctx| {
            let group = connect_across(ctx, &hosts);
            group.barrier().unwrap();
            let err = match ctx.rank() {
                0 => {
                    let options = CallOptions::default().with_timeout(Duration::from_secs(1));
                    let room = Buffer::zeroed(DType::F32, 1);
                    let message = group.with(options).recv(room, 1, 7);
                    let err = message.and_then(|work| work.wait()).map(|_| ());
                    let err = err.expect_err("rank 1 is busy");
                    let text = err.to_string();
                    assert!(text.contains("rank 1 sent nothing with tag 7"), "{err}");
                    err
                }
                // Held up by rank 2, and so does not come to send.
                1 => group.barrier().expect_err("rank 2 is stopped"),
                _ => {
                    stop(ctx);
                    return;
                }
            };
            assert_eq!(err.peer(), Some(2), "{err}");
            if ctx.store().add("survivors", 1).unwrap() == 2 {
                resume(ctx);
            }
        });
    }
}

#[test]
fn an_abort_ends_what_others_wait_for_with_its_reason_which_stays() {
    for hosts in HOSTS {
        World::new(3).deadline(DEADLINE).run(|ctx| {
            let group = connect_across(ctx, &hosts);
            group.barrier().unwrap();
            if ctx.rank() == 0 {
                std::thread::sleep(Duration::from_millis(100));
                group.abort("no more");
                group.abort("something else");
                ctx.store().barrier("all have seen it", 3).unwrap();
                return;
            }
            let recv = group.recv(Buffer::zeroed(DType::F32, LEN), 0, 1).unwrap();
            let behind = group.barrier_async().unwrap();
            for err in [recv.wait().map(drop), behind.wait(), group.barrier()] {
                let err = err.expect_err("rank 0 aborts");
                assert!(err.to_string().contains("no more"), "{err}");
                assert!(!err.to_string().contains("something else"), "{err}");
                assert_eq!(err.peer(), Some(0), "{err}");
            }
            ctx.store().barrier("all have seen it", 3).unwrap();
        });
    }
}

#[test]
fn a_part_that_fails_leaves_the_whole_as_it_was() {
    for hosts in HOSTS {
        World::new(3).deadline(DEADLINE).run(|ctx| {
            let world = connect_across(ctx, &hosts);
            let part = world.split(&[0, 2], "part").unwrap();
            if let Some(part) = part {
                if ctx.rank() == 0 {
                    part.abort("enough of this part");
                }
                let err = part.barrier().expect_err("it is aborted");
                assert!(err.to_string().contains("enough of this part"), "{err}");
            }
            let sum = world.allreduce(registered(&world, LEN, 2.0), ReduceOp::Sum);
            let sum = sum.unwrap().wait().unwrap();
            assert_eq!(sum.as_slice::<f32>().unwrap(), [6.0; LEN]);
            world.shutdown().unwrap();
        });
    }
}

/// What the processes of a killed job had open.
mod traces {
    use std::fs::{read_dir, read_link, read_to_string};

    /// Where the descriptors of this process lead.
    pub(super) fn descriptors() -> Vec<String> {
        let all = read_dir("/proc/self/fd").unwrap().flatten();
        let links = all.filter_map(|entry| read_link(entry.path()).ok());
        links.map(|link| link.display().to_string()).collect()
    }

    /// Files behind the mappings of this process.
    pub(super) fn mapped() -> Vec<String> {
        let maps = read_to_string("/proc/self/maps").unwrap();
        let files = maps.lines().filter_map(|line| line.splitn(6, ' ').nth(5));
        files.map(|file| file.trim().to_owned()).collect()
    }

    /// The inodes of all Unix sockets of the machine, and whether they have the name of a file.
    pub(super) fn unix_sockets() -> Vec<(String, bool)> {
        // Names may be any bytes.
        let table = std::fs::read("/proc/self/net/unix").unwrap();
        let table = String::from_utf8_lossy(&table).into_owned();
        let socket = |line: &str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let named = words.get(7).is_some_and(|name| !name.starts_with('@'));
            Some((words.get(6)?.to_string(), named))
        };
        table.lines().skip(1).filter_map(socket).collect()
    }
}

#[test]
fn nothing_is_left_of_a_job_whose_ranks_are_all_killed() {
    World::new(3).deadline(DEADLINE).check(
        |ctx| {
            let group = connect(ctx);
            let sum = group.allreduce(registered(&group, LEN, 1.0), ReduceOp::Sum);
            sum.unwrap().wait().unwrap();
            let links = traces::descriptors();
            assert!(
                links.iter().any(|link| link.starts_with("/memfd:")),
                "{links:?}"
            );
            // Memory without a name goes with its last user, and there is nothing else.
            let temporary = std::env::temp_dir().display().to_string();
            // Where the target directory is a temporary one.
            let program = std::env::current_exe().unwrap().display().to_string();
            for link in links.iter().chain(&traces::mapped()) {
                let named = link.starts_with("/dev/shm") || link.starts_with(&temporary);
                assert!(!named || *link == program, "{link} outlives the job");
            }
            for (inode, named) in traces::unix_sockets() {
                if links.contains(&format!("socket:[{inode}]")) {
                    assert!(!named, "a socket that is a file");
                    println!("socket {inode}");
                }
            }
            ctx.store().barrier("all are here", 3).unwrap();
            die();
        },
        |outcome| {
            let left = traces::unix_sockets();
            for rank in outcome.ranks() {
                assert_eq!(rank.end, End::Signaled(9), "{}", outcome.report());
                let inodes = rank
                    .log
                    .lines()
                    .filter_map(|line| line.strip_prefix("socket "));
                let inodes: Vec<&str> = inodes.collect();
                assert!(!inodes.is_empty(), "{}", outcome.report());
                for inode in inodes {
                    assert!(
                        !left.iter().any(|(other, _)| other == inode),
                        "{inode} is left"
                    );
                }
            }
        },
    );
}

#[test]
fn more_memory_than_there_is_is_an_error_and_no_signal() {
    World::new(2).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        // Refused before a page of it is taken.
        let err = group
            .allocate(Device::Cpu, DType::F64, 1 << 40)
            .unwrap_err();
        assert!(err.to_string().contains("no room"), "{err}");
        let sum = group.allreduce(registered(&group, LEN, 1.0), ReduceOp::Sum);
        assert_eq!(
            sum.unwrap().wait().unwrap().as_slice::<f32>().unwrap(),
            [2.0; LEN]
        );
        group.shutdown().unwrap();
    });
}

#[test]
fn a_process_without_descriptors_gets_an_error() {
    World::new(2).deadline(DEADLINE).run(|ctx| {
        let mut init = init(ctx);
        init.timeout = Duration::from_secs(5);
        let group = NativeGroup::connect(&init).unwrap();
        group.barrier().unwrap();
        if ctx.rank() == 1 {
            forbid_descriptors();
        }
        ctx.store().barrier("before", 2).unwrap();
        // The first shared memory of rank 0, which rank 1 cannot open.
        let sum = group.allreduce(
            match ctx.rank() {
                0 => registered(&group, LEN, 1.0),
                _ => Buffer::zeroed(DType::F32, LEN),
            },
            ReduceOp::Sum,
        );
        let err = sum
            .and_then(|work| work.wait())
            .expect_err("rank 1 cannot reach rank 0's memory");
        assert!(!err.leaves_group_usable(), "{err:?}");
        if ctx.rank() == 1 {
            assert!(err.to_string().contains("too many open files"), "{err}");
            let own = group.allocate(Device::Cpu, DType::F32, 1).unwrap_err();
            assert!(own.to_string().contains("Too many open files"), "{own}");
        }
        ctx.store().barrier("after", 2).unwrap();
    });
}

/// From now on nothing can be opened.
fn forbid_descriptors() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let limit = rustix::process::Rlimit {
        // Those that are open stay so.
        current: Some(3),
        maximum: getrlimit(Resource::Nofile).maximum,
    };
    setrlimit(Resource::Nofile, limit).unwrap();
}

#[test]
fn a_mismatch_leaves_operations_that_are_still_being_finished_alone() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        for round in 0..20 {
            let value = (round + ctx.rank()) as f32;
            let before = group
                .allreduce(registered(&group, LEN, value), ReduceOp::Sum)
                .unwrap();
            let odd = usize::from(ctx.rank() == round % 3);
            let wrong = Buffer::zeroed(DType::F32, 10 + odd);
            let wrong = group.allreduce(wrong, ReduceOp::Sum).unwrap();
            let after = group
                .allreduce(registered(&group, LEN, value), ReduceOp::Sum)
                .unwrap();
            let expected = [(3 * round + 3) as f32; LEN];
            let check = |sum: Result<Buffer>| {
                assert_eq!(sum.unwrap().as_slice::<f32>().unwrap(), expected);
            };
            check(before.wait());
            assert_eq!(
                wrong.wait().map_err(|err| err.kind()).err(),
                Some(ErrorKind::Mismatch)
            );
            check(after.wait());
        }
        group.shutdown().unwrap();
    });
}

#[test]
fn a_mismatch_on_one_rank_spoils_nothing_that_others_read() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        for round in 0..20 {
            let (odd, value) = (ctx.rank() == 0, (1 + round + ctx.rank()) as f32);
            let input = registered(&group, 3 * LEN, value).freeze();
            // Rank 0 has room for one element less from rank 2.
            let received = vec![LEN, LEN, LEN - usize::from(odd)];
            let room = Buffer::zeroed(DType::F32, received.iter().sum());
            let done = group.alltoall_v(input, room, vec![LEN; 3], received);
            let done = done.and_then(|work| work.wait());
            if odd {
                assert_eq!(
                    done.map_err(|err| err.kind()).err(),
                    Some(ErrorKind::Mismatch)
                );
                // Where the input was, if it was given up too early.
                let _scribble = registered(&group, 3 * LEN, -1.0);
                continue;
            }
            let done = done.unwrap();
            for (from, part) in done.as_slice::<f32>().unwrap().chunks(LEN).enumerate() {
                assert_eq!(part, [(1 + round + from) as f32; LEN], "from rank {from}");
            }
        }
        group.shutdown().unwrap();
    });
}

#[test]
fn works_may_be_dropped_while_many_are_in_flight() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        let mut works = Vec::new();
        for round in 0..60 {
            let value = (round + ctx.rank()) as f32;
            let work = group
                .allreduce(registered(&group, LEN, value), ReduceOp::Sum)
                .unwrap();
            if (round + ctx.rank()) % 3 > 0 {
                works.push((round, work));
            }
        }
        for (round, work) in works.into_iter().rev() {
            let sum = work.wait().unwrap();
            assert_eq!(
                sum.as_slice::<f32>().unwrap(),
                [(3 * round + 3) as f32; LEN]
            );
        }
        group.shutdown().unwrap();
    });
}

#[test]
fn memory_of_a_failed_operation_is_never_given_out_again() {
    World::new(2).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        group.barrier().unwrap();
        let options = CallOptions::default().with_timeout(Duration::from_secs(2));
        let configured = group.with(options);
        if ctx.rank() == 1 {
            // Announced, so that rank 0 works on both memories, and comes to its own part late.
            let big = registered(&group, 8 * LEN, 1.0);
            let work = configured.allreduce(big, ReduceOp::Sum);
            stop(ctx);
            let _ = work.and_then(|work| work.wait());
            let err = group.barrier().expect_err("the other has given up");
            println!("resumed: {err}");
            ctx.store().set("ended", b"").unwrap();
            return;
        }
        ctx.store().wait(&["stopped"]).unwrap();
        let mut ranges = Vec::new();
        let mut works = Vec::new();
        for _ in 0..4 {
            let buffer = registered(&group, 8 * LEN, 1.0);
            let start = buffer.as_ptr().as_ptr() as usize;
            ranges.push(start..start + buffer.byte_len());
            works.push(configured.allreduce(buffer, ReduceOp::Sum));
        }
        let ended: Vec<_> = works.into_iter().map(|work| work?.wait()).collect();
        let errors: Vec<&Error> = ended.iter().filter_map(|end| end.as_ref().err()).collect();
        assert!(
            errors.len() >= 3,
            "rank 1 has announced one at most: {errors:?}"
        );
        let failed = ranges.iter().zip(&ended).filter(|(_, end)| end.is_err());
        let failed: Vec<_> = failed.map(|(range, _)| range.clone()).collect();
        drop(ended);
        // As much as was given up, and more.
        let fresh: Vec<Buffer> = (0..12).map(|_| registered(&group, 4 * LEN, 7.0)).collect();
        for buffer in &fresh {
            let start = buffer.as_ptr().as_ptr() as usize;
            let end = start + buffer.byte_len();
            let overlaps = |range: &std::ops::Range<usize>| start < range.end && range.start < end;
            assert!(
                !failed.iter().any(overlaps),
                "a stopped rank may still write there"
            );
        }
        resume(ctx);
        ctx.store().wait(&["ended"]).unwrap();
        for buffer in &fresh {
            assert_eq!(buffer.as_slice::<f32>().unwrap(), [7.0; 4 * LEN]);
        }
    });
}
