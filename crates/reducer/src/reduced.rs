//! Averaged gradients on their way out.

use std::fmt;
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use phalanx_pg::{DType, Element, Frozen, Sparse, Stores, copy_lines};

use crate::bucket::Piece;
use crate::layout::Layout;
use crate::params::Slot;
use crate::reducer::GradTarget;

/// What a pass leaves behind: views of the buckets, by slot, or gradients in their own memory where
/// they were averaged in it.
///
/// Views may be kept as long as one likes: the reducer writes to a bucket again only when it holds
/// the last handle on it, and takes other memory otherwise. So keeping a small view keeps a whole
/// bucket; copy what has to live long.
#[derive(Debug)]
pub struct Reduced {
    pub(crate) target: GradTarget,
    pub(crate) layout: Arc<Layout>,
    /// By bucket; empty when the pass only accumulated.
    pub(crate) buckets: Vec<Landed>,
    /// Which slots any rank has used; `None` is all.
    pub(crate) used: Option<Arc<[bool]>>,
}

/// A bucket's result.
#[derive(Debug, Clone)]
pub(crate) enum Landed {
    Dense(Vec<Piece<Frozen>>),
    Sparse(Arc<Sparse>),
    /// No rank has used its parameters.
    Skipped,
}

/// An averaged gradient.
#[derive(Debug, Clone)]
pub enum Grad {
    /// All elements.
    Dense(GradRef),
    /// Rows of the first dimension, sorted, each once.
    Sparse(Arc<Sparse>),
}

impl Reduced {
    /// Whose gradients they are.
    pub fn target(&self) -> GradTarget {
        self.target
    }

    /// Whether gradients were averaged; otherwise they were accumulated here and there is nothing
    /// to see yet.
    pub fn is_synchronized(&self) -> bool {
        !self.buckets.is_empty()
    }

    /// The average of a slot's gradient over all ranks; `None` if no rank has one, or if the pass
    /// only accumulated.
    pub fn grad(&self, slot: Slot) -> Option<Grad> {
        let place = self.layout.places.get(slot)?;
        if self.used.as_ref().is_some_and(|used| !used[slot]) {
            return None;
        }
        match self.buckets.get(place.bucket)? {
            Landed::Dense(pieces) => Some(Grad::Dense(GradRef {
                memory: pieces[place.piece].memory.clone(),
                alone: place.alone,
                offset: place.offset,
                len: place.len,
                stores: self.layout.stores,
            })),
            Landed::Sparse(sparse) => Some(Grad::Sparse(Arc::clone(sparse))),
            Landed::Skipped => None,
        }
    }

    /// A dense gradient; `None` also if it is sparse.
    pub fn dense(&self, slot: Slot) -> Option<GradRef> {
        match self.grad(slot)? {
            Grad::Dense(grad) => Some(grad),
            Grad::Sparse(_) => None,
        }
    }
}

/// One parameter's averaged gradient: a view of a bucket, or memory of its own.
#[derive(Clone)]
pub struct GradRef {
    memory: Frozen,
    alone: bool,
    /// In elements.
    offset: usize,
    len: usize,
    stores: Stores,
}

impl GradRef {
    pub(crate) fn whole(memory: Frozen) -> Self {
        let len = memory.len();
        Self {
            memory,
            alone: true,
            offset: 0,
            len,
            stores: Stores::Ordinary,
        }
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.memory.dtype()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it is in no bucket but in the memory that its gradient came in, or in a copy of that.
    /// Otherwise to keep it keeps a whole bucket, so who wants gradients that are no views copies it.
    pub fn is_alone(&self) -> bool {
        self.alone
    }

    /// The whole memory and the place in it, in elements: for front ends whose tensors can share
    /// foreign memory.
    pub fn memory(&self) -> (&Frozen, usize) {
        (&self.memory, self.offset)
    }

    /// The elements, if they are in host memory and of this type.
    pub fn as_slice<T: Element>(&self) -> phalanx_pg::Result<&[T]> {
        let all = self.memory.as_slice()?;
        Ok(&all[self.offset..self.offset + self.len])
    }

    /// Copies the elements, if they are in host memory and of this type, into memory of the front
    /// end's: past the cache where all gradients together are larger than that.
    ///
    /// # Panics
    ///
    /// If there is another number of elements.
    pub fn copy_to<T: Element>(&self, to: &mut [T]) -> phalanx_pg::Result<()> {
        copy_lines(
            self.stores,
            cast_slice_mut(to),
            cast_slice(self.as_slice::<T>()?),
        );
        Ok(())
    }

    /// The elements' bytes, if they are in host memory.
    pub fn as_bytes(&self) -> phalanx_pg::Result<&[u8]> {
        let size = self.memory.dtype().size();
        let all = self.memory.as_bytes()?;
        Ok(&all[self.offset * size..(self.offset + self.len) * size])
    }
}

impl fmt::Debug for GradRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GradRef({} x {})", self.len, self.dtype())
    }
}
