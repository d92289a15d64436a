//! Gates: operations that hand gradients over during backward.
//!
//! candle runs backward in reverse order of a walk from the loss, so an identity operation before
//! a parameter fires right after the parameter's last user, with the complete gradient.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use parking_lot::Mutex;
use phalanx_ddp::GradSink;
use phalanx_reducer::GradView;

use crate::values::{dtype_of, with_bytes};

/// Where gates hand gradients in: nowhere, unless a pass is open. Clones are the same outlet.
#[derive(Debug, Clone, Default)]
pub struct Outlet(Arc<Mutex<Option<GradSink>>>);

impl Outlet {
    pub(crate) fn open(&self, sink: GradSink) {
        *self.0.lock() = Some(sink);
    }

    pub(crate) fn close(&self) {
        *self.0.lock() = None;
    }

    pub(crate) fn takes(&self, parameter: usize) -> bool {
        let sink = self.0.lock();
        sink.as_ref().is_some_and(|sink| sink.takes(parameter))
    }

    fn hand_over(&self, parameter: usize, grad: &Tensor) -> Result<()> {
        let Some(sink) = self.0.lock().clone() else {
            candle_core::bail!("backward ran outside of Ddp: use Ddp::backward");
        };
        let dtype = dtype_of(grad.dtype()).map_err(candle_core::Error::wrap)?;
        with_bytes(grad, |bytes| {
            let ready = sink.grad_ready(parameter, GradView::Host { dtype, bytes });
            ready.map_err(candle_core::Error::wrap)
        })?
    }
}

/// A parameter as its users get it in one pass: a copy, since candle's operations return new memory.
pub(crate) struct CopyGate {
    pub(crate) parameter: usize,
    pub(crate) outlet: Outlet,
}

impl CustomOp1 for CopyGate {
    fn name(&self) -> &'static str {
        "ddp-gate"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("a parameter that is not contiguous");
        };
        Ok((part(storage, start, end)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        self.outlet.hand_over(self.parameter, grad)?;
        // The average is installed when backward has ended.
        Ok(None)
    }
}

fn part(storage: &CpuStorage, start: usize, end: usize) -> Result<CpuStorage> {
    Ok(match storage {
        CpuStorage::F32(values) => CpuStorage::F32(values[start..end].to_vec()),
        CpuStorage::F64(values) => CpuStorage::F64(values[start..end].to_vec()),
        CpuStorage::F16(values) => CpuStorage::F16(values[start..end].to_vec()),
        CpuStorage::BF16(values) => CpuStorage::BF16(values[start..end].to_vec()),
        _ => candle_core::bail!("a parameter that is not of floats"),
    })
}

/// A parameter made once, as the result of an operation on a number that nobody uses: what the
/// operation's backward gets is the parameter's gradient.
pub(crate) struct SourceGate {
    pub(crate) parameter: usize,
    pub(crate) outlet: Outlet,
    /// Taken when the parameter is made.
    pub(crate) values: Mutex<Option<(CpuStorage, Shape)>>,
}

impl CustomOp1 for SourceGate {
    fn name(&self) -> &'static str {
        "ddp-parameter"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match self.values.lock().take() {
            Some(values) => Ok(values),
            None => candle_core::bail!("a parameter is made once"),
        }
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        self.outlet.hand_over(self.parameter, grad)?;
        Ok(None)
    }
}
