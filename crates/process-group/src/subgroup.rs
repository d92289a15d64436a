//! Groups of some of a group's ranks.

use std::sync::Arc;

use crate::error::{Error, Place, Result};
use crate::ext::buffer;
use crate::group::ProcessGroup;
use crate::{Buffer, Call, CallOptions, ProcessGroupExt};

/// Checks a list of members: in range, each once, at least one.
pub fn check_members(ranks: &[usize], size: usize) -> Result<()> {
    if ranks.is_empty() {
        return Err(Error::invalid("a group needs at least one rank"));
    }
    let mut seen = vec![false; size];
    for &rank in ranks {
        match seen.get_mut(rank) {
            None => {
                return Err(Error::invalid(format!(
                    "rank {rank} is not in a group of {size}"
                )));
            }
            Some(true) => return Err(Error::invalid(format!("rank {rank} is listed twice"))),
            Some(slot) => *slot = true,
        }
    }
    Ok(())
}

pub(crate) fn new_group<G: ProcessGroup + ?Sized>(
    group: &G,
    ranks: &[usize],
    name: &str,
) -> Result<Option<Arc<dyn ProcessGroup>>> {
    check_members(ranks, group.size()).map_err(|err| placed(err, group, "new_group"))?;
    let mut ranks = ranks.to_vec();
    ranks.sort_unstable();
    group.split(&ranks, name)
}

pub(crate) fn split_by<G: ProcessGroup + ?Sized>(
    group: &G,
    color: Option<i64>,
    key: i64,
    name: &str,
) -> Result<Option<Arc<dyn ProcessGroup>>> {
    let mine = [i64::from(color.is_some()), color.unwrap_or(0), key];
    let output = Buffer::zeroed(crate::DType::I64, mine.len() * group.size());
    let call = Call::AllGather {
        input: Buffer::from_slice(&mine).freeze(),
        output,
    };
    let all = buffer(group.call(call, &CallOptions::blocking())?.wait()?)?.to_vec::<i64>()?;
    let Some(color) = color else { return Ok(None) };
    let mut members: Vec<(i64, usize)> = all
        .chunks_exact(mine.len())
        .enumerate()
        .filter(|(_, entry)| entry[..2] == [1, color])
        .map(|(rank, entry)| (entry[2], rank))
        .collect();
    members.sort_unstable();
    let ranks: Vec<usize> = members.into_iter().map(|(_, rank)| rank).collect();
    group.split(&ranks, &format!("{name}:{color}"))
}

/// An error of an argument of `action`, which is no call.
pub(crate) fn placed<G: ProcessGroup + ?Sized>(
    err: Error,
    group: &G,
    action: &'static str,
) -> Error {
    err.during(action)
        .at(Place::of_group(group.name(), group.rank()))
}
