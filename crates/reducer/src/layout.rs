//! Where each gradient is in which bucket.

use phalanx_pg::{DType, Device};

use crate::params::{ParamSpec, Slot};
use crate::plan::PlannedBucket;

/// A plan with addresses. Immutable: a pass and the views it leaves behind keep theirs.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) buckets: Vec<BucketLayout>,
    /// By slot.
    pub(crate) places: Vec<Place>,
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
        Self { buckets, places }
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
