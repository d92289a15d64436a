//! Buffers, kept equal across ranks.

use phalanx_pg::{Buffer, ProcessGroup};

use crate::config::DdpConfig;
use crate::construct;
use crate::error::{Error, Result};
use crate::replica::{Replica, TensorSpec};

/// When a [`BufferHook`] runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum When {
    /// Before forward.
    Before,
    /// After forward.
    #[default]
    After,
}

/// Replaces the broadcast of buffers: to average running means, for example.
pub trait BufferHook: Send {
    /// Changes the buffers' values; what is in them afterwards is written to the model. Lengths and
    /// types stay as they are.
    ///
    /// If it fails, the group is aborted: other ranks may wait for what it did not do.
    fn run(&mut self, buffers: &mut [NamedBuffer], group: &dyn ProcessGroup) -> Result<()>;
}

/// A buffer's values, for a [`BufferHook`].
#[derive(Debug)]
pub struct NamedBuffer {
    /// Name, shape and type.
    pub spec: TensorSpec,
    /// The values. May be given to an operation and replaced by its result.
    pub values: Buffer,
}

/// Runs the hook on all buffers, or broadcasts `source`'s. Collective.
pub(crate) fn synchronize<M: Replica>(
    group: &dyn ProcessGroup,
    model: &mut M,
    config: &DdpConfig,
    hook: Option<&mut dyn BufferHook>,
    source: usize,
) -> Result<()> {
    let buffers = construct::buffers(model, config);
    let Some(hook) = hook else {
        return construct::broadcast(group, model, &buffers, source);
    };
    let mut named = Vec::with_capacity(buffers.len());
    for buffer in &buffers {
        let mut values = Buffer::zeroed(buffer.1.dtype, buffer.1.len());
        construct::read_into(model, &[buffer], values.as_bytes_mut()?)?;
        named.push(NamedBuffer {
            spec: buffer.1.clone(),
            values,
        });
    }
    let ran = hook.run(&mut named, group).and_then(|()| check(&named));
    if let Err(err) = ran {
        // Others may wait for what it did not do.
        group.abort(&format!(
            "the buffer hook of rank {} failed: {err}",
            group.rank()
        ));
        return Err(err);
    }
    for ((tensor, _), named) in buffers.iter().zip(named) {
        model.write(*tensor, named.values.as_bytes()?)?;
    }
    Ok(())
}

fn check(buffers: &[NamedBuffer]) -> Result<()> {
    for NamedBuffer { spec, values } in buffers {
        if (values.dtype(), values.len()) != (spec.dtype, spec.len()) {
            return Err(Error::invalid(format!(
                "the buffer hook made {} x {} of buffer {}, which is {} x {}",
                values.len(),
                values.dtype(),
                spec.name,
                spec.len(),
                spec.dtype
            )));
        }
    }
    Ok(())
}
