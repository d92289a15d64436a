//! Tensors as bytes, in and out.

use candle_core::{CpuStorage, InplaceOp1, Layout, Storage, Tensor};
use phalanx_ddp::{Error, Result};
use phalanx_pg::DType;

/// An error of candle's, as the front end's.
pub(crate) fn failed(err: candle_core::Error) -> Error {
    Error::frontend(err.to_string())
}

/// The type of elements, as process groups call it.
pub(crate) fn dtype_of(dtype: candle_core::DType) -> Result<DType> {
    Ok(match dtype {
        candle_core::DType::F64 => DType::F64,
        candle_core::DType::F32 => DType::F32,
        candle_core::DType::F16 => DType::F16,
        candle_core::DType::BF16 => DType::BF16,
        candle_core::DType::I64 => DType::I64,
        candle_core::DType::U8 => DType::U8,
        other => {
            return Err(Error::frontend(format!(
                "tensors of {other:?} cannot be sent to other ranks"
            )));
        }
    })
}

/// Calls `f` with the elements' bytes, without a copy if they stand in a row.
pub(crate) fn with_bytes<T>(tensor: &Tensor, f: impl FnOnce(&[u8]) -> T) -> candle_core::Result<T> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        candle_core::bail!("a tensor outside host memory: put the model on Device::Cpu");
    };
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle_core::bail!("a contiguous tensor that is not");
    };
    Ok(match storage {
        CpuStorage::F32(values) => f(bytemuck::cast_slice(&values[start..end])),
        CpuStorage::F64(values) => f(bytemuck::cast_slice(&values[start..end])),
        CpuStorage::F16(values) => f(bytemuck::cast_slice(&values[start..end])),
        CpuStorage::BF16(values) => f(bytemuck::cast_slice(&values[start..end])),
        CpuStorage::I64(values) => f(bytemuck::cast_slice(&values[start..end])),
        CpuStorage::U8(values) => f(&values[start..end]),
        _ => candle_core::bail!("a tensor of another type than before"),
    })
}

/// Copies a tensor's elements out.
pub(crate) fn read(tensor: &Tensor, out: &mut [u8]) -> Result<()> {
    with_bytes(tensor, |bytes| out.copy_from_slice(bytes)).map_err(failed)
}

/// Copies a tensor's elements in; whoever shares its memory sees it.
pub(crate) fn write(tensor: &Tensor, data: &[u8]) -> Result<()> {
    tensor.inplace_op1(&Overwrite(data)).map_err(failed)
}

struct Overwrite<'a>(&'a [u8]);

impl InplaceOp1 for Overwrite<'_> {
    fn name(&self) -> &'static str {
        "ddp-overwrite"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("a parameter that is not contiguous");
        };
        let bytes: &mut [u8] = match storage {
            CpuStorage::F32(values) => bytemuck::cast_slice_mut(&mut values[start..end]),
            CpuStorage::F64(values) => bytemuck::cast_slice_mut(&mut values[start..end]),
            CpuStorage::F16(values) => bytemuck::cast_slice_mut(&mut values[start..end]),
            CpuStorage::BF16(values) => bytemuck::cast_slice_mut(&mut values[start..end]),
            CpuStorage::I64(values) => bytemuck::cast_slice_mut(&mut values[start..end]),
            CpuStorage::U8(values) => &mut values[start..end],
            _ => candle_core::bail!("a tensor of another type than before"),
        };
        bytes.copy_from_slice(self.0);
        Ok(())
    }
}
