//! The roof: the additions, loads and stores that an all-reduce of n ranks in one pass cannot do
//! without, by the loops of the backend `native`, divided among the processors, on memory of their own
//! and with nothing to wait for.
//!
//! Data of `f32` only: for other types it says what as many bytes of that cost.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::AcqRel, Ordering::Acquire};
use std::time::Instant;

use phalanx_native::sum_into_all;

use super::window::{Answer, Task, Window};
use crate::Failure;
use crate::bench::cpu;

/// Reduces private memory on every processor as told through a socket; started by
/// `phalanx bench allreduce`.
#[derive(clap::Args)]
pub(crate) struct Args {
    socket: PathBuf,
    ranks: usize,
    /// One thread on each.
    #[arg(value_delimiter = ',')]
    processors: Vec<usize>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let mut to_bench = UnixStream::connect(&args.socket)?;
    writeln!(
        to_bench,
        "hello 0 one-pass reduction of {} ranks",
        args.ranks
    )?;
    for line in BufReader::new(to_bench.try_clone()?).lines() {
        let Task::Run(window) = line?.parse()? else {
            return Err("the roof runs windows only".into());
        };
        let nanos = measure(args, &window);
        writeln!(to_bench, "{}", Answer { wrong: 0, nanos })?;
    }
    Ok(())
}

/// Times of the slowest thread.
fn measure(args: &Args, window: &Window) -> Vec<u64> {
    let threads = args.processors.len();
    let meeting = Meeting {
        arrived: AtomicUsize::new(0),
        threads,
    };
    let share = (window.bytes / size_of::<f32>()).div_ceil(threads);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (args.processors.iter())
            .map(|&processor| {
                let meeting = &meeting;
                scope.spawn(move || one_thread(processor, meeting, args.ranks, share, window))
            })
            .collect();
        let times = threads
            .into_iter()
            .map(|t| t.join().expect("a thread of the roof panicked"));
        let slowest =
            |a: Vec<u64>, b: Vec<u64>| a.into_iter().zip(b).map(|(a, b)| a.max(b)).collect();
        times.reduce(slowest).unwrap_or_default()
    })
}

/// Elements of a page, where a group's `allocate` begins large buffers.
const PAGE: usize = 4096 / size_of::<f32>();

fn one_thread(
    processor: usize,
    meeting: &Meeting,
    ranks: usize,
    share: usize,
    window: &Window,
) -> Vec<u64> {
    // Where pinning is not allowed, the scheduler's choice is as good.
    let _ = cpu::pin(processor);
    let mut room = vec![vec![0f32; share + PAGE]; ranks];
    let mut buffers = Vec::with_capacity(ranks);
    for buffer in &mut room {
        let start = buffer.as_ptr().align_offset(PAGE * size_of::<f32>());
        buffers.push(&mut buffer[start..][..share]);
    }
    let mut nanos = Vec::new();
    // Its times of small sizes are of no use, so it knows no batches.
    for i in 0..window.warmup + window.iters {
        buffers.iter_mut().for_each(|buffer| buffer.fill(1.0));
        meeting.wait();
        let start = Instant::now();
        sum_into_all(&mut buffers);
        if i >= window.warmup {
            nanos.push(start.elapsed().as_nanos() as u64);
        }
        assert!(
            buffers
                .iter()
                .all(|buffer| buffer[share - 1] == ranks as f32)
        );
    }
    nanos
}

/// Where threads begin together; they spin, because a wake-up takes longer than a small window.
struct Meeting {
    arrived: AtomicUsize,
    threads: usize,
}

impl Meeting {
    fn wait(&self) {
        let ticket = self.arrived.fetch_add(1, AcqRel);
        let everybody = (ticket / self.threads + 1) * self.threads;
        let mut spins = 0u32;
        while self.arrived.load(Acquire) < everybody {
            std::hint::spin_loop();
            spins += 1;
            if spins > 10_000 {
                std::thread::yield_now();
            }
        }
    }
}
