//! One rank of a backend of ours; started by `phalanx bench allreduce`.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Instant;

use half::bf16;
use phalanx::prelude::*;

use super::window::{Answer, Dtype, Memory, Overlap, Task, Window};
use crate::Failure;
use crate::bench::cpu;

/// Sums with one backend as told through a socket.
#[derive(clap::Args)]
pub(crate) struct Args {
    socket: PathBuf,
    backend: String,
    /// The processor to run on.
    #[arg(long)]
    processor: Option<usize>,
    /// The processors of all ranks, for a launcher that starts all with one command line.
    #[arg(long, value_delimiter = ',', conflicts_with = "processor")]
    processors: Vec<usize>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let mine = match args.processors.is_empty() {
        true => args.processor,
        false => args.processors.get(phalanx::env()?.rank).copied(),
    };
    if let Some(processor) = mine {
        cpu::pin(processor)?;
    }
    let mut to_bench = UnixStream::connect(&args.socket)?;
    let from_bench = BufReader::new(to_bench.try_clone()?);
    let result = serve(&args.backend, from_bench, &mut to_bench);
    if let Err(failure) = &result {
        let text = failure.to_string().replace('\n', " ");
        // The bench may have gone; this program's own output says it too.
        let _ = writeln!(to_bench, "fail {text}");
    }
    result
}

fn serve(
    backend: &str,
    from_bench: BufReader<UnixStream>,
    to_bench: &mut UnixStream,
) -> Result<(), Failure> {
    let group = phalanx::init_with(backend)?;
    let version = env!("CARGO_PKG_VERSION");
    writeln!(
        to_bench,
        "hello {} {backend} of Phalanx {version}",
        group.rank()
    )?;
    for line in from_bench.lines() {
        let answer = match line?.parse()? {
            Task::Run(window) => match window.dtype {
                Dtype::F32 => measure::<f32>(&*group, &window)?,
                Dtype::Bf16 => measure::<bf16>(&*group, &window)?,
            },
            Task::Overlap(overlap) => measure_overlap(&*group, &overlap)?,
        };
        writeln!(to_bench, "{answer}")?;
    }
    Ok(group.shutdown()?)
}

/// Values that all element types here hold exactly, sums over a few ranks included.
trait Exact: Element {
    fn exact(value: usize) -> Self;
}

impl Exact for f32 {
    fn exact(value: usize) -> Self {
        value as f32
    }
}

impl Exact for bf16 {
    fn exact(value: usize) -> Self {
        bf16::from_f32(value as f32)
    }
}

/// Values repeat with this period: one that divides no power of two, so that pieces that end up in
/// the wrong place show.
const PERIOD: usize = 5;

/// What elements are worth at a place, or in an operation, before the rank's share.
fn worth(at: usize) -> usize {
    at % PERIOD + 1
}

/// One window: an operation whose every element is checked, then those that are timed. Before
/// each of them the rank refills its data, so that what the others read is fresh in its cache and
/// in no other; after it, it looks at some elements. Neither is in the time, except between the
/// operations of a batch.
fn measure<T: Exact>(group: &dyn ProcessGroup, window: &Window) -> Result<Answer, Failure> {
    let (mine, all) = (group.rank() + 1, group.size() * (group.size() + 1) / 2);
    let blocking = group.with(CallOptions::blocking());
    let len = window.bytes / size_of::<T>();
    let mut data = allocate::<T>(group, window.memory, len)?;

    let elements = data.as_mut_slice::<T>()?.iter_mut().enumerate();
    elements.for_each(|(i, x)| *x = T::exact(worth(i) * mine));
    data = blocking.allreduce(data, ReduceOp::Sum)?.wait()?;
    let mut wrong = 0;
    for (i, x) in data.as_slice::<T>()?.iter().enumerate() {
        wrong += u64::from(*x != T::exact(worth(i) * all));
    }

    let mut nanos = Vec::with_capacity(window.iters / window.batch);
    let mut start = Instant::now();
    for i in 0..window.warmup + window.iters {
        data.as_mut_slice::<T>()?.fill(T::exact(worth(i) * mine));
        if window.barrier {
            group.barrier()?;
        }
        if i % window.batch == 0 {
            start = Instant::now();
        }
        data = blocking.allreduce(data, ReduceOp::Sum)?.wait()?;
        if (i + 1) % window.batch == 0 && i >= window.warmup {
            nanos.push((start.elapsed() / window.batch as u32).as_nanos() as u64);
        }
        let (sums, sum) = (data.as_slice::<T>()?, T::exact(worth(i) * all));
        let looked_at = [0, len / 2, len - 1, i * 7919 % len];
        wrong += looked_at.iter().filter(|&&at| sums[at] != sum).count() as u64;
    }
    Ok(Answer { wrong, nanos })
}

fn measure_overlap(group: &dyn ProcessGroup, overlap: &Overlap) -> Result<Answer, Failure> {
    let (mine, all) = (group.rank() + 1, group.size() * (group.size() + 1) / 2);
    let len = overlap.bytes / size_of::<f32>();
    let mut data = allocate::<f32>(group, overlap.memory, len)?;
    let mut answer = Answer {
        wrong: 0,
        nanos: Vec::new(),
    };
    for i in 0..overlap.iters {
        data.as_mut_slice::<f32>()?
            .fill(f32::exact(worth(i) * mine));
        group.barrier()?;
        let work = group.allreduce(data, ReduceOp::Sum)?;
        std::thread::sleep(overlap.sleep);
        let start = Instant::now();
        data = work.wait()?;
        answer.nanos.push(start.elapsed().as_nanos() as u64);
        let sum = f32::exact(worth(i) * all);
        answer.wrong += data
            .as_slice::<f32>()?
            .iter()
            .filter(|&&x| x != sum)
            .count() as u64;
    }
    Ok(answer)
}

fn allocate<T: Element>(
    group: &dyn ProcessGroup,
    memory: Memory,
    len: usize,
) -> Result<Buffer, Failure> {
    Ok(match memory {
        Memory::Registered => group.allocate(Device::Cpu, T::DTYPE, len)?,
        Memory::Plain => Buffer::zeroed(T::DTYPE, len),
    })
}
