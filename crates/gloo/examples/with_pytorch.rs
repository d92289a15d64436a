//! One of two ranks of a gloo group, the other being PyTorch's: the Rust side of
//! `xtask/interop/mixed_gloo.py`, call for call.
//!
//! ```text
//! with_pytorch PATH RANK
//! ```
//!
//! They meet in a `FileStore` at PATH.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use half::f16;
use phalanx_gloo::GlooGroup;
use phalanx_pg::registry::GroupInit;
use phalanx_pg::{Buffer, DType, Element, ProcessGroup, ProcessGroupExt, ReduceOp};
use phalanx_store::{FileStore, Store};

const SIZE: usize = 2;
/// More than a megabyte: gloo cuts it into pieces.
const LONG: usize = 1_000_003;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, rank] = args.as_slice() else {
        return Err("usage: with_pytorch PATH RANK".into());
    };
    let rank: usize = rank.parse()?;
    let limit = Duration::from_secs(60);
    let store = Arc::new(FileStore::open_for(path, Some(SIZE), limit)?);
    let mut init = GroupInit::new(store.clone(), rank, SIZE);
    init.timeout = limit;
    let group = GlooGroup::connect_with_pytorch(&init, "0/0")?;
    // How init_process_group ends, there: rank 0 chooses where its sequence numbers begin, and
    // everybody adds one to a counter.
    if rank == 0 {
        store.set("0/SEQ_NUM_STORE_KEY", &0u64.to_le_bytes())?;
    }
    store.add("store_based_barrier_key:1", 1)?;

    let other = 1 - rank;
    for len in [1, 1000, LONG] {
        sum::<f32>(&*group, len, |value| value as f32)?;
        sum::<f64>(&*group, len, |value| value as f64)?;
        sum::<i64>(&*group, len, |value| value as i64)?;
        sum::<f16>(&*group, len, |value| f16::from_f32(value as f32))?;
    }
    let largest = group.allreduce(Buffer::from_vec(vec![rank as i32; 5]), ReduceOp::Max)?;
    assert_eq!(largest.wait()?.as_slice::<i32>()?, [1; 5]);
    for root in 0..SIZE {
        let own = Buffer::from_vec(numbers(rank, 1000));
        let got = group.broadcast(own, root)?.wait()?;
        assert_eq!(got.as_slice::<f32>()?, numbers(root, 1000));
    }
    let all = group.allgather_slice(&numbers(rank, 300))?;
    assert_eq!(all, [numbers(0, 300), numbers(1, 300)].concat());
    group.barrier()?;
    let message = Buffer::from_vec(numbers(rank, LONG)).freeze();
    let sent = group.send(message, other, 5)?;
    let room = Buffer::zeroed(DType::F32, LONG);
    let got = group.recv(room, other, 5)?.wait()?;
    assert_eq!(got.as_slice::<f32>()?, numbers(other, LONG));
    sent.wait()?;
    group.shutdown()?;
    println!("rust rank {rank} of {SIZE}: everything agrees");
    Ok(())
}

/// A sum whose every element is known.
fn sum<T: Element + PartialEq + std::fmt::Debug>(
    group: &dyn ProcessGroup,
    len: usize,
    number: impl Fn(usize) -> T,
) -> Result<(), Box<dyn Error>> {
    let factor = group.rank() + 1;
    let own: Vec<T> = (0..len).map(|at| number(at % 97 * factor)).collect();
    let sum = group
        .allreduce(Buffer::from_vec(own), ReduceOp::Sum)?
        .wait()?;
    let expected: Vec<T> = (0..len).map(|at| number(at % 97 * 3)).collect();
    assert_eq!(sum.as_slice::<T>()?, expected);
    Ok(())
}

fn numbers(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|at| (at % 89 + 1000 * rank) as f32).collect()
}
