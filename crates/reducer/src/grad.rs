//! Gradients on their way in.

use std::sync::Arc;

use phalanx_pg::{Buffer, DType, Device, Element};

use crate::error::{Error, ParamName, Result};
use crate::params::{ParamSpec, Slot};

/// A gradient as a framework's hook has it; borrowed for the call only.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum GradView<'a> {
    /// All elements in row-major order, in host memory.
    Host {
        /// Type of the elements.
        dtype: DType,
        /// The elements' bytes, of any alignment.
        bytes: &'a [u8],
    },
    /// All elements in row-major order, in device memory: copied there, behind what is on the
    /// buffer's stream.
    Device(&'a Buffer),
    /// Rows of the first dimension, in host memory; all others are zero.
    Sparse {
        /// Which rows. One may occur more than once: its values add up.
        rows: &'a [i64],
        /// Type of the elements.
        dtype: DType,
        /// The rows' bytes, one after the other.
        bytes: &'a [u8],
    },
}

/// A gradient as it is handed over: lent for the call, or given away with its memory.
///
/// One that is given may be reduced where it is and come back as the average without having been
/// copied: if it is large, its group works on scattered memory
/// ([`Capabilities::scattered`](phalanx_pg::Capabilities::scattered)), and it need not be added to
/// another one of its parameter. Otherwise it is copied as one that is lent.
#[derive(Debug)]
pub enum NewGrad<'a> {
    /// Read during the call.
    Lent(GradView<'a>),
    /// All elements in row-major order, in host or device memory.
    Given(Buffer),
}

impl<'a> From<GradView<'a>> for NewGrad<'a> {
    fn from(view: GradView<'a>) -> Self {
        Self::Lent(view)
    }
}

impl From<Buffer> for NewGrad<'_> {
    fn from(buffer: Buffer) -> Self {
        Self::Given(buffer)
    }
}

impl NewGrad<'_> {
    pub(crate) fn view(&self) -> GradView<'_> {
        match self {
            Self::Lent(view) => *view,
            Self::Given(buffer) => match buffer.as_bytes() {
                Ok(bytes) => GradView::Host {
                    dtype: buffer.dtype(),
                    bytes,
                },
                Err(_) => GradView::Device(buffer),
            },
        }
    }
}

impl<'a> GradView<'a> {
    /// A dense gradient.
    pub fn dense<T: Element>(values: &'a [T]) -> Self {
        Self::Host {
            dtype: T::DTYPE,
            bytes: bytemuck::cast_slice(values),
        }
    }

    /// A sparse gradient.
    pub fn sparse<T: Element>(rows: &'a [i64], values: &'a [T]) -> Self {
        Self::Sparse {
            rows,
            dtype: T::DTYPE,
            bytes: bytemuck::cast_slice(values),
        }
    }

    /// Whether it fits the parameter.
    pub(crate) fn check(&self, slot: Slot, params: &[ParamSpec]) -> Result<()> {
        let Some(param) = params.get(slot) else {
            return Err(Error::invalid(format!(
                "slot {slot} is not among {} parameters",
                params.len()
            )));
        };
        let (dtype, len) = match *self {
            Self::Host { dtype, bytes } => (dtype, bytes.len()),
            Self::Device(buffer) => (buffer.dtype(), buffer.byte_len()),
            Self::Sparse { dtype, bytes, .. } => (dtype, bytes.len()),
        };
        let device = match self {
            Self::Device(buffer) => buffer.device(),
            _ => Device::Cpu,
        };
        if device != param.device {
            let problem = format!("is on {device}, the parameter is on {}", param.device);
            return Err(bad(slot, params, problem));
        }
        let expected = match self {
            Self::Host { .. } | Self::Device(_) => param.byte_len(),
            Self::Sparse { rows, .. } => rows.len() * param.row_len() * param.dtype.size(),
        };
        let form_fits = matches!(self, Self::Sparse { .. }) == param.sparse;
        if dtype == param.dtype && len == expected && form_fits {
            return self.check_rows(slot, params);
        }
        let problem = match (form_fits, dtype == param.dtype) {
            (false, _) if param.sparse => "is dense, but was declared to be sparse".into(),
            (false, _) => "is sparse, but was not declared to be".into(),
            (true, false) => format!("is of type {dtype}, the parameter is {}", param.dtype),
            (true, true) => format!("has {len} bytes, {expected} were expected"),
        };
        Err(bad(slot, params, problem))
    }

    fn check_rows(&self, slot: Slot, params: &[ParamSpec]) -> Result<()> {
        let Self::Sparse { rows, .. } = self else {
            return Ok(());
        };
        let height = params[slot].shape.first().copied().unwrap_or(0);
        let outside = |&&row: &&i64| usize::try_from(row).map_or(true, |row| row >= height);
        match rows.iter().find(outside) {
            None => Ok(()),
            Some(row) => Err(bad(slot, params, format!("has row {row} of {height}"))),
        }
    }
}

fn bad(slot: Slot, params: &[ParamSpec], problem: impl Into<Arc<str>>) -> Error {
    Error::BadGradient {
        param: ParamName::of(slot, params),
        problem: problem.into(),
    }
}
