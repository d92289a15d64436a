//! Data sets divided among ranks.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use burn::data::dataset::Dataset;
use parking_lot::RwLock;
use phalanx_ddp::{DistributedSampler, Result};
use phalanx_pg::ProcessGroup;

/// This rank's share of a data set, itself a data set: any of burn's, for any of its loaders.
///
/// ```
/// use burn::data::dataset::{Dataset, InMemDataset};
/// use phalanx_burn::ShardedDataset;
/// # use phalanx_pg::FakeGroup;
/// # let group = FakeGroup::new(1, 4);
///
/// let all = InMemDataset::new((0..10).collect::<Vec<i32>>());
/// let share = ShardedDataset::new(all, &group)?; // rank 1 of 4
/// assert_eq!(share.iter().map(Result::unwrap).collect::<Vec<_>>(), [1, 5, 9]);
/// # Ok::<(), phalanx_burn::Error>(())
/// ```
///
/// All ranks get equally many, so that all take equally many steps: examples from the start are used
/// twice to fill up, or some at the end left out ([`drop_last`](Self::drop_last)). For evaluation,
/// where every example must count once, there is [`uneven`](Self::uneven).
///
/// A clone is the same share: give one to a loader and keep another for
/// [`set_epoch`](Self::set_epoch).
pub struct ShardedDataset<D> {
    shared: Arc<Shared<D>>,
    /// None when every example counts once.
    sampler: Option<DistributedSampler>,
}

struct Shared<D> {
    dataset: D,
    /// This rank's examples, in order.
    indices: RwLock<Vec<usize>>,
    rank: usize,
    ranks: usize,
}

impl<D> ShardedDataset<D> {
    /// The group's rank's share, in the data set's order.
    pub fn new<I, E>(dataset: D, group: &dyn ProcessGroup) -> Result<Self>
    where
        D: Dataset<I, E>,
        E: StdError + Send + Sync + 'static,
    {
        let (rank, ranks) = (group.rank(), group.size());
        let sampler = DistributedSampler::new(dataset.len(), ranks, rank)?.shuffle(false);
        let shared = Shared {
            dataset,
            indices: RwLock::new(sampler.indices()),
            rank,
            ranks,
        };
        Ok(Self {
            shared: Arc::new(shared),
            sampler: Some(sampler),
        })
    }

    /// Another order in each epoch, the one of PyTorch's `DistributedSampler` with this seed, which
    /// is the same on all ranks.
    #[must_use]
    pub fn shuffle(self, seed: u64) -> Self {
        self.with(|sampler| sampler.shuffle(true).seed(seed))
    }

    /// Leaves examples out that do not fill a round, rather than repeating others.
    #[must_use]
    pub fn drop_last(self) -> Self {
        self.with(|sampler| sampler.drop_last(true))
    }

    fn with(self, f: impl FnOnce(DistributedSampler) -> DistributedSampler) -> Self {
        let sampler = self.sampler.map(f);
        if let Some(sampler) = &sampler {
            *self.shared.indices.write() = sampler.indices();
        }
        Self {
            shared: self.shared,
            sampler,
        }
    }

    /// Every example once, in the data set's order; some ranks may have one more than others. For
    /// evaluation, or for training with [`Join`](phalanx_ddp::Join).
    #[must_use]
    pub fn uneven<I, E>(self) -> Self
    where
        D: Dataset<I, E>,
        E: StdError + Send + Sync + 'static,
    {
        let Shared { rank, ranks, .. } = *self.shared;
        let own = (rank..self.shared.dataset.len()).step_by(ranks);
        *self.shared.indices.write() = own.collect();
        Self {
            sampler: None,
            ..self
        }
    }

    /// Deals the examples out anew if they are shuffled: to be called before each epoch, on all
    /// ranks alike. Loaders made from clones see it.
    pub fn set_epoch(&self, epoch: u64) {
        if let Some(mut sampler) = self.sampler.clone() {
            sampler.set_epoch(epoch);
            *self.shared.indices.write() = sampler.indices();
        }
    }
}

impl<D, I, E> Dataset<I, E> for ShardedDataset<D>
where
    D: Dataset<I, E>,
    E: StdError + Send + Sync + 'static,
{
    fn get(&self, index: usize) -> std::result::Result<I, E> {
        let own = self.shared.indices.read()[index];
        self.shared.dataset.get(own)
    }

    fn get_many(&self, indexes: Vec<usize>) -> std::result::Result<Vec<I>, E> {
        let own = {
            let indices = self.shared.indices.read();
            indexes.into_iter().map(|index| indices[index]).collect()
        };
        self.shared.dataset.get_many(own)
    }

    fn len(&self) -> usize {
        self.shared.indices.read().len()
    }
}

impl<D> Clone for ShardedDataset<D> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            sampler: self.sampler.clone(),
        }
    }
}

impl<D> fmt::Debug for ShardedDataset<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { rank, ranks, .. } = &*self.shared;
        write!(f, "ShardedDataset(rank {rank} of {ranks})")
    }
}
