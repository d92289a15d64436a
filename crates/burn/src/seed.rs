//! Random numbers, rank by rank.

use burn::tensor::Device;
use phalanx_pg::ProcessGroup;

/// Seeds a device so that ranks draw different random numbers, the same ones in each run.
///
/// Which seeds should be the same on all ranks, and which should not:
///
/// * *Parameters*: it does not matter. [`Ddp::new`](crate::Ddp::new) gives all ranks rank 0's.
/// * *Dropout, noise, augmentation*: different, or all ranks drop the same units, which is what this
///   is for. burn has one generator per device and process, so seed it before training.
/// * *The order of data*: the same, for ranks divide one order among themselves:
///   [`ShardedDataset::shuffle`](crate::ShardedDataset::shuffle).
pub fn seed_rank(device: &Device, seed: u64, group: &dyn ProcessGroup) {
    // Odd, so no two ranks meet; far apart, so neighbouring seeds do not meet either.
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    device.seed(seed.wrapping_add(STEP.wrapping_mul(group.rank() as u64)));
}
