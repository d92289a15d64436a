//! Equal replicas to begin with.

use std::collections::HashSet;

use phalanx_pg::{Device, ProcessGroup, ProcessGroupExt};
use phalanx_reducer::{ParamSpec, verify};

use crate::config::DdpConfig;
use crate::error::{Error, Result};
use crate::replica::{Replica, Tensor, TensorSpec};

/// Most bytes of one broadcast.
const BROADCAST_BYTES: usize = 250 << 20;

/// The tensors of a replica that are not ignored.
pub(crate) fn state<M: Replica>(model: &M, config: &DdpConfig) -> Vec<(Tensor, TensorSpec)> {
    let parameters = model.parameters();
    let parameters = parameters.iter().map(TensorSpec::from).enumerate();
    let mut all: Vec<(Tensor, TensorSpec)> = parameters
        .map(|(i, spec)| (Tensor::Parameter(i), spec))
        .collect();
    let frozen = model.frozen().into_iter().enumerate();
    all.extend(frozen.map(|(i, spec)| (Tensor::Frozen(i), spec)));
    all.extend(buffers(model, config));
    all.retain(|(_, spec)| !config.ignore.contains(&spec.name));
    all
}

/// The buffers of a replica that are not ignored.
pub(crate) fn buffers<M: Replica>(model: &M, config: &DdpConfig) -> Vec<(Tensor, TensorSpec)> {
    let buffers = model.buffers().into_iter().enumerate();
    let named = buffers.map(|(i, spec)| (Tensor::Buffer(i), spec));
    named
        .filter(|(_, spec)| !config.ignore.contains(&spec.name))
        .collect()
}

/// Finds out whether all ranks have the same model and options. Collective.
///
/// A rank that has found something wrong by itself takes part and says so, so that the others do
/// not wait for it.
pub(crate) fn verify_ranks(
    group: &dyn ProcessGroup,
    params: &[ParamSpec],
    state: &[(Tensor, TensorSpec)],
    config: &DdpConfig,
    own_problem: Option<&Error>,
) -> Result<()> {
    let mut card = config.card();
    let problem = own_problem.map_or_else(|| "none".into(), Error::to_string);
    card.push(("problem", problem));
    let rest = state
        .iter()
        .filter(|(tensor, _)| !matches!(tensor, Tensor::Parameter(_)));
    let rest: Vec<String> = rest
        .map(|(_, spec)| format!("{} {:?} {}", spec.name, spec.shape, spec.dtype))
        .collect();
    card.push(("buffers or frozen tensors", rest.join(", ")));
    Ok(verify(group, params, &card)?)
}

/// What is wrong with a model, whatever other ranks have.
pub(crate) fn check<M: Replica>(model: &M, params: &[ParamSpec]) -> Result<()> {
    model.check()?;
    if params.is_empty() {
        return Err(Error::invalid(
            "the model has no parameter that needs a gradient; make it on a device with gradients (in \
             burn, one with `.autodiff()`), or use it without Ddp",
        ));
    }
    let buffers = model.buffers();
    let mut names = HashSet::new();
    let all = params.iter().map(|param| &param.name);
    for name in all.chain(buffers.iter().map(|buffer| &buffer.name)) {
        if !names.insert(name) {
            return Err(Error::invalid(format!(
                "two tensors have the name {name:?}"
            )));
        }
    }
    Ok(())
}

/// Gives all ranks the tensors of `source`, packed by element type. Collective.
pub(crate) fn broadcast<M: Replica>(
    group: &dyn ProcessGroup,
    model: &mut M,
    tensors: &[(Tensor, TensorSpec)],
    source: usize,
) -> Result<()> {
    for pack in packs(tensors) {
        let dtype = pack[0].1.dtype;
        let len = pack.iter().map(|(_, spec)| spec.len()).sum();
        let mut buffer = group.allocate(Device::Cpu, dtype, len)?;
        if group.rank() == source {
            read_into(model, &pack, buffer.as_bytes_mut()?)?;
        }
        let buffer = group.broadcast(buffer, source)?.wait()?;
        if group.rank() != source {
            let mut bytes = buffer.as_bytes()?;
            let data = pack.iter().map(|(tensor, spec)| {
                let (own, rest) = bytes.split_at(spec.byte_len());
                bytes = rest;
                (*tensor, own)
            });
            model.write_all(&data.collect::<Vec<_>>())?;
        }
    }
    Ok(())
}

/// Reads tensors one behind the other.
pub(crate) fn read_into<M: Replica>(
    model: &M,
    pack: &[&(Tensor, TensorSpec)],
    mut bytes: &mut [u8],
) -> Result<()> {
    let mut places = Vec::with_capacity(pack.len());
    for (tensor, spec) in pack {
        let (own, rest) = bytes.split_at_mut(spec.byte_len());
        places.push((*tensor, own));
        bytes = rest;
    }
    model.read_all(&mut places)
}

/// Tensors of one element type and at most so many bytes, in order.
fn packs(tensors: &[(Tensor, TensorSpec)]) -> Vec<Vec<&(Tensor, TensorSpec)>> {
    let mut packs: Vec<(usize, Vec<&(Tensor, TensorSpec)>)> = Vec::new();
    for tensor in tensors.iter().filter(|(_, spec)| !spec.is_empty()) {
        let bytes = tensor.1.byte_len();
        let open = packs.iter_mut().find(|(size, pack)| {
            pack[0].1.dtype == tensor.1.dtype && size + bytes <= BROADCAST_BYTES
        });
        match open {
            Some((size, pack)) => {
                *size += bytes;
                pack.push(tensor);
            }
            None => packs.push((bytes, vec![tensor])),
        }
    }
    packs.into_iter().map(|(_, pack)| pack).collect()
}
