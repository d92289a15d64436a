//! Groups of some of a group's ranks.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

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

/// The identity of the group `name` of these members (by their ranks in the world), split from the
/// group whose identity is `parent`; for backends that have to tell groups of a job apart.
///
/// The members are in it, since disjoint groups may have the same name; the length, since names
/// may look like identities.
pub fn group_identity(parent: &str, name: &str, members: &[usize]) -> String {
    let members: Vec<String> = members.iter().map(usize::to_string).collect();
    format!("{parent}/{}:{name}[{}]", name.len(), members.join(","))
}

/// The names that a group's splits have taken; for backends.
///
/// May be used from many threads.
#[derive(Debug, Default)]
pub struct Splits(Mutex<HashSet<String>>);

impl Splits {
    /// A split of a group of `size` at `place`, which is one of its ranks: if the members make
    /// sense, the group is `usable` and the name is new, `join` forms the new group, in which it is
    /// told its rank. Errors say where they happened, and after how long.
    ///
    /// `None` if this rank is not one of the members, for which the name is not taken.
    pub fn split<T>(
        &self,
        place: &Place,
        size: usize,
        (ranks, name): (&[usize], &str),
        usable: impl FnOnce() -> Result<()>,
        join: impl FnOnce(usize) -> Result<T>,
    ) -> Result<Option<T>> {
        timed("split", place, || {
            check_members(ranks, size)?;
            let Some(rank) = ranks.iter().position(|&rank| Some(rank) == place.rank) else {
                return Ok(None);
            };
            usable()?;
            if !self.0.lock().insert(name.to_owned()) {
                let what = format!("a group {name:?} has been split from this one before");
                return Err(Error::invalid(what));
            }
            join(rank).map(Some)
        })
    }
}

/// Runs `action` at `place`, which its errors say, with the time that it took. Of actions inside
/// each other it is the outer one: that is what the caller knows.
pub(crate) fn timed<T>(
    action: &'static str,
    place: &Place,
    run: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let since = Instant::now();
    run().map_err(|err| {
        err.called(action).at(Place {
            elapsed: Some(since.elapsed()),
            ..place.clone()
        })
    })
}

pub(crate) fn new_group<G: ProcessGroup + ?Sized>(
    group: &G,
    ranks: &[usize],
    name: &str,
) -> Result<Option<Arc<dyn ProcessGroup>>> {
    let place = Place::of_group(group.name(), group.rank());
    timed("new_group", &place, || {
        check_members(ranks, group.size())?;
        let mut ranks = ranks.to_vec();
        ranks.sort_unstable();
        group.split(&ranks, name)
    })
}

pub(crate) fn split_by<G: ProcessGroup + ?Sized>(
    group: &G,
    color: Option<i64>,
    key: i64,
    name: &str,
) -> Result<Option<Arc<dyn ProcessGroup>>> {
    let place = Place::of_group(group.name(), group.rank());
    timed("split_by", &place, || divide(group, color, key, name))
}

fn divide<G: ProcessGroup + ?Sized>(
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_bears_the_name_of_what_the_caller_called() {
        let place = Place::of_group("world", 0);
        let split = || timed("split", &place, || Err::<(), _>(Error::invalid("no")));
        let err = timed("new_group", &place, split).unwrap_err();
        assert_eq!(err.place().action, Some("new_group"), "{err}");
        let text = err.to_string();
        assert!(
            text.starts_with("rank 0 of group \"world\": new_group after"),
            "{text}"
        );
    }
}
