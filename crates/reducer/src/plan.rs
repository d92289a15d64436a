//! Which parameters travel together: PyTorch's bucket assignment, as a pure function.
//!
//! Small gradients are cheap to compute and dear to send, so they are sent in buckets. The first
//! layout is made before anything is known: with nothing else said it is one bucket per element
//! type and device, because the order in which a model declares its parameters may be far from the
//! order in which backward reaches them. After the first backward the order is known and
//! the caps apply: see [`rebuilt`].

use std::collections::HashMap;

use phalanx_pg::{DType, Device};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::params::{ParamSpec, Slot};

/// Cap of the first bucket: small, so that communication starts early.
pub const FIRST_BUCKET_BYTES: usize = 1 << 20;

/// Cap of all other buckets.
pub const BUCKET_BYTES: usize = 25 << 20;

/// How large buckets become. A bucket is closed by the parameter that reaches its cap, so it may
/// be larger than that.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BucketCaps {
    first: usize,
    rest: usize,
    /// Caps bucket by bucket, the last repeating; empty if `first` and `rest` say it.
    list: Vec<usize>,
}

impl Default for BucketCaps {
    /// 1 MiB for the first bucket, 25 MiB for all others.
    fn default() -> Self {
        Self {
            first: FIRST_BUCKET_BYTES,
            rest: BUCKET_BYTES,
            list: Vec::new(),
        }
    }
}

impl BucketCaps {
    /// One cap for all buckets, the first included: as PyTorch does with any `bucket_cap_mb`.
    pub fn uniform(bytes: usize) -> Self {
        Self {
            first: bytes,
            rest: bytes,
            list: Vec::new(),
        }
    }

    /// A cap for each bucket, the last repeating. They apply to the first layout too. An empty
    /// list is the default.
    pub fn list(bytes: impl Into<Vec<usize>>) -> Self {
        let list: Vec<usize> = bytes.into();
        match list.iter().max() {
            None => Self::default(),
            Some(&most) => Self {
                first: most,
                rest: most,
                list,
            },
        }
    }

    /// The cap that most buckets have: the largest of a list.
    pub fn largest(&self) -> usize {
        self.rest
    }

    /// Limits of the layout before anything is known.
    ///
    /// `gradual` is whether some parameters may be unused, and which is not known beforehand:
    /// then there is no rebuild, and the caps have to apply from the start.
    pub fn initial_limits(&self, gradual: bool) -> Vec<usize> {
        match (self.list.is_empty(), gradual) {
            (false, _) => self.list.clone(),
            (true, false) => vec![usize::MAX],
            (true, true) if self.first < self.rest => vec![self.first, self.rest],
            (true, true) => vec![self.rest],
        }
    }

    /// Limits of the layout in ready order.
    pub fn rebuilt_limits(&self) -> Vec<usize> {
        match self.list.is_empty() {
            true => vec![self.first, self.rest],
            false => self.list.clone(),
        }
    }
}

/// Parameters that travel together.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PlannedBucket {
    /// In the order of their places in memory.
    pub slots: Vec<Slot>,
    /// The limit that it was filled to, in bytes; zero for a sparse parameter, which is alone.
    pub limit: usize,
}

/// A bucket that is not closed yet.
#[derive(Default)]
struct Open {
    slots: Vec<Slot>,
    bytes: usize,
    /// Which of the limits applies.
    step: usize,
}

/// Walks the parameters in `order`, or as they are listed, and closes a bucket when its size
/// reaches its limit.
///
/// Each element type and device fills buckets of its own and goes through the limits by itself,
/// the last repeating. A sparse parameter makes a bucket at once, before the ones still open. In
/// listed order the result is sorted by each bucket's smallest slot; in ready order what is left
/// open closes at the end in the order in which it was last added to.
pub fn assign(
    params: &[ParamSpec],
    order: Option<&[Slot]>,
    limits: &[usize],
) -> Result<Vec<PlannedBucket>> {
    let Some(&last_limit) = limits.last() else {
        return Err(Error::invalid("a bucket layout needs at least one limit"));
    };
    let listed: Vec<Slot> = (0..params.len()).collect();
    let in_order = match order {
        Some(order) => checked_order(order, params.len())?,
        None => &listed,
    };
    let mut done = Vec::new();
    let mut open: HashMap<(DType, Device), Open> = HashMap::new();
    for &slot in in_order {
        let param = &params[slot];
        if param.sparse {
            done.push(PlannedBucket {
                slots: vec![slot],
                limit: 0,
            });
            continue;
        }
        let bucket = open.entry((param.dtype, param.device)).or_default();
        bucket.slots.push(slot);
        bucket.bytes += param.byte_len();
        let limit = limits.get(bucket.step).copied().unwrap_or(last_limit);
        if bucket.bytes >= limit {
            let slots = std::mem::take(&mut bucket.slots);
            done.push(PlannedBucket { slots, limit });
            bucket.bytes = 0;
            bucket.step += 1;
        }
    }
    let mut left: Vec<Open> = open.into_values().collect();
    left.retain(|bucket| !bucket.slots.is_empty());
    let mut place = vec![0; params.len()];
    for (at, &slot) in in_order.iter().enumerate() {
        place[slot] = at;
    }
    left.sort_by_key(|bucket| bucket.slots.last().map(|&slot| place[slot]));
    done.extend(left.into_iter().map(|bucket| PlannedBucket {
        limit: limits.get(bucket.step).copied().unwrap_or(last_limit),
        slots: bucket.slots,
    }));
    if order.is_none() {
        done.sort_by_key(|bucket| bucket.slots.iter().min().copied());
    }
    Ok(done)
}

fn checked_order(order: &[Slot], len: usize) -> Result<&[Slot]> {
    let mut seen = vec![false; len];
    for &slot in order {
        match seen.get_mut(slot) {
            Some(seen) if !*seen => *seen = true,
            Some(_) => return Err(Error::invalid(format!("slot {slot} is in the order twice"))),
            None => {
                let what = format!("slot {slot} is not among {len} parameters");
                return Err(Error::invalid(what));
            }
        }
    }
    match order.len() == len {
        true => Ok(order),
        false => Err(Error::invalid(format!(
            "an order of {} slots is none of {len} parameters",
            order.len()
        ))),
    }
}

/// The layout before the first backward: buckets in reverse order of declaration, for backward
/// tends to go that way, while inside a bucket slots ascend.
pub fn initial(
    params: &[ParamSpec],
    caps: &BucketCaps,
    gradual: bool,
) -> Result<Vec<PlannedBucket>> {
    let mut buckets = assign(params, None, &caps.initial_limits(gradual))?;
    buckets.reverse();
    Ok(buckets)
}

/// The layout for gradients that become ready in this order.
pub fn rebuilt(
    params: &[ParamSpec],
    ready_order: &[Slot],
    caps: &BucketCaps,
) -> Result<Vec<PlannedBucket>> {
    assign(params, Some(ready_order), &caps.rebuilt_limits())
}
