//! Order, ownership and independence: many operations, mixed modes, point-to-point beside
//! collectives, the same bits however a vector is cut.

use std::time::Duration;

use phalanx_pg::{
    Buffer, Call, CallKind, CallOptions, DType, Mode, ProcessGroupExt, ReduceOp, Work,
};

use super::inputs::{Memory, fill, floats, rough, values};
use super::{Bench, Case, Level, Outcome, mixed_options};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "a thousand operations outstanding at once",
        body: thousand_outstanding,
    },
    Case {
        name: "blocking and asynchronous callers meet",
        body: modes_meet,
    },
    Case {
        name: "results are the same bits on every rank",
        body: same_bits,
    },
    Case {
        name: "cutting a vector into pieces changes no bit",
        body: pieces,
    },
    Case {
        name: "sixteen-bit sums are rounded once",
        body: rounded_once,
    },
    Case {
        name: "a dropped work does not disturb the next",
        body: dropped_work,
    },
    Case {
        name: "works may be waited for in any order",
        body: any_order,
    },
    Case {
        name: "a work that is not done yet can be asked again",
        body: ask_again,
    },
    Case {
        name: "a barrier ends after all earlier work",
        body: barrier_after_work,
    },
    Case {
        name: "a receive posted before a collective waits for a later send",
        body: p2p_beside,
    },
    Case {
        name: "messages match by tag",
        body: tags,
    },
    Case {
        name: "messages of one tag keep their order",
        body: message_order,
    },
    Case {
        name: "receiving from anybody names the sender",
        body: from_anybody,
    },
    Case {
        name: "a batch of sends and receives cannot block itself",
        body: ring,
    },
    Case {
        name: "sequence numbers count collectives",
        body: sequence,
    },
];

fn thousand_outstanding(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce])?;
    let count = if bench.level == Level::Full {
        10_000
    } else {
        1000
    };
    let works: Vec<Work<Buffer>> = (0..count)
        .map(|i| {
            let buf = Buffer::from_vec(vec![(bench.rank() + i) as i64; i % 5]);
            bench
                .group
                .allreduce(buf, ReduceOp::Sum)
                .expect("room for a thousand")
        })
        .collect();
    let n = bench.size() as i64;
    for (i, work) in works.into_iter().enumerate() {
        let expected = vec![n * (n - 1) / 2 + n * i as i64; i % 5];
        assert_eq!(
            values::<i64>(&work.wait().expect("it succeeds")),
            expected,
            "operation {i}"
        );
    }
    Ok(())
}

fn modes_meet(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce])?;
    for round in 0..60 {
        let options = match round % 3 {
            0 => mixed_options(bench.rank(), round),
            1 => CallOptions::blocking(),
            _ => CallOptions::default(),
        };
        let buf = Buffer::from_vec(vec![round as i32 + bench.rank() as i32]);
        let call = Call::AllReduce {
            buf,
            op: ReduceOp::Max,
        };
        // Something queued before it, so that a blocking call has to wait its turn too.
        let first = bench
            .group
            .allreduce(Buffer::from_vec(vec![1i8]), ReduceOp::Sum);
        let done = bench
            .group
            .call(call, &options)
            .expect("accepted")
            .wait()
            .expect("succeeds");
        let max = values::<i32>(&done.buffer.expect("a buffer"));
        assert_eq!(max, [round as i32 + bench.size() as i32 - 1]);
        let sum = first.expect("accepted").wait().expect("succeeds");
        assert_eq!(values::<i8>(&sum), [bench.size() as i8]);
    }
    Ok(())
}

/// Sum of the rough vector with the group, from the given memory.
fn rough_sum(bench: &Bench, range: std::ops::Range<usize>, memory: Memory) -> Vec<u32> {
    let mine = floats(range.map(|at| rough(bench.rank(), at)));
    let buf = fill(&*bench.group, memory, (DType::F32, mine.len()), |bytes| {
        bytes.copy_from_slice(mine.as_bytes().expect("host memory"));
    });
    let sum = bench
        .group
        .allreduce(buf, ReduceOp::Sum)
        .expect("accepted")
        .wait();
    values::<f32>(&sum.expect("succeeds"))
        .iter()
        .map(|x| x.to_bits())
        .collect()
}

fn same_bits(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce, CallKind::AllGather])?;
    for len in [1, 1000, 70_001] {
        let bits = rough_sum(bench, 0..len, Memory::ALL[bench.rank() % 3]);
        for (at, &bits) in bits.iter().enumerate().step_by(len / 100 + 1) {
            let exact: f64 = (0..bench.size()).map(|r| f64::from(rough(r, at))).sum();
            let largest = (0..bench.size())
                .map(|r| rough(r, at).abs())
                .fold(0.0, f32::max);
            let off = (f64::from(f32::from_bits(bits)) - exact).abs();
            let bound = f64::from(largest) * bench.size() as f64 * f64::from(f32::EPSILON);
            assert!(off <= bound, "element {at} is off by {off}");
        }
        let bits: Vec<i32> = bits.iter().map(|&bits| bits as i32).collect();
        let everyone = bench.group.allgather_slice(&bits).expect("succeeds");
        for (rank, theirs) in everyone.chunks_exact(len).enumerate() {
            assert!(
                theirs == bits,
                "rank {rank} has other bits for {len} elements"
            );
        }
    }
    Ok(())
}

fn pieces(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce])?;
    bench.needs_fixed_order()?;
    let len = 70_001;
    let whole = rough_sum(bench, 0..len, Memory::Registered);
    for (i, piece) in [len, 65_536, 20_000, 4097, 999].into_iter().enumerate() {
        let memory = Memory::ALL[i % 3];
        let cut: Vec<u32> = (0..len)
            .step_by(piece)
            .flat_map(|at| rough_sum(bench, at..len.min(at + piece), memory))
            .collect();
        let wrong = cut.iter().zip(&whole).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "pieces of {piece}: an element differs");
    }
    Ok(())
}

fn rounded_once(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce])?;
    bench.needs_fixed_order()?;
    bench.needs_ranks(2)?;
    if !bench.group.capabilities().dtypes.contains(DType::BF16) {
        return Err(super::Skip("the backend has no bf16".into()));
    }
    // In bf16, 256 + 1 is 256 again, however often.
    let mine = if bench.rank() == 0 { 256.0 } else { 1.0 };
    let buf = Buffer::from_vec(vec![half::bf16::from_f32(mine); 3]);
    let sum = bench
        .group
        .allreduce(buf, ReduceOp::Sum)
        .expect("accepted")
        .wait();
    let sum = values::<half::bf16>(&sum.expect("succeeds"))[0];
    let exact = half::bf16::from_f32(256.0 + (bench.size() - 1) as f32);
    assert_eq!(
        sum, exact,
        "16-bit partial sums travel and accumulate in f32"
    );
    Ok(())
}

fn dropped_work(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce])?;
    for i in 0..20i64 {
        let dropped = Buffer::from_vec(vec![i; 5000]);
        drop(
            bench
                .group
                .allreduce(dropped, ReduceOp::Sum)
                .expect("accepted"),
        );
        let kept = Buffer::from_vec(vec![i]);
        let sum = bench
            .group
            .allreduce(kept, ReduceOp::Sum)
            .expect("accepted")
            .wait();
        assert_eq!(
            values::<i64>(&sum.expect("succeeds")),
            [i * bench.size() as i64]
        );
    }
    Ok(())
}

fn any_order(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce])?;
    let start = |i: i64| {
        bench
            .group
            .allreduce(Buffer::from_vec(vec![i]), ReduceOp::Sum)
            .expect("accepted")
    };
    let works: Vec<_> = (0..50).map(start).collect();
    let n = bench.size() as i64;
    for (i, work) in works.into_iter().enumerate().rev() {
        let sum = work
            .map(|buf| values::<i64>(&buf))
            .wait()
            .expect("succeeds");
        assert_eq!(sum, [n * i as i64]);
    }
    Ok(())
}

fn ask_again(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce])?;
    bench.needs_ranks(2)?;
    if bench.rank() == 0 {
        std::thread::sleep(Duration::from_millis(80));
    }
    let buf = Buffer::from_vec(vec![1i32]);
    let mut work = bench.group.allreduce(buf, ReduceOp::Sum).expect("accepted");
    let mut asked = 0;
    let sum = loop {
        match work
            .wait_for(Duration::from_millis(5))
            .expect("nothing fails")
        {
            Some(sum) => break sum,
            None => asked += 1,
        }
        assert!(asked < 10_000, "it does not end");
    };
    assert_eq!(values::<i32>(&sum), [bench.size() as i32]);
    Ok(())
}

fn barrier_after_work(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce, CallKind::Barrier])?;
    let start = |_| {
        let buf = Buffer::zeroed(DType::F32, 20_000);
        bench.group.allreduce(buf, ReduceOp::Sum).expect("accepted")
    };
    let works: Vec<_> = (0..10).map(start).collect();
    bench.group.barrier().expect("succeeds");
    assert!(
        works.iter().all(Work::is_done),
        "the barrier ended before earlier work"
    );
    Ok(())
}

fn p2p_beside(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce, CallKind::Send, CallKind::Recv])?;
    bench.needs_ranks(2)?;
    for mode in [Mode::Async, Mode::Blocking] {
        let options = CallOptions {
            mode,
            ..CallOptions::default()
        };
        let all = |buf| {
            bench
                .group
                .with(options.clone())
                .allreduce(buf, ReduceOp::Sum)
        };
        let one = || Buffer::from_vec(vec![1i32; 1000]);
        match bench.rank() {
            0 => {
                let message = bench
                    .group
                    .recv(Buffer::zeroed(DType::I32, 3), 1, bench.tag(9));
                let message = message.expect("accepted");
                all(one())
                    .expect("accepted")
                    .wait()
                    .expect("not behind the receive");
                assert_eq!(values::<i32>(&message.wait().expect("succeeds")), [4, 5, 6]);
            }
            1 => {
                all(one()).expect("accepted").wait().expect("succeeds");
                let data = Buffer::from_vec(vec![4i32, 5, 6]).freeze();
                bench
                    .group
                    .send(data, 0, bench.tag(9))
                    .expect("accepted")
                    .wait()
                    .expect("succeeds");
            }
            _ => drop(all(one()).expect("accepted").wait().expect("succeeds")),
        }
    }
    Ok(())
}

fn tags(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::Send, CallKind::Recv])?;
    bench.needs_tags()?;
    bench.needs_ranks(2)?;
    match bench.rank() {
        0 => {
            for tag in [3u32, 1, 2] {
                let data = Buffer::from_vec(vec![tag as i32]).freeze();
                bench
                    .group
                    .send(data, 1, tag)
                    .expect("accepted")
                    .wait()
                    .expect("succeeds");
            }
        }
        1 => {
            for tag in [1u32, 2, 3] {
                let room = Buffer::zeroed(DType::I32, 1);
                let got = bench.group.recv(room, 0, tag).expect("accepted").wait();
                assert_eq!(values::<i32>(&got.expect("succeeds")), [tag as i32]);
            }
        }
        _ => {}
    }
    Ok(())
}

fn message_order(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::Send, CallKind::Recv])?;
    bench.needs_ranks(2)?;
    const COUNT: i32 = 200;
    match bench.rank() {
        0 => {
            let send = |i| {
                let data = Buffer::from_vec(vec![i; 100]).freeze();
                bench.group.send(data, 1, 0).expect("accepted")
            };
            let works: Vec<_> = (0..COUNT).map(send).collect();
            works
                .into_iter()
                .for_each(|work| work.wait().expect("succeeds"));
        }
        1 => {
            let recv = |_| {
                bench
                    .group
                    .recv(Buffer::zeroed(DType::I32, 100), 0, 0)
                    .expect("accepted")
            };
            let works: Vec<_> = (0..COUNT).map(recv).collect();
            for (i, work) in works.into_iter().enumerate() {
                assert_eq!(
                    values::<i32>(&work.wait().expect("succeeds")),
                    [i as i32; 100]
                );
            }
        }
        _ => {}
    }
    Ok(())
}

fn from_anybody(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::Send, CallKind::Recv])?;
    bench.needs_ranks(2)?;
    if !bench.group.capabilities().recv_any {
        return Err(super::Skip(
            "the backend cannot receive from anybody".into(),
        ));
    }
    if bench.rank() > 0 {
        let data = Buffer::from_vec(vec![bench.rank() as i64]).freeze();
        bench
            .group
            .send(data, 0, 5)
            .expect("accepted")
            .wait()
            .expect("succeeds");
        return Ok(());
    }
    let mut seen = Vec::new();
    for _ in 1..bench.size() {
        let room = Buffer::zeroed(DType::I64, 1);
        let (got, source) = bench
            .group
            .recv_any(room, 5)
            .expect("accepted")
            .wait()
            .expect("succeeds");
        assert_eq!(
            values::<i64>(&got),
            [source as i64],
            "the sender is named right"
        );
        seen.push(source);
    }
    seen.sort_unstable();
    assert_eq!(seen, (1..bench.size()).collect::<Vec<_>>());
    Ok(())
}

fn ring(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::Send, CallKind::Recv, CallKind::Batch])?;
    bench.needs_ranks(2)?;
    let (me, size) = (bench.rank(), bench.size());
    let (next, previous) = ((me + 1) % size, (me + size - 1) % size);
    // Larger than any socket buffer: a send that waits for its receive must not stop the batch.
    let len = 1 << 20;
    let data = Buffer::from_vec(vec![me as i32; len]).freeze();
    let calls = vec![
        Call::Send {
            data,
            peer: next,
            tag: bench.tag(1),
        },
        Call::Recv {
            buf: Buffer::zeroed(DType::I32, len),
            peer: Some(previous),
            tag: bench.tag(1),
        },
    ];
    let mut got = bench
        .group
        .batch_p2p(calls)
        .expect("accepted")
        .wait()
        .expect("succeeds");
    assert!(got[0].is_none(), "a send gives nothing back");
    let received = got.remove(1).expect("the received buffer");
    assert!(
        values::<i32>(&received)
            .iter()
            .all(|&x| x == previous as i32)
    );
    Ok(())
}

fn sequence(bench: &Bench) -> Outcome {
    bench.needs(&[CallKind::AllReduce, CallKind::Barrier])?;
    let start = bench.group.sequence();
    bench.group.barrier().expect("succeeds");
    let buf = Buffer::from_vec(vec![0u8]);
    bench
        .group
        .allreduce(buf, ReduceOp::Max)
        .expect("accepted")
        .wait()
        .expect("succeeds");
    assert_eq!(bench.group.sequence(), start + 2);
    Ok(())
}
