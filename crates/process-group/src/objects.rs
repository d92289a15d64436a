//! Collectives on values that serde can write down.

use std::any::type_name;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, ErrorKind, Result};
use crate::ext::buffer;
use crate::fingerprint::fnv1a;
use crate::{Buffer, Call, CallOptions, DType, ProcessGroup, ProcessGroupExt};

/// Largest serialised value; a length above it is not believed.
const MAX_OBJECT_LEN: usize = 1 << 30;

pub(crate) fn allgather<G, T>(group: &G, value: &T) -> Result<Vec<T>>
where
    G: ProcessGroup + ?Sized,
    T: Serialize + DeserializeOwned,
{
    let (all, lens, max) = exchange(group, &encode(value)?)?;
    let parts = all.chunks(max.max(1)).zip(lens);
    parts
        .enumerate()
        .map(|(rank, (part, len))| decode(&part[..len], rank))
        .collect()
}

pub(crate) fn gather<G, T>(group: &G, value: &T, root: usize) -> Result<Option<Vec<T>>>
where
    G: ProcessGroup + ?Sized,
    T: Serialize + DeserializeOwned,
{
    if root >= group.size() {
        let what = format!("rank {root} is not in a group of {}", group.size());
        return Err(Error::invalid(what));
    }
    let bytes = encode(value)?;
    let lens = lengths(group, bytes.len())?;
    let max = lens.iter().copied().max().unwrap_or(0);
    let output = (group.rank() == root).then(|| Buffer::zeroed(DType::U8, max * group.size()));
    let call = Call::Gather {
        input: padded(&bytes, max).freeze(),
        output,
        root,
    };
    let done = group.call(call, &CallOptions::blocking())?.wait()?;
    let Some(all) = done.buffer else {
        return Ok(None);
    };
    let parts = all.as_bytes()?.chunks(max.max(1)).zip(lens);
    parts
        .enumerate()
        .map(|(rank, (part, len))| decode(&part[..len], rank))
        .collect::<Result<_>>()
        .map(Some)
}

pub(crate) fn broadcast<G, T>(group: &G, value: Option<&T>, root: usize) -> Result<T>
where
    G: ProcessGroup + ?Sized,
    T: Serialize + DeserializeOwned,
{
    let bytes = match (value, group.rank() == root) {
        (Some(value), true) => encode(value)?,
        (None, false) => Vec::new(),
        _ => {
            return Err(Error::invalid(
                "exactly the root gives the object to broadcast",
            ));
        }
    };
    let mut len = [bytes.len() as i64];
    group.broadcast_in_place(&mut len, root)?;
    let mut data = padded(&bytes, believable(len[0])?);
    data = group
        .with(CallOptions::blocking())
        .broadcast(data, root)?
        .wait()?;
    decode(data.as_bytes()?, root)
}

pub(crate) fn scatter<G, T>(group: &G, values: Option<&[T]>, root: usize) -> Result<T>
where
    G: ProcessGroup + ?Sized,
    T: Serialize + DeserializeOwned,
{
    let size = group.size();
    let encoded = match (values, group.rank() == root) {
        (Some(values), true) if values.len() == size => {
            Some(values.iter().map(encode).collect::<Result<Vec<_>>>()?)
        }
        (None, false) => None,
        _ => {
            let rule = format!("exactly the root gives {size} objects to scatter");
            return Err(Error::invalid(rule));
        }
    };
    let mut lens = vec![0i64; size];
    if let Some(encoded) = &encoded {
        lens = encoded.iter().map(|bytes| bytes.len() as i64).collect();
    }
    group.broadcast_in_place(&mut lens, root)?;
    let lens = lens
        .into_iter()
        .map(believable)
        .collect::<Result<Vec<_>>>()?;
    let max = lens.iter().copied().max().unwrap_or(0);
    let input = encoded.map(|encoded| {
        let mut all = Buffer::zeroed(DType::U8, max * size);
        let room = all.as_bytes_mut().expect("host memory");
        for (part, bytes) in room.chunks_mut(max.max(1)).zip(&encoded) {
            part[..bytes.len()].copy_from_slice(bytes);
        }
        all.freeze()
    });
    let call = Call::Scatter {
        input,
        output: Buffer::zeroed(DType::U8, max),
        root,
    };
    let mine = buffer(group.call(call, &CallOptions::blocking())?.wait()?)?;
    decode(&mine.as_bytes()?[..lens[group.rank()]], root)
}

/// All ranks' bytes, padded to the longest; their lengths; the longest.
fn exchange<G: ProcessGroup + ?Sized>(
    group: &G,
    bytes: &[u8],
) -> Result<(Vec<u8>, Vec<usize>, usize)> {
    let lens = lengths(group, bytes.len())?;
    let max = lens.iter().copied().max().unwrap_or(0);
    let output = Buffer::zeroed(DType::U8, max * group.size());
    let call = Call::AllGather {
        input: padded(bytes, max).freeze(),
        output,
    };
    let all = buffer(group.call(call, &CallOptions::blocking())?.wait()?)?;
    Ok((all.to_vec()?, lens, max))
}

fn lengths<G: ProcessGroup + ?Sized>(group: &G, len: usize) -> Result<Vec<usize>> {
    group
        .allgather_slice(&[len as i64])?
        .into_iter()
        .map(believable)
        .collect()
}

fn believable(len: i64) -> Result<usize> {
    usize::try_from(len)
        .ok()
        .filter(|&len| len <= MAX_OBJECT_LEN)
        .ok_or_else(|| {
            let what = format!("an object of {len} bytes is over the limit of {MAX_OBJECT_LEN}");
            Error::new(ErrorKind::Invalid, what)
        })
}

fn padded(bytes: &[u8], len: usize) -> Buffer {
    let mut padded = Buffer::zeroed(DType::U8, len);
    padded.as_bytes_mut().expect("host memory")[..bytes.len()].copy_from_slice(bytes);
    padded
}

/// The type's fingerprint and the value.
fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    let bytes = postcard::to_extend(value, type_print::<T>().to_vec())
        .map_err(|err| Error::invalid(format!("the object cannot be serialised: {err}")))?;
    believable(bytes.len() as i64)?;
    Ok(bytes)
}

/// What [`encode`] gave on rank `from`.
fn decode<T: DeserializeOwned>(bytes: &[u8], from: usize) -> Result<T> {
    let differs = |what: String| Error::new(ErrorKind::Mismatch, what).from_peer(from);
    let own = type_name::<T>();
    match bytes.split_first_chunk() {
        Some((print, value)) if *print == type_print::<T>() => {
            postcard::from_bytes(value).map_err(|err| {
                differs(format!(
                    "the {own} of rank {from} cannot be read, do all ranks run the same program? \
                     ({err})"
                ))
            })
        }
        _ => Err(differs(format!(
            "rank {from} gave an object of another type, this rank's is {own}"
        ))),
    }
}

/// Tells types apart that postcard's bytes do not: they carry no names.
///
/// The name is not the same for every compiler; the ranks of a job run one program.
fn type_print<T>() -> [u8; 8] {
    fnv1a(type_name::<T>().bytes()).to_le_bytes()
}
