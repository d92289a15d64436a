//! Sums of gradients in private memory: never in a bucket, which may be on its way.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use phalanx_pg::{Buffer, Sparse};

use crate::copy;
use crate::grad::GradView;
use crate::params::{ParamSpec, Slot};
use crate::reduced::{Grad, GradRef};

/// A sum of gradients per slot, for those that have one.
///
/// Memory is kept when the sums are cleared, since who accumulates once does so again.
#[derive(Debug)]
pub(crate) struct Accumulator {
    slots: Vec<Mutex<Entry>>,
    /// Spares a look at every slot in the usual case that there is nothing.
    any: AtomicBool,
}

#[derive(Debug, Default)]
struct Entry {
    live: bool,
    sum: Option<Sum>,
}

#[derive(Debug)]
pub(crate) enum Sum {
    Dense(Buffer),
    /// The rows of all gradients, one after the other.
    Sparse {
        rows: Vec<i64>,
        bytes: Vec<u8>,
    },
}

impl Accumulator {
    pub(crate) fn new(slots: usize) -> Self {
        Self {
            slots: (0..slots).map(|_| Mutex::default()).collect(),
            any: AtomicBool::new(false),
        }
    }

    /// Adds a gradient that has been checked against its parameter.
    pub(crate) fn add(&self, slot: Slot, param: &ParamSpec, grad: &GradView<'_>) {
        let mut entry = self.slots[slot].lock();
        let first = !std::mem::replace(&mut entry.live, true);
        let sum = entry.sum.get_or_insert_with(|| match param.sparse {
            true => Sum::Sparse {
                rows: Vec::new(),
                bytes: Vec::new(),
            },
            false => Sum::Dense(Buffer::zeroed(param.dtype, param.len())),
        });
        match (sum, grad) {
            (Sum::Dense(buffer), GradView::Host { dtype, bytes }) => {
                let sum = buffer.as_bytes_mut().expect("host memory");
                match first {
                    true => sum.copy_from_slice(bytes),
                    false => copy::add_to(*dtype, sum, bytes),
                }
            }
            (
                Sum::Sparse { rows, bytes },
                GradView::Sparse {
                    rows: new_rows,
                    bytes: new,
                    ..
                },
            ) => {
                if first {
                    rows.clear();
                    bytes.clear();
                }
                rows.extend_from_slice(new_rows);
                bytes.extend_from_slice(new);
            }
            _ => unreachable!("the gradient was checked against its parameter"),
        }
        self.any.store(true, Ordering::Release);
    }

    /// Shows the sum of a slot, if it has one.
    pub(crate) fn with<T>(&self, slot: Slot, f: impl FnOnce(Option<&Sum>) -> T) -> T {
        if !self.any.load(Ordering::Acquire) {
            return f(None);
        }
        let entry = self.slots[slot].lock();
        f(entry.sum.as_ref().filter(|_| entry.live))
    }

    pub(crate) fn has(&self, slot: Slot) -> bool {
        self.with(slot, |sum| sum.is_some())
    }

    pub(crate) fn clear(&self) {
        if self.any.swap(false, Ordering::AcqRel) {
            self.slots.iter().for_each(|slot| slot.lock().live = false);
        }
    }
}

impl Sum {
    /// A copy.
    pub(crate) fn to_grad(&self, param: &ParamSpec) -> Grad {
        match self {
            Sum::Dense(buffer) => {
                let mut copied = Buffer::zeroed(param.dtype, param.len());
                let bytes = copied.as_bytes_mut().expect("host memory");
                bytes.copy_from_slice(buffer.as_bytes().expect("host memory"));
                Grad::Dense(GradRef::whole(copied.freeze()))
            }
            Sum::Sparse { rows, bytes } => {
                let mut values = Buffer::zeroed(param.dtype, rows.len() * param.row_len());
                let to = values.as_bytes_mut().expect("host memory");
                to.copy_from_slice(bytes);
                Grad::Sparse(Arc::new(Sparse {
                    indices: rows.clone(),
                    dims: 1,
                    values,
                }))
            }
        }
    }
}
