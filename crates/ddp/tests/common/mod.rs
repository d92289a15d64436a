//! Ranks as threads, under a watchdog.
#![allow(dead_code, reason = "each test file uses a part")]

pub(crate) mod golden;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use phalanx_ddp::builtin::{Matrix, Net, Sgd, cross_entropy};
use phalanx_ddp::{Ddp, Result};
use phalanx_pg::ProcessGroup;
use phalanx_reference::ReferenceGroup;

pub(crate) type Group = Arc<dyn ProcessGroup>;

/// Longer than anything here takes, shorter than anybody's patience.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs `f` on every rank of a new group, in a thread each; the results by rank.
pub(crate) fn ranks<T: Send + 'static>(
    size: usize,
    f: impl Fn(usize, Group) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let (sender, receiver) = mpsc::channel();
    for (rank, group) in ReferenceGroup::threads(size).into_iter().enumerate() {
        let (f, sender) = (f.clone(), sender.clone());
        let body = move || {
            // Kept until all are done: a group that is dropped is a rank that has died.
            let result = f(rank, Arc::clone(&group));
            // Nobody listens when another rank has failed the test.
            let _ = sender.send((rank, group, result));
        };
        let named = thread::Builder::new().name(format!("rank {rank}"));
        named.spawn(body).unwrap();
    }
    drop(sender);
    let mut results: Vec<(usize, Group, T)> = (0..size)
        .map(|_| {
            let next = receiver.recv_timeout(LIMIT);
            next.expect("a rank panicked, see its message, or hangs")
        })
        .collect();
    results.sort_by_key(|&(rank, ..)| rank);
    results.into_iter().map(|(.., result)| result).collect()
}

pub(crate) fn mlp(seed: u64) -> Net {
    Net::new(seed)
        .linear("fc1", 4, 6)
        .relu()
        .linear("fc2", 6, 3)
}

/// Examples that anybody can make: features and a class for each index.
pub(crate) fn examples(indices: &[usize]) -> (Matrix, Vec<usize>) {
    let feature = |(i, j): (usize, usize)| ((i * 7 + j * 3 + 1) as f32 * 0.61).sin();
    let pairs = indices.iter().flat_map(|&i| (0..4).map(move |j| (i, j)));
    let x = Matrix::new(indices.len(), 4, pairs.map(feature).collect());
    (x, indices.iter().map(|i| i % 3).collect())
}

/// One step on these examples; the loss.
pub(crate) fn train(ddp: &mut Ddp<Net>, sgd: &mut Sgd, indices: &[usize]) -> Result<f32> {
    let (x, y) = examples(indices);
    let (loss, grad) = ddp.forward(|net| cross_entropy(&net.forward(&x.into()), &y))?;
    let grads = ddp.backward(|net| net.backward(&grad))?;
    ddp.update(|net| sgd.step(net, &grads));
    Ok(loss)
}

pub(crate) fn bits(net: &Net) -> Vec<u32> {
    let count = net.specs().count();
    let all = (0..count).flat_map(|i| net.values(i).iter().map(|value| value.to_bits()));
    all.collect()
}
