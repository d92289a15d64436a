//! Ranks in processes of their own, and what tests of both front ends look at.
#![allow(dead_code, reason = "each test file uses a part")]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use phalanx_native::NativeGroup;
use phalanx_pg::registry::GroupInit;
use phalanx_pg::{Call, CallOptions, ProcessGroup, ProcessGroupExt, RawWork, Result};
use phalanx_reference::ReferenceGroup;
use phalanx_testkit::Rank;

/// For a whole world; the machine may be busy.
pub(crate) const DEADLINE: Duration = Duration::from_secs(240);

/// This rank's place in a group of processes.
pub(crate) fn connect(ctx: &Rank) -> Arc<dyn ProcessGroup> {
    let mut init = GroupInit::new(ctx.store(), ctx.rank(), ctx.size());
    init.timeout = Duration::from_secs(120);
    NativeGroup::connect(&init).unwrap()
}

/// A group of one, whose averages are the gradients.
pub(crate) fn alone() -> Arc<dyn ProcessGroup> {
    let [group] = <[_; 1]>::try_from(ReferenceGroup::threads(1)).unwrap();
    group
}

/// A rank's part of `rows` examples.
pub(crate) fn share(rank: usize, ranks: usize, rows: usize) -> Range<usize> {
    let each = rows / ranks;
    rank * each..(rank + 1) * each
}

/// The largest difference between two lists of the same length.
pub(crate) fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, f32::max)
}

/// Whether all ranks have these, to the bit.
pub(crate) fn same_bits(group: &dyn ProcessGroup, values: &[f32]) -> bool {
    let bits = |values: &[f32]| {
        values
            .iter()
            .map(|value| value.to_bits())
            .collect::<Vec<_>>()
    };
    let everybodys = group.allgather_slice(values).unwrap();
    let mut others = everybodys.chunks_exact(values.len());
    others.all(|other| bits(other) == bits(values))
}

/// Bytes of memory that this process has in use.
pub(crate) fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes: usize = line
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    kilobytes << 10
}

/// Notes how far backward is when a bucket is sent.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) inner: Arc<dyn ProcessGroup>,
    /// How far it is.
    pub(crate) count: Arc<AtomicUsize>,
    pub(crate) notes: Arc<Mutex<Vec<usize>>>,
}

impl ProcessGroup for Watched {
    phalanx_pg::delegate_description!(inner);

    fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        if matches!(call, Call::AllReduce { .. }) {
            self.notes.lock().push(self.count.load(Ordering::Relaxed));
        }
        self.inner.submit(call, options)
    }

    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
        self.inner.split(ranks, name)
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn shutdown(&self) -> Result<()> {
        self.inner.shutdown()
    }

    fn sequence(&self) -> u64 {
        self.inner.sequence()
    }

    fn p2p_sequence(&self) -> u64 {
        self.inner.p2p_sequence()
    }
}
