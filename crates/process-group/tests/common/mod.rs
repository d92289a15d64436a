//! Ranks as threads, under a watchdog.
#![allow(dead_code, reason = "each test file uses a part")]

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use phalanx_pg::{Buffer, DType, ProcessGroup, ProcessGroupExt, ReduceOp};
use phalanx_reference::ReferenceGroup;

pub(crate) type Group = Arc<dyn ProcessGroup>;

/// Longer than anything here takes, shorter than anybody's patience.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs `f` on every rank of a new group, in a thread each; the results by rank.
pub(crate) fn ranks<T: Send + 'static>(
    size: usize,
    f: impl Fn(usize, Group) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let (sender, receiver) = mpsc::channel();
    for (rank, group) in ReferenceGroup::threads(size).into_iter().enumerate() {
        let (f, sender) = (f.clone(), sender.clone());
        thread::Builder::new()
            .name(format!("rank {rank}"))
            .spawn(move || {
                let result = f(rank, group);
                // Nobody listens when another rank has failed the test.
                let _ = sender.send((rank, result));
            })
            .unwrap();
    }
    drop(sender);
    let mut results: Vec<(usize, T)> = (0..size)
        .map(|_| {
            let next = receiver.recv_timeout(LIMIT);
            next.expect("a rank panicked, see its message, or hangs")
        })
        .collect();
    results.sort_by_key(|&(rank, _)| rank);
    results.into_iter().map(|(_, result)| result).collect()
}

pub(crate) fn floats(len: usize) -> Buffer {
    Buffer::zeroed(DType::F32, len)
}

/// Whether the group still works: everybody's sum of ones is the size.
pub(crate) fn assert_usable(group: &dyn ProcessGroup) {
    let ones = Buffer::from_vec(vec![1i64; 3]);
    let sum = group.allreduce(ones, ReduceOp::Sum).unwrap();
    let sum = sum.wait().unwrap();
    assert_eq!(sum.as_slice::<i64>().unwrap(), [group.size() as i64; 3]);
}
