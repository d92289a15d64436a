//! Ranks as threads, under a watchdog, and gradients that tell who sent them.
#![allow(dead_code, reason = "each test file uses a part")]

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use phalanx_pg::{DType, ProcessGroup};
use phalanx_reducer::{
    GradTarget, GradView, ParamSpec, Pass, Reduced, Reducer, ReducerConfig, Result, Slot, Sync,
};
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
        let body = move || {
            // Kept until all are done: a group that is dropped is a rank that has died.
            let result = f(rank, Arc::clone(&group));
            // Nobody listens when another rank has failed the test.
            let _ = sender.send((rank, group, result));
        };
        thread::Builder::new()
            .name(format!("rank {rank}"))
            .spawn(body)
            .unwrap();
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

/// Parameters `p0`, `p1`, ... of these lengths.
pub(crate) fn params(lens: &[usize]) -> Vec<ParamSpec> {
    let spec = |(i, &len): (usize, &usize)| ParamSpec::new(format!("p{i}"), [len], DType::F32);
    lens.iter().enumerate().map(spec).collect()
}

pub(crate) fn reducer(lens: &[usize], group: Group, config: ReducerConfig) -> Reducer {
    Reducer::new(params(lens), group, config).unwrap()
}

pub(crate) fn begin(reducer: &Reducer) -> Pass {
    reducer.begin(GradTarget::Model, Sync::Yes).unwrap()
}

/// A gradient that differs between ranks, slots, elements and steps.
pub(crate) fn grad(rank: usize, slot: Slot, len: usize, step: usize) -> Vec<f32> {
    let base = (rank * 31 + slot * 7 + step * 3) as f32;
    (0..len).map(|i| (base + i as f32 * 0.37).sin()).collect()
}

pub(crate) fn give(pass: &Pass, slot: Slot, values: &[f32]) -> Result<()> {
    pass.sink().grad_ready(slot, GradView::dense(values))
}

/// A pass in which every slot gets its gradient, in the given order.
pub(crate) fn step(reducer: &Reducer, rank: usize, step: usize, order: &[Slot]) -> Reduced {
    let pass = begin(reducer);
    for &slot in order {
        let len = reducer.params()[slot].len();
        give(&pass, slot, &grad(rank, slot, len, step)).unwrap();
    }
    pass.finish().unwrap()
}

/// What `step` should average to: multiplied by the reciprocal, then summed in rank order.
pub(crate) fn average(size: usize, slot: Slot, len: usize, step: usize) -> Vec<f32> {
    let factor = (1.0 / size as f64) as f32;
    let mut sum = vec![0.0; len];
    for rank in 0..size {
        let scaled = grad(rank, slot, len, step)
            .into_iter()
            .map(|value| value * factor);
        match rank {
            0 => sum = scaled.collect(),
            _ => sum
                .iter_mut()
                .zip(scaled)
                .for_each(|(sum, value)| *sum += value),
        }
    }
    sum
}

pub(crate) fn values(reduced: &Reduced, slot: Slot) -> Vec<f32> {
    let grad = reduced.dense(slot).expect("a gradient");
    grad.as_slice::<f32>().unwrap().to_vec()
}

pub(crate) fn small_caps(bytes: usize) -> ReducerConfig {
    ReducerConfig {
        caps: phalanx_reducer::BucketCaps::uniform(bytes),
        ..ReducerConfig::default()
    }
}
