//! What ranks must have in common, and how they find out.

use phalanx_pg::{Buffer, Device, ProcessGroup, ProcessGroupExt};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::params::{ParamSpec, Slot};
use crate::plan::PlannedBucket;

/// Finds out whether all ranks have the same parameters and options. Collective.
///
/// One small all-gather of a fingerprint when all is well. Otherwise all ranks exchange what they
/// have and every one returns an error that names the first difference: since all see the same
/// fingerprints, none goes on alone. `options` are pairs of name and value.
pub fn verify(
    group: &dyn ProcessGroup,
    params: &[ParamSpec],
    options: &[(&str, String)],
) -> Result<()> {
    let own = Card {
        params: params.iter().map(comparable).collect(),
        options: options
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone()))
            .collect(),
    };
    let text = postcard::to_stdvec(&own).map_err(|err| Error::invalid(err.to_string()))?;
    let print: [u8; 32] = Sha256::digest(text).into();
    let prints = group.allgather_slice(&print)?;
    let mut others = prints.chunks_exact(print.len());
    let first = others.next().unwrap_or_default();
    if others.all(|other| other == first) {
        return Ok(());
    }
    let cards = group.allgather_object(&own)?;
    let differ = |other: &usize| cards[*other] != cards[0];
    let other = (1..cards.len()).find(differ).unwrap_or(0);
    // A rank speaks of itself if it is one of those that differ from rank 0.
    let rank = group.rank();
    let other = if differ(&rank) { rank } else { other };
    Err(Error::Differ {
        rank,
        problem: difference(&cards[0], other, &cards[other]).into(),
    })
}

/// What a rank brings along.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Card {
    params: Vec<ParamSpec>,
    options: Vec<(String, String)>,
}

fn difference(first: &Card, rank: usize, other: &Card) -> String {
    let (count, other_count) = (first.params.len(), other.params.len());
    if count != other_count {
        return format!(
            "ranks have different numbers of parameters: rank 0 has {count}, rank {rank} has \
             {other_count}; build the same model on every rank"
        );
    }
    for (slot, (a, b)) in first.params.iter().zip(&other.params).enumerate() {
        let what = [
            ("shape", format!("{:?}", a.shape), format!("{:?}", b.shape)),
            ("type", a.dtype.to_string(), b.dtype.to_string()),
            ("name", a.name.clone(), b.name.clone()),
            ("device", kind(a), kind(b)),
            (
                "sparse gradient",
                a.sparse.to_string(),
                b.sparse.to_string(),
            ),
        ];
        if let Some((what, a_value, b_value)) = what.iter().find(|(_, a, b)| a != b) {
            return format!(
                "ranks differ in the {what} of parameter {slot} ({}): rank 0 has {a_value}, rank \
                 {rank} has {b_value}; build the same model on every rank",
                a.name
            );
        }
    }
    let pairs = first.options.iter().zip(&other.options);
    match pairs.into_iter().find(|(a, b)| a != b) {
        Some((a, b)) => format!(
            "ranks differ in {}: rank 0 has {}, rank {rank} has {}; build the same model with the \
             same options on every rank",
            a.0,
            shown(&a.1),
            shown(&b.1)
        ),
        None => format!("ranks 0 and {rank} differ"),
    }
}

fn shown(value: &str) -> &str {
    if value.is_empty() { "none" } else { value }
}

/// The same on all ranks: each has a device of another number.
fn comparable(param: &ParamSpec) -> ParamSpec {
    let device = match param.device {
        Device::Cuda(_) => Device::Cuda(0),
        other => other,
    };
    ParamSpec {
        device,
        ..param.clone()
    }
}

/// Ranks may use devices of different number, not of different kind.
fn kind(param: &ParamSpec) -> String {
    let device = param.device.to_string();
    device.split(':').next().unwrap_or_default().to_owned()
}

/// Rank 0's layout, for all. Collective: one broadcast.
///
/// Ready orders differ between ranks, by chance or by what each computes; buckets must not.
pub(crate) fn adopt(
    group: &dyn ProcessGroup,
    params: &[ParamSpec],
    own: Vec<PlannedBucket>,
) -> Result<Vec<PlannedBucket>> {
    let n = params.len();
    let mut wire = vec![0i64; 1 + 3 * n];
    wire[0] = own.len() as i64;
    let slots = own.iter().flat_map(|bucket| &bucket.slots);
    wire[1..]
        .iter_mut()
        .zip(slots)
        .for_each(|(to, &slot)| *to = slot as i64);
    for (i, bucket) in own.iter().enumerate() {
        wire[1 + n + i] = bucket.slots.len() as i64;
        wire[1 + 2 * n + i] = i64::try_from(bucket.limit).unwrap_or(i64::MAX);
    }
    let wire = group.broadcast(Buffer::from_vec(wire), 0)?.wait()?;
    read_layout(wire.as_slice()?, params)
}

/// What comes from another rank is checked before it is believed.
fn read_layout(wire: &[i64], params: &[ParamSpec]) -> Result<Vec<PlannedBucket>> {
    let n = params.len();
    let bad = |what: &str| Error::invalid(format!("rank 0 sent a bucket layout {what}"));
    let number = |at: usize| usize::try_from(wire[at]).map_err(|_| bad("with negative numbers"));
    let count = number(0)?;
    if count > n {
        return Err(bad("with more buckets than parameters"));
    }
    let mut seen = vec![false; n];
    let mut next = 1;
    let mut layout = Vec::with_capacity(count);
    for bucket in 0..count {
        let len = number(1 + n + bucket)?;
        if len == 0 || len > 1 + n - next {
            return Err(bad("with buckets of impossible size"));
        }
        let slots = (next..next + len)
            .map(number)
            .collect::<Result<Vec<Slot>>>()?;
        next += len;
        for &slot in &slots {
            match seen.get_mut(slot) {
                Some(seen) if !*seen => *seen = true,
                _ => return Err(bad("that names a parameter twice, or one that is none")),
            }
        }
        let first = &params[slots[0]];
        let alike = |&slot: &Slot| {
            let param = &params[slot];
            (param.dtype, param.device) == (first.dtype, first.device) && !param.sparse
        };
        if !(slots.len() == 1 || slots.iter().all(alike)) {
            return Err(bad("that mixes types, devices or sparse parameters"));
        }
        let limit = number(1 + 2 * n + bucket)?;
        layout.push(PlannedBucket { slots, limit });
    }
    match seen.iter().all(|&seen| seen) {
        true => Ok(layout),
        false => Err(bad("that leaves parameters out")),
    }
}

#[cfg(test)]
mod tests {
    use phalanx_pg::DType;

    use super::*;

    #[test]
    fn a_layout_from_elsewhere_is_checked() {
        let params: Vec<_> = (0..3)
            .map(|i| ParamSpec::new(format!("p{i}"), [1], DType::F32))
            .collect();
        let good = [2, 2, 0, 1, 1, 2, 0, 8, 8, 0];
        let layout = read_layout(&good, &params).unwrap();
        assert_eq!(layout[0].slots, [2]);
        assert_eq!(layout[1].slots, [0, 1]);
        let with = |at: usize, value: i64| {
            let mut wire = good;
            wire[at] = value;
            read_layout(&wire, &params).unwrap_err().to_string()
        };
        assert!(with(0, 4).contains("more buckets"));
        assert!(with(0, -1).contains("negative"));
        assert!(with(0, 1).contains("leaves parameters out"));
        assert!(with(1, 0).contains("twice"));
        assert!(with(1, 3).contains("twice, or one that is none"));
        assert!(with(4, 9).contains("impossible"));
        assert!(with(4, 0).contains("impossible"));
        let mut mixed = params.clone();
        mixed[1].dtype = DType::F64;
        assert!(
            read_layout(&good, &mixed)
                .unwrap_err()
                .to_string()
                .contains("mixes")
        );
    }
}
