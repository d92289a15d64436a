//! Where each gradient is in which bucket.

use phalanx_pg::{Capabilities, DType, Device, ReduceOp, Stores};

use crate::params::{ParamSpec, Slot};

/// Gradients of at least this many bytes go into the buckets and out of them past the cache. A cache
/// is shared by the ranks of a host, and each has its gradients, buckets and model to go through
/// before it comes back to where it began.
const PAST_CACHE_BYTES: usize = 32 << 20;

/// Gradients of at least this many bytes are reduced where they are, if the group is good at that:
/// copying them in and out takes longer than an operation of their own.
const ALONE_BYTES: usize = 128 << 10;

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
    /// Elements of each piece of its memory. First what gradients share, if any do; then one piece
    /// for each gradient that is alone.
    pub(crate) pieces: Vec<usize>,
    /// Whether gradients are multiplied by the reduction and not on their way in: one that is
    /// alone may not be copied at all, and in device memory it would take a kernel.
    pub(crate) premultiplied: bool,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
    pub(crate) sparse: bool,
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Place {
    pub(crate) bucket: usize,
    pub(crate) piece: usize,
    /// Whether it has the piece to itself.
    pub(crate) alone: bool,
    /// In elements, from the start of the piece.
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

impl BucketLayout {
    fn byte_len(&self) -> usize {
        self.pieces.iter().sum::<usize>() * self.dtype.size()
    }
}

impl Layout {
    /// `alone` says which gradients are reduced where they are.
    pub(crate) fn new(
        params: &[ParamSpec],
        slots: Vec<Vec<Slot>>,
        alone: impl Fn(&ParamSpec) -> bool,
    ) -> Self {
        let mut places = vec![Place::default(); params.len()];
        let mut buckets = Vec::with_capacity(slots.len());
        for (bucket, slots) in slots.into_iter().enumerate() {
            let first = &params[slots[0]];
            let is_alone = |slot: &Slot| alone(&params[*slot]);
            let (own, shared): (Vec<Slot>, Vec<Slot>) = slots.iter().copied().partition(is_alone);
            let mut pieces = Vec::with_capacity(own.len() + 1);
            let mut offset = 0;
            for &slot in &shared {
                let len = params[slot].len();
                places[slot] = Place {
                    bucket,
                    piece: 0,
                    alone: false,
                    offset,
                    len,
                };
                offset += len;
            }
            if !shared.is_empty() && !first.sparse {
                pieces.push(offset);
            }
            for &slot in &own {
                let len = params[slot].len();
                places[slot] = Place {
                    bucket,
                    piece: pieces.len(),
                    alone: true,
                    offset: 0,
                    len,
                };
                pieces.push(len);
            }
            buckets.push(BucketLayout {
                slots,
                pieces,
                premultiplied: !own.is_empty() || first.device != Device::Cpu,
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

/// Whether a gradient is reduced where it is, in a group that can do this. All ranks come to the
/// same. The bits are those of the other way: a product of 16-bit floats would not be rounded.
pub(crate) fn is_alone(param: &ParamSpec, group: &Capabilities) -> bool {
    let exact = matches!(param.dtype, DType::F32 | DType::F64);
    let dense = !param.sparse && param.device == Device::Cpu;
    let can = group.scattered && group.reduces(param.dtype, ReduceOp::PremulSum(1.0));
    can && exact && dense && param.byte_len() >= ALONE_BYTES
}
