//! A bucket while it fills.

use std::time::Instant;

use phalanx_pg::{Buffer, DType, Frozen, ProcessGroup, Sparse, Stores};

use crate::accumulate::{Accumulator, Sum};
use crate::copy;
use crate::error::Result;
use crate::grad::GradView;
use crate::layout::{BucketLayout, Place};
use crate::params::{ParamSpec, Slot};

/// Memory of earlier passes, by piece: ours again once no view is left.
pub(crate) type Spare = Vec<Option<Frozen>>;

/// The memory of a bucket and how much of it is still missing.
pub(crate) struct Filling {
    /// Slots without their gradient.
    pending: usize,
    pieces: Vec<Option<Piece<Buffer>>>,
    spare: Spare,
    sparse: Option<Sparse>,
    /// When the last gradient came.
    pub(crate) ready: Option<Instant>,
}

/// A piece of a bucket's memory.
#[derive(Debug, Clone)]
pub(crate) struct Piece<M> {
    pub(crate) memory: M,
    /// It came with its gradient, and is not kept for the next pass.
    pub(crate) given: bool,
}

impl Filling {
    pub(crate) fn new(layout: &BucketLayout, spare: Spare) -> Self {
        Self {
            pending: layout.slots.len(),
            pieces: layout.pieces.iter().map(|_| None).collect(),
            spare,
            sparse: None,
            ready: None,
        }
    }

    /// Memory to write to, taken at the first gradient: by then views of the last pass are gone.
    pub(crate) fn memory(
        &mut self,
        group: &dyn ProcessGroup,
        layout: &BucketLayout,
        piece: usize,
    ) -> Result<&mut Buffer> {
        if self.pieces[piece].is_none() {
            let spare = self.spare.get_mut(piece).and_then(Option::take);
            let memory = match spare.and_then(|spare| spare.try_thaw().ok()) {
                Some(memory) => memory,
                None => group.allocate(layout.device, layout.dtype, layout.pieces[piece])?,
            };
            let given = false;
            self.pieces[piece] = Some(Piece { memory, given });
        }
        let piece = self.pieces[piece].as_mut().expect("just set");
        Ok(&mut piece.memory)
    }

    /// Takes a gradient that is alone as it is.
    pub(crate) fn put_given(&mut self, piece: usize, memory: Buffer) {
        let given = true;
        self.pieces[piece] = Some(Piece { memory, given });
    }

    pub(crate) fn put_sparse(
        &mut self,
        slot: Slot,
        param: &ParamSpec,
        grad: Option<&GradView<'_>>,
        sources: &Sources<'_>,
    ) {
        self.sparse = Some(sources.gather(slot, param, grad));
    }

    /// Counts a slot that was put in; whether it was the last.
    pub(crate) fn is_full_now(&mut self) -> bool {
        self.pending -= 1;
        if self.pending == 0 {
            self.ready = Some(Instant::now());
        }
        self.pending == 0
    }

    pub(crate) fn take(&mut self) -> Content {
        match self.sparse.take() {
            Some(sparse) => Content::Sparse(sparse),
            None => Content::Dense(self.pieces.drain(..).flatten().collect()),
        }
    }
}

/// What a full bucket holds.
pub(crate) enum Content {
    /// All pieces, in order.
    Dense(Vec<Piece<Buffer>>),
    Sparse(Sparse),
}

impl Place {
    pub(crate) fn bytes_of(self, memory: &mut Buffer, dtype: DType) -> Result<&mut [u8]> {
        let (from, len) = (self.offset * dtype.size(), self.len * dtype.size());
        Ok(&mut memory.as_bytes_mut()?[from..from + len])
    }
}

/// Where a slot's gradient comes from, besides the one at hand.
pub(crate) struct Sources<'a> {
    /// Passes without synchronisation.
    pub(crate) accumulated: &'a Accumulator,
    /// Earlier gradients of this pass.
    pub(crate) partial: Option<&'a Accumulator>,
    /// What the sum is multiplied by.
    pub(crate) factor: f64,
    /// How a bucket is written.
    pub(crate) stores: Stores,
}

impl Sources<'_> {
    /// Writes the sum of all there is, scaled, in one pass.
    pub(crate) fn fill(
        &self,
        slot: Slot,
        param: &ParamSpec,
        grad: Option<&GradView<'_>>,
        dst: &mut [u8],
    ) {
        let dtype = param.dtype;
        self.with_new(slot, grad, |new| {
            self.accumulated.with(slot, |old| {
                match (old.map(dense), new.map(|new| new.bytes)) {
                    (None, None) => dst.fill(0),
                    (Some(sum), None) | (None, Some(sum)) => {
                        copy::scale_into_bucket(self.stores, dtype, dst, sum, self.factor);
                    }
                    (Some(old), Some(new)) => copy::sum_into(dtype, dst, old, new, self.factor),
                }
            });
        });
    }

    /// The rows of all there is, scaled.
    fn gather(&self, slot: Slot, param: &ParamSpec, grad: Option<&GradView<'_>>) -> Sparse {
        let (mut rows, mut bytes) = (Vec::new(), Vec::new());
        self.accumulated.with(slot, |old| {
            if let Some(Sum::Sparse {
                rows: old,
                bytes: values,
            }) = old
            {
                rows.extend_from_slice(old);
                bytes.extend_from_slice(values);
            }
        });
        self.with_new(slot, grad, |new| {
            if let Some(new) = new {
                rows.extend_from_slice(new.rows);
                bytes.extend_from_slice(new.bytes);
            }
        });
        let mut values = Buffer::zeroed(param.dtype, rows.len() * param.row_len());
        let to = values.as_bytes_mut().expect("host memory");
        copy::scale_into(param.dtype, to, &bytes, self.factor);
        Sparse {
            indices: rows,
            dims: 1,
            values,
        }
    }

    /// Shows what this pass has brought for a slot.
    fn with_new<T>(
        &self,
        slot: Slot,
        grad: Option<&GradView<'_>>,
        f: impl FnOnce(Option<New<'_>>) -> T,
    ) -> T {
        match self.partial.filter(|partial| partial.has(slot)) {
            None => f(grad.map(New::of)),
            Some(partial) => partial.with(slot, |sum| f(sum.map(New::of_sum))),
        }
    }
}

/// Rows and bytes; a dense gradient has no rows.
struct New<'a> {
    rows: &'a [i64],
    bytes: &'a [u8],
}

impl<'a> New<'a> {
    fn of(grad: &GradView<'a>) -> Self {
        match *grad {
            GradView::Host { bytes, .. } => Self { rows: &[], bytes },
            GradView::Sparse { rows, bytes, .. } => Self { rows, bytes },
            GradView::Device(_) => unreachable!("what is added up is on the host"),
        }
    }

    fn of_sum(sum: &'a Sum) -> Self {
        match sum {
            Sum::Dense(_) => Self {
                rows: &[],
                bytes: dense(sum),
            },
            Sum::Sparse { rows, bytes } => Self { rows, bytes },
        }
    }
}

fn dense(sum: &Sum) -> &[u8] {
    match sum {
        Sum::Dense(buffer) => buffer.as_bytes().expect("host memory"),
        Sum::Sparse { bytes, .. } => bytes,
    }
}
