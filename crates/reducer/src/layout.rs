//! Where each gradient is in which bucket.

use phalanx_pg::{DType, Device, Stores};

use crate::params::{ParamSpec, Slot};
use crate::plan::PlannedBucket;

/// Gradients of at least this many bytes go into the buckets and out of them past the cache. A cache
/// is shared by the ranks of a host, and each has its gradients, buckets and model to go through
/// before it comes back to where it began.
const PAST_CACHE_BYTES: usize = 32 << 20;

/// A plan with addresses. Immutable: a pass and the views it leaves behind keep theirs.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) buckets: Vec<BucketLayout>,
    /// By slot.
    pub(crate) places: Vec<Place>,
    /// How gradients are written into the buckets and out of them.
    pub(crate) stores: Stores,
}

#[derive(Debug)]
pub(crate) struct BucketLayout {
    pub(crate) slots: Vec<Slot>,
    /// In elements.
    pub(crate) len: usize,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
    pub(crate) sparse: bool,
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Place {
    pub(crate) bucket: usize,
    /// In elements, from the start of the bucket.
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

impl BucketLayout {
    fn byte_len(&self) -> usize {
        self.len * self.dtype.size()
    }
}

impl Layout {
    pub(crate) fn new(params: &[ParamSpec], plan: &[PlannedBucket]) -> Self {
        let mut places = vec![Place::default(); params.len()];
        let mut buckets = Vec::with_capacity(plan.len());
        for (bucket, planned) in plan.iter().enumerate() {
            let mut offset = 0;
            for &slot in &planned.slots {
                let len = params[slot].len();
                places[slot] = Place {
                    bucket,
                    offset,
                    len,
                };
                offset += len;
            }
            let first = &params[planned.slots[0]];
            buckets.push(BucketLayout {
                slots: planned.slots.clone(),
                len: if first.sparse { 0 } else { offset },
                dtype: first.dtype,
                device: first.device,
                sparse: first.sparse,
            });
        }
        let bytes: usize = buckets.iter().map(BucketLayout::byte_len).sum();
        Self {
            buckets,
            places,
            stores: match bytes >= PAST_CACHE_BYTES {
                true => Stores::PastCache,
                false => Stores::Ordinary,
            },
        }
    }

    /// The parameters of each bucket.
    pub(crate) fn slots(&self) -> Vec<Vec<Slot>> {
        self.buckets
            .iter()
            .map(|bucket| bucket.slots.clone())
            .collect()
    }

    /// Bytes of each bucket; a sparse one counts as much as the whole parameter.
    pub(crate) fn sizes(&self) -> Vec<usize> {
        let size = |bucket: &BucketLayout| {
            let lens = bucket.slots.iter().map(|&slot| self.places[slot].len);
            lens.sum::<usize>() * bucket.dtype.size()
        };
        self.buckets.iter().map(size).collect()
    }
}
