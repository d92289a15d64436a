//! What may be done with a bucket instead of an all-reduce.

use std::sync::Arc;

use phalanx_pg::{Buffer, Device, ProcessGroup, ProcessGroupExt, ReduceOp, Sparse};

use crate::copy;
use crate::layout::Layout;
use crate::params::{ParamSpec, Slot};

/// What a hook may fail with. A [`phalanx_pg::Error`] in it keeps its place and peer.
pub type HookResult<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Replaces the all-reduce of buckets: compression, other topologies, other averages.
///
/// Runs on a thread of the reducer's, one bucket at a time, in the order of their indices. It may
/// block, and talks on a group of its own, so that its calls cannot mix with any others. The
/// gradients it gets are *not* divided: averaging is its business. When it fails or panics, its
/// group is aborted, so that other ranks do not wait.
pub trait CommHook: Send + Sync {
    /// A name for the logging data.
    fn name(&self) -> &str;

    /// Turns this rank's sum into what the parameters get: a buffer of the bucket's type and
    /// length, the same on all ranks.
    fn run(&self, bucket: GradBucket, group: &dyn ProcessGroup) -> HookResult<Buffer>;

    /// The same for a sparse gradient; averages it unless a hook knows better.
    fn run_sparse(
        &self,
        param: &ParamSpec,
        mut grad: Sparse,
        group: &dyn ProcessGroup,
    ) -> HookResult<Sparse> {
        scale(&mut grad.values, param.dtype, 1.0 / group.size() as f64)?;
        Ok(group.allreduce_sparse(grad)?)
    }
}

/// A full bucket, as a hook gets it.
#[derive(Debug)]
pub struct GradBucket {
    pub(crate) index: usize,
    pub(crate) is_last: bool,
    pub(crate) buffer: Buffer,
    pub(crate) layout: Arc<Layout>,
    pub(crate) params: Arc<[ParamSpec]>,
}

impl GradBucket {
    /// Its place among the buckets, which is the order of reduction.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Whether it is the last one of this backward.
    pub fn is_last(&self) -> bool {
        self.is_last
    }

    /// All gradients, one after the other.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// All gradients, writable.
    pub fn buffer_mut(&mut self) -> &mut Buffer {
        &mut self.buffer
    }

    /// All gradients, to be handed to an operation.
    pub fn into_buffer(self) -> Buffer {
        self.buffer
    }

    /// The parameters in it, in order.
    pub fn parameters(&self) -> impl Iterator<Item = (Slot, &ParamSpec)> {
        let slots = self.layout.buckets[self.index].slots.iter();
        slots.map(|&slot| (slot, &self.params[slot]))
    }

    /// The gradients in it, in order: slot and bytes.
    pub fn gradients(&self) -> phalanx_pg::Result<impl Iterator<Item = (Slot, &[u8])>> {
        let bytes = self.buffer.as_bytes()?;
        let size = self.buffer.dtype().size();
        let slots = self.layout.buckets[self.index].slots.iter();
        Ok(slots.map(move |&slot| {
            let place = &self.layout.places[slot];
            (slot, &bytes[place.offset * size..][..place.len * size])
        }))
    }
}

fn scale(buffer: &mut Buffer, dtype: phalanx_pg::DType, factor: f64) -> phalanx_pg::Result<()> {
    copy::scale_in_place(dtype, buffer.as_bytes_mut()?, factor);
    Ok(())
}

/// The average by all-reduce: what happens without a hook, as a hook.
#[derive(Debug, Clone, Copy, Default)]
pub struct AllReduceHook;

impl CommHook for AllReduceHook {
    fn name(&self) -> &str {
        "allreduce"
    }

    fn run(&self, mut bucket: GradBucket, group: &dyn ProcessGroup) -> HookResult<Buffer> {
        let dtype = bucket.buffer.dtype();
        if bucket.buffer.device() != Device::Cpu {
            return Ok(group
                .allreduce(bucket.into_buffer(), ReduceOp::Avg)?
                .wait()?);
        }
        scale(bucket.buffer_mut(), dtype, 1.0 / group.size() as f64)?;
        Ok(group
            .allreduce(bucket.into_buffer(), ReduceOp::Sum)?
            .wait()?)
    }
}

/// The average in 16 bits: half the bytes on the wire for `f32` gradients.
///
/// Gradients are converted and divided in one step, summed across ranks, and converted back. What
/// does not fit into the range of `f16` becomes infinite; `bf16` has the range of `f32` and fewer
/// digits.
#[derive(Debug, Clone, Copy)]
pub enum CompressHook {
    /// IEEE half precision.
    F16,
    /// The upper half of an `f32`.
    Bf16,
}

impl CommHook for CompressHook {
    fn name(&self) -> &str {
        match self {
            Self::F16 => "fp16_compress",
            Self::Bf16 => "bf16_compress",
        }
    }

    fn run(&self, bucket: GradBucket, group: &dyn ProcessGroup) -> HookResult<Buffer> {
        let narrow = match self {
            Self::F16 => phalanx_pg::DType::F16,
            Self::Bf16 => phalanx_pg::DType::BF16,
        };
        let mut buffer = bucket.into_buffer();
        let wide = buffer.dtype();
        if wide == phalanx_pg::DType::Complex64 {
            return Err("complex gradients cannot be compressed".into());
        }
        if buffer.device() != Device::Cpu {
            return Err(
                "gradients in device memory cannot be compressed here; use a hook of your \
                        framework's"
                    .into(),
            );
        }
        let mut small = group.allocate(buffer.device(), narrow, buffer.len())?;
        let factor = 1.0 / group.size() as f64;
        copy::convert_into(
            narrow,
            small.as_bytes_mut()?,
            wide,
            buffer.as_bytes()?,
            factor,
        );
        let sum = group.allreduce(small, ReduceOp::Sum)?.wait()?;
        copy::convert_into(wide, buffer.as_bytes_mut()?, narrow, sum.as_bytes()?, 1.0);
        Ok(buffer)
    }
}
