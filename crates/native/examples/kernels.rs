//! Prints how fast the reduction and copy loops are on one core, in GB/s of reads and writes:
//! `cargo run -p phalanx-native --example kernels`.

use std::time::Instant;

use phalanx_pg::{DType, ReduceOp};

#[expect(dead_code, reason = "the backend uses more of it")]
#[path = "../src/kernels/mod.rs"]
mod kernels;

use kernels::{Dests, Kernels, Source};

const SIZES: [usize; 4] = [64 << 10, 1 << 20, 16 << 20, 64 << 20];

fn main() {
    println!(
        "{:<34} {}",
        "",
        SIZES.map(|size| format!("{:>8} KiB", size >> 10)).join("")
    );
    for kernels in Kernels::available() {
        for (dtype, op) in [
            (DType::F32, ReduceOp::Sum),
            (DType::F32, ReduceOp::Max),
            (DType::F64, ReduceOp::Sum),
            (DType::I32, ReduceOp::Sum),
            (DType::I8, ReduceOp::Sum),
            (DType::BF16, ReduceOp::Sum),
            (DType::BF16, ReduceOp::Max),
            (DType::F16, ReduceOp::Sum),
            (DType::Complex64, ReduceOp::Product),
        ] {
            for ranks in [2, 4, 8] {
                row(
                    &format!("{kernels:?} {dtype} {op} {ranks}->{ranks}"),
                    |bytes| in_place(kernels, op, dtype, ranks, bytes),
                );
            }
        }
        row(&format!("{kernels:?} copy"), |bytes| copied(kernels, bytes));
    }
}

fn row(name: &str, gb_per_s: impl Fn(usize) -> f64) {
    let figures = SIZES.map(|bytes| format!("{:>12.1}", gb_per_s(bytes)));
    println!("{name:<34} {}", figures.join(""));
}

fn in_place(kernels: Kernels, op: ReduceOp, dtype: DType, ranks: usize, bytes: usize) -> f64 {
    let mut memory: Vec<_> = (0..ranks).map(|_| vec![0u64; bytes / 8]).collect();
    let source = |memory: &mut Vec<u64>| Source {
        ptr: memory.as_mut_ptr().cast(),
        factor: 1.0,
        far: false,
    };
    let sources: Vec<_> = memory.iter_mut().map(source).collect();
    let len = bytes / dtype.size();
    let seconds = shortest(bytes * ranks, || {
        // SAFETY: the memory is ours, of that length, and aligned for every type.
        unsafe { kernels::reduce(kernels, op, dtype, &sources, Dests::Sources, len, ranks) }
    });
    (2 * ranks * bytes) as f64 / seconds / 1e9
}

fn copied(kernels: Kernels, bytes: usize) -> f64 {
    let (from, mut to) = (vec![1u8; bytes], vec![0u8; bytes]);
    let seconds = shortest(bytes, || {
        // SAFETY: both are ours and of that length.
        unsafe { kernels::copy(kernels, from.as_ptr(), to.as_mut_ptr(), bytes) }
    });
    (2 * bytes) as f64 / seconds / 1e9
}

/// Seconds of the fastest of several runs.
fn shortest(bytes: usize, mut run: impl FnMut()) -> f64 {
    let runs = ((256 << 20) / bytes).clamp(5, 500);
    (0..runs)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min)
}
