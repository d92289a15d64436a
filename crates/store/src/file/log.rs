//! The log that a [`FileStore`](crate::FileStore) file is, as plain data: bytes in, changes out.
//!
//! # Bytes
//!
//! The format is that of PyTorch 2.13 on a little-endian machine, found by watching the real one
//! at work. The file has no header. It is a sequence of records, each with four parts:
//!
//! | part | bytes |
//! |---|---|
//! | length of the stored key | `u32`, little endian |
//! | stored key | that many |
//! | length of the value | `u32`, little endian |
//! | value | that many |
//!
//! The state of the store is what remains after replaying the records from the first to the last.
//! The file only grows; nothing is rewritten in place. What a record means depends on how its
//! stored key begins:
//!
//! | stored key | value | meaning |
//! |---|---|---|
//! | `/` then the user's key | any | the key has this value now |
//! | `-/` then the user's key | empty | the key is gone |
//! | `refcount/` | decimal | this many handles are open |
//! | `cleanup/` | decimal | this many handles have been closed since the file was made |
//! | `queue/` then the queue's name | any | this element joins the end of the queue (ours) |
//! | `-queue/` then the queue's name | empty | the oldest element has been taken (ours) |
//! | anything else | any | ignored |
//!
//! Every record holds the whole result, never a difference: `add` stores the decimal sum, `append`
//! the whole new value, `compare_set` the new value or no record at all, a barrier is two ordinary
//! keys. PyTorch has no queues in files. It takes our `queue/` records for one key per queue that
//! is set and, by its rule for `-`, deleted; so they cost it one entry in `num_keys` while the
//! queue is in use and nothing else.
//!
//! # Locks
//!
//! `flock(2)` on the whole file: exclusive from before the first byte that an update depends on is
//! read until the last byte of its record is written, shared while records are read. PyTorch opens
//! the path anew for every operation (`O_RDWR | O_CREAT`, mode 0644, links followed) and writes a
//! record in four `write` calls, so whoever reads without the lock may see a part of one.
//!
//! # Torn records
//!
//! A writer that dies leaves the beginning of a record at the end of the file. Its update was
//! never acknowledged, so readers here take the log to end before it, and the next update of ours
//! cuts it off. PyTorch does neither: it reads at the end of the file for ever, holding the lock,
//! and an update that it appends without reading (`set`, `delete_key`) becomes part of the torn
//! record.
//!
//! # The life of the file
//!
//! A new handle adds one to `refcount/`. A handle that is closed adds one to `cleanup/`, takes one
//! from `refcount/`, and removes the file if a world size was given, at least that many handles
//! have been closed and none is open.

use crate::table::Table;

/// Longest key a file may hold: far above any sensible one, far below what text looks like when
/// its first four bytes are taken for a length.
pub(super) const MAX_KEY_LEN: usize = 64 << 10;
/// Longest value a file may hold.
pub(super) const MAX_VALUE_LEN: usize = 256 << 20;

const USER: &[u8] = b"/";
const QUEUE: &[u8] = b"queue/";
const DELETE: u8 = b'-';
const REFCOUNT: &[u8] = b"refcount/";
const CLEANUP: &[u8] = b"cleanup/";

/// Room for a prefix in front of the longest key.
const MAX_STORED_KEY_LEN: usize = MAX_KEY_LEN + 16;
const LEN_BYTES: usize = size_of::<u32>();

/// What one record says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change<'a> {
    Set { key: &'a [u8], value: &'a [u8] },
    Delete { key: &'a [u8] },
    Push { queue: &'a [u8], value: &'a [u8] },
    Pop { queue: &'a [u8] },
    Opened { handles: i64 },
    Closed { handles: i64 },
    Unknown,
}

/// Why bytes cannot be a log.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Corrupt {
    #[error("a record has a {part} of {len} bytes, allowed are {min} to {max}")]
    Length {
        part: &'static str,
        len: usize,
        min: usize,
        max: usize,
    },
    #[error("the number of handles is not a decimal 64-bit integer")]
    Count,
}

/// A change that does not fit the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooLarge {
    pub(super) what: &'static str,
    pub(super) got: usize,
    pub(super) limit: usize,
}

/// The first record of some bytes.
enum Decoded<'a> {
    Record {
        change: Change<'a>,
        len: usize,
    },
    /// The record goes on for at least `need` bytes from its beginning.
    Incomplete {
        need: usize,
    },
}

/// Appends the bytes of a change to `out`.
pub(super) fn encode(change: Change<'_>, out: &mut Vec<u8>) -> Result<(), TooLarge> {
    let record = |out: &mut Vec<u8>, prefix: &[&[u8]], key: &[u8], value: &[u8]| {
        within("key", key.len(), MAX_KEY_LEN)?;
        within("value", value.len(), MAX_VALUE_LEN)?;
        let prefix_len: usize = prefix.iter().map(|part| part.len()).sum();
        out.reserve(2 * LEN_BYTES + prefix_len + key.len() + value.len());
        out.extend_from_slice(&((prefix_len + key.len()) as u32).to_le_bytes());
        prefix.iter().for_each(|part| out.extend_from_slice(part));
        out.extend_from_slice(key);
        out.extend_from_slice(&(value.len() as u32).to_le_bytes());
        out.extend_from_slice(value);
        Ok(())
    };
    match change {
        Change::Set { key, value } => record(out, &[USER], key, value),
        Change::Delete { key } => record(out, &[&[DELETE], USER], key, b""),
        Change::Push { queue, value } => record(out, &[QUEUE], queue, value),
        Change::Pop { queue } => record(out, &[&[DELETE], QUEUE], queue, b""),
        Change::Opened { handles } => record(out, &[], REFCOUNT, handles.to_string().as_bytes()),
        Change::Closed { handles } => record(out, &[], CLEANUP, handles.to_string().as_bytes()),
        Change::Unknown => Ok(()),
    }
}

fn within(what: &'static str, got: usize, limit: usize) -> Result<(), TooLarge> {
    match got <= limit {
        true => Ok(()),
        false => Err(TooLarge { what, got, limit }),
    }
}

fn decode(bytes: &[u8]) -> Result<Decoded<'_>, Corrupt> {
    let key = match field(bytes, 0, "key", 1, MAX_STORED_KEY_LEN)? {
        Field::Whole(key) => key,
        Field::Part { need } => return Ok(Decoded::Incomplete { need }),
    };
    let value_at = LEN_BYTES + key.len();
    let value = match field(bytes, value_at, "value", 0, MAX_VALUE_LEN)? {
        Field::Whole(value) => value,
        Field::Part { need } => return Ok(Decoded::Incomplete { need }),
    };
    Ok(Decoded::Record {
        change: meaning(key, value)?,
        len: value_at + LEN_BYTES + value.len(),
    })
}

enum Field<'a> {
    Whole(&'a [u8]),
    Part { need: usize },
}

/// The length and the content at `at`, checked before anyone makes room for them.
fn field<'a>(
    bytes: &'a [u8],
    at: usize,
    part: &'static str,
    min: usize,
    max: usize,
) -> Result<Field<'a>, Corrupt> {
    let start = at + LEN_BYTES;
    let Some(len) = bytes.get(at..start).and_then(|len| len.try_into().ok()) else {
        return Ok(Field::Part { need: start });
    };
    let len = u32::from_le_bytes(len) as usize;
    if !(min..=max).contains(&len) {
        return Err(Corrupt::Length {
            part,
            len,
            min,
            max,
        });
    }
    let end = start + len;
    Ok(bytes
        .get(start..end)
        .map_or(Field::Part { need: end }, Field::Whole))
}

fn meaning<'a>(stored: &'a [u8], value: &'a [u8]) -> Result<Change<'a>, Corrupt> {
    let handles = || {
        let text = std::str::from_utf8(value).map_err(|_| Corrupt::Count)?;
        text.parse().map_err(|_| Corrupt::Count)
    };
    if let Some(key) = stored.strip_prefix(USER) {
        return Ok(Change::Set { key, value });
    }
    if let Some(queue) = stored.strip_prefix(QUEUE) {
        return Ok(Change::Push { queue, value });
    }
    if let [DELETE, gone @ ..] = stored {
        let key = gone.strip_prefix(USER).map(|key| Change::Delete { key });
        let queue = gone.strip_prefix(QUEUE).map(|queue| Change::Pop { queue });
        return Ok(key.or(queue).unwrap_or(Change::Unknown));
    }
    match stored {
        REFCOUNT => Ok(Change::Opened {
            handles: handles()?,
        }),
        CLEANUP => Ok(Change::Closed {
            handles: handles()?,
        }),
        _ => Ok(Change::Unknown),
    }
}

/// What the first [`offset`](Replica::offset) bytes of a log amount to.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Replica {
    pub(super) table: Table,
    /// Handles open now.
    pub(super) opened: i64,
    /// Handles closed since the beginning.
    pub(super) closed: i64,
    /// Where the next record begins.
    pub(super) offset: u64,
}

/// How far [`Replica::replay`] came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Progress {
    /// Bytes of whole records.
    pub(super) taken: usize,
    /// Bytes needed, from behind the last whole record, to get on.
    pub(super) need: usize,
}

impl Replica {
    /// Takes in every whole record of `bytes`, which continue the log at [`Replica::offset`].
    pub(super) fn replay(&mut self, bytes: &[u8]) -> Result<Progress, Corrupt> {
        let mut taken = 0;
        loop {
            match decode(&bytes[taken..])? {
                Decoded::Record { change, len } => {
                    self.apply(change);
                    taken += len;
                    self.offset += len as u64;
                }
                Decoded::Incomplete { need } => return Ok(Progress { taken, need }),
            }
        }
    }

    fn apply(&mut self, change: Change<'_>) {
        match change {
            Change::Set { key, value } => self.table.set(key, value),
            Change::Delete { key } => {
                self.table.delete(key);
            }
            Change::Push { queue, value } => self.table.queue_push(queue, value),
            Change::Pop { queue } => {
                self.table.queue_pop(queue);
            }
            Change::Opened { handles } => self.opened = handles,
            Change::Closed { handles } => self.closed = handles,
            Change::Unknown => {}
        }
    }
}
