//! Which examples are whose.

use crate::error::{Error, Result};
use crate::mt19937::Mt19937;

/// A permutation of `0..n`, the same as `torch.randperm(n, generator=g)` on the CPU after
/// `g.manual_seed(seed)`.
pub fn randperm(n: usize, seed: u64) -> Vec<usize> {
    // PyTorch seeds its generator with the lower half.
    let mut twister = Mt19937::new(seed as u32);
    let mut items: Vec<usize> = (0..n).collect();
    if n < WIDE {
        for i in 0..n.saturating_sub(1) {
            let step = twister.next_u32() as usize % (n - i);
            items.swap(i, i + step);
        }
    } else {
        // Each item goes to a place among those before it, and what was there takes its own.
        for i in 0..n {
            let place = (twister.next_u64() % (i as u64 + 1)) as usize;
            items.swap(i, place);
        }
    }
    items
}

/// From here on PyTorch takes 64 bits per item, and another way through the list. Compared with it by
/// hand, for it takes a minute.
const WIDE: usize = u32::MAX as usize / 20;

/// Deals a data set out to ranks, with PyTorch's numbers: the same seed gives each rank the same
/// examples in the same order as `torch.utils.data.DistributedSampler`.
///
/// All ranks get equally many. Without `drop_last` examples from the start are used twice to fill
/// up; with it those at the end are left out.
///
/// ```
/// use phalanx_ddp::DistributedSampler;
///
/// let mut sampler = DistributedSampler::new(10, 4, 1)?.shuffle(false);
/// assert_eq!(sampler.indices(), [1, 5, 9]);
/// sampler.set_epoch(1); // another order in each epoch, when shuffled
/// # Ok::<(), phalanx_ddp::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DistributedSampler {
    len: usize,
    replicas: usize,
    rank: usize,
    shuffle: bool,
    seed: u64,
    epoch: u64,
    drop_last: bool,
}

impl DistributedSampler {
    /// Rank `rank`'s share of `len` examples among `replicas` ranks, shuffled with seed 0.
    pub fn new(len: usize, replicas: usize, rank: usize) -> Result<Self> {
        if rank >= replicas {
            return Err(Error::invalid(format!(
                "rank {rank} is none of {replicas}: it must be below"
            )));
        }
        Ok(Self {
            len,
            replicas,
            rank,
            shuffle: true,
            seed: 0,
            epoch: 0,
            drop_last: false,
        })
    }

    /// Whether examples come in another order each epoch.
    #[must_use]
    pub fn shuffle(self, shuffle: bool) -> Self {
        Self { shuffle, ..self }
    }

    /// The seed, the same on all ranks.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Whether examples that do not fill a round are left out rather than others repeated.
    #[must_use]
    pub fn drop_last(self, drop_last: bool) -> Self {
        Self { drop_last, ..self }
    }

    /// Sets the epoch, on all ranks alike: without it every epoch has the same order.
    pub fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
    }

    /// How many examples each rank gets.
    pub fn num_samples(&self) -> usize {
        match self.drop_last {
            true => self.len / self.replicas,
            false => self.len.div_ceil(self.replicas),
        }
    }

    /// This rank's examples of this epoch.
    pub fn indices(&self) -> Vec<usize> {
        let all = match self.shuffle {
            true => randperm(self.len, self.seed.wrapping_add(self.epoch)),
            false => (0..self.len).collect(),
        };
        let total = self.num_samples() * self.replicas;
        let padded = all
            .iter()
            .cycle()
            .take(if all.is_empty() { 0 } else { total });
        padded
            .copied()
            .skip(self.rank)
            .step_by(self.replicas)
            .collect()
    }
}
