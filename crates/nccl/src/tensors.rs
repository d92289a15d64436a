//! candle's tensors in CUDA memory.

use std::cell::Cell;

use candle_core::cuda_backend::{CudaStorage, CudaStorageSlice as Typed};
use candle_core::{CpuStorage, InplaceOp1, Layout, Tensor};
use cudarc::driver::{CudaViewMut, DevicePtrMut, DeviceSlice};
use phalanx_pg::{Buffer, Element, Error, ProcessGroup, ProcessGroupExt, ReduceOp, Result};

use crate::slices::buffer_at;

/// Reduces a tensor over all ranks where it is, for gradients of a training loop of your own:
/// contiguous, in the memory of the group's device. Every clone of it sees the result.
///
/// The host does not wait: what candle computes with it on the same thread afterwards does. After
/// an error the tensor's values are anything, also later, until the device has let go of it.
pub fn allreduce_tensor<G: ProcessGroup + ?Sized>(
    group: &G,
    tensor: &Tensor,
    op: ReduceOp,
) -> Result<()> {
    // SAFETY: it is back before the tensor's lock is released: `wait` has made the stream, on which
    // all other uses are, wait for the operation. After an error the device alone may still use
    // the memory, which the tensor in the buffer keeps alive; any bits are values of its types.
    unsafe {
        lend(tensor, |buffer| {
            group.allreduce(buffer, op)?.wait().map(drop)
        })
    }
}

/// The memory of a contiguous tensor as a buffer, for calls other than [`allreduce_tensor`] and for
/// operations that are to run beside computation. The buffer keeps it alive.
///
/// # Safety
///
/// Until the buffer is dropped, neither this tensor nor another one on the same storage may be
/// used. Submit, wait and drop on the thread that computes: candle's default stream is the thread's
/// own.
pub unsafe fn buffer_over_tensor(tensor: &Tensor) -> Result<Buffer> {
    // SAFETY: the caller's word.
    unsafe { lend(tensor, Ok) }
}

/// Keeps the memory alive. Private, so that [`Buffer::owner`] cannot hand out a way to it.
struct Kept(#[expect(dead_code, reason = "kept to be dropped")] Tensor);

/// Runs `operation` on the tensor's memory while nobody else can get at it.
///
/// # Safety
///
/// As for [`Buffer::from_raw`], if the buffer outlives the call.
unsafe fn lend<R>(tensor: &Tensor, operation: impl FnOnce(Buffer) -> Result<R>) -> Result<R> {
    let loan = Loan {
        tensor,
        operation: Cell::new(Some(operation)),
        outcome: Cell::new(None),
    };
    // candle's errors are not ours, so only its own come back this way.
    let lent = tensor.inplace_op1(&loan);
    let refused = |err: candle_core::Error| Error::invalid(err.to_string());
    lent.map_err(refused)?;
    let outcome = loan.outcome.take();
    outcome.unwrap_or_else(|| Err(Error::invalid("candle did not lend the tensor")))
}

/// An operation of candle's, which has the storage for itself while it runs.
struct Loan<'a, F, R> {
    tensor: &'a Tensor,
    operation: Cell<Option<F>>,
    outcome: Cell<Option<Result<R>>>,
}

impl<F: FnOnce(Buffer) -> Result<R>, R> InplaceOp1 for Loan<'_, F, R> {
    fn name(&self) -> &'static str {
        "phalanx-nccl"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        let outcome = Err(Error::unsupported("the tensor is not in CUDA memory"));
        self.outcome.set(Some(outcome));
        Ok(())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        self.outcome.set(Some(self.run(storage, layout)));
        Ok(())
    }
}

impl<F: FnOnce(Buffer) -> Result<R>, R> Loan<'_, F, R> {
    fn run(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<R> {
        let range = layout.contiguous_offsets().map(|(start, end)| start..end);
        let range = range.ok_or_else(|| {
            Error::invalid("the tensor is not contiguous; make it so with `contiguous`")
        })?;
        match &mut storage.slice {
            Typed::U8(slice) => self.on(slice.slice_mut(range)),
            Typed::I16(slice) => self.on(slice.slice_mut(range)),
            Typed::I32(slice) => self.on(slice.slice_mut(range)),
            Typed::I64(slice) => self.on(slice.slice_mut(range)),
            Typed::F16(slice) => self.on(slice.slice_mut(range)),
            Typed::BF16(slice) => self.on(slice.slice_mut(range)),
            Typed::F32(slice) => self.on(slice.slice_mut(range)),
            Typed::F64(slice) => self.on(slice.slice_mut(range)),
            _ => {
                let dtype = self.tensor.dtype().as_str();
                Err(Error::unsupported(format!(
                    "there are no buffers of {dtype}"
                )))
            }
        }
    }

    fn on<T: Element>(&self, mut view: CudaViewMut<'_, T>) -> Result<R> {
        let operation = self.operation.take();
        let operation = operation.ok_or_else(|| Error::invalid("a loan is made once"))?;
        let (stream, len) = (view.stream().clone(), view.len());
        // Makes the stream wait for other streams that cudarc knows of, and those later for this.
        let (address, _written) = view.device_ptr_mut(&stream);
        let keep = Box::new(Kept(self.tensor.clone()));
        // SAFETY: initialised memory of the view, which the storage's lock keeps others from, alive
        // for as long as the tensor; what comes after the lock is the word of who called `lend`.
        operation(unsafe { buffer_at::<T>(address, len, &stream, keep) })
    }
}
