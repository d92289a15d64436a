//! Answers, for the side that receives them.

use super::cursor::{Cursor, Stop};
use super::wire::{AUTH_LEN, MAX_REPLY_KEYS, MAX_REPLY_LEN, WireError};

/// The form of the answer that a client expects; it follows from its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// One byte: `CHECK`, `WAIT`, `BARRIER`, `CANCEL_WAIT`.
    Status,
    /// Four bytes: `PING`.
    U32,
    /// Eight bytes: `ADD`, `DELETE_KEY`, `GETNUMKEYS`, `QUEUE_LEN`.
    I64,
    /// A given number of byte strings: `GET`, `COMPARE_SET`, `MULTI_GET`.
    Values(usize),
    /// A count, then one byte string if the count is above zero: `QUEUE_POP`.
    Pop,
    /// A count, then as many byte strings: `LIST_KEYS`.
    Keys,
    /// 32 bytes of the token handshake.
    Auth,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "see Shape")]
pub enum Reply {
    Status(u8),
    U32(u32),
    I64(i64),
    Values(Vec<Vec<u8>>),
    Pop(Option<Vec<u8>>),
    Keys(Vec<Vec<u8>>),
    Auth([u8; AUTH_LEN]),
}

/// Reads one answer from bytes that arrive in pieces.
#[derive(Debug)]
pub struct ReplyDecoder {
    shape: Shape,
    /// Byte strings still to come; unknown before the count has been read.
    left: Option<usize>,
    values: Vec<Vec<u8>>,
    /// What the values occupy, so that endless ones are refused.
    held: usize,
}

impl ReplyDecoder {
    /// A decoder for one answer of the given form.
    pub fn new(shape: Shape) -> Self {
        let left = match shape {
            Shape::Values(count) => Some(count),
            _ => None,
        };
        Self {
            shape,
            left,
            values: Vec::new(),
            held: 0,
        }
    }

    /// Takes what it can from the start of `input`: how many bytes, and the answer once whole.
    ///
    /// The caller drops those bytes and calls again with more while there is no answer.
    pub fn feed(&mut self, input: &[u8]) -> Result<(usize, Option<Reply>), WireError> {
        let mut cursor = Cursor { input, at: 0 };
        let mut taken = 0;
        loop {
            match self.step(&mut cursor) {
                Ok(Some(reply)) => return Ok((cursor.at, Some(reply))),
                Ok(None) => taken = cursor.at,
                Err(Stop::Short) => return Ok((taken, None)),
                Err(Stop::Bad(err)) => return Err(err),
            }
        }
    }

    /// Reads a number, a count or one byte string; `None` if the answer goes on.
    fn step(&mut self, cursor: &mut Cursor) -> Result<Option<Reply>, Stop> {
        match self.shape {
            Shape::Status => return Ok(Some(Reply::Status(cursor.u8()?))),
            Shape::U32 => return Ok(Some(Reply::U32(cursor.u32()?))),
            Shape::I64 => return Ok(Some(Reply::I64(cursor.i64()?))),
            Shape::Auth => return Ok(Some(Reply::Auth(*cursor.array()?))),
            Shape::Values(_) | Shape::Pop | Shape::Keys => {}
        }
        let Some(left) = self.left else {
            let count = cursor.i64()?;
            let count = usize::try_from(count)
                .map_err(|_| WireError::BadReply(format!("negative count {count}")))?;
            self.left = Some(match self.shape {
                Shape::Pop => count.min(1),
                _ if count > MAX_REPLY_KEYS => {
                    return Err(Stop::Bad(WireError::TooLong {
                        what: "number of keys",
                        got: count as u64,
                        limit: MAX_REPLY_KEYS,
                    }));
                }
                _ => count,
            });
            return Ok(None);
        };
        if left > 0 {
            let value = cursor.bytes("length of the answer", MAX_REPLY_LEN - self.held)?;
            self.held = (self.held + value.len() + size_of::<Vec<u8>>()).min(MAX_REPLY_LEN);
            self.values.push(value.to_vec());
            self.left = Some(left - 1);
            return Ok(None);
        }
        let values = std::mem::take(&mut self.values);
        Ok(Some(match self.shape {
            Shape::Keys => Reply::Keys(values),
            Shape::Pop => Reply::Pop(values.into_iter().next()),
            _ => Reply::Values(values),
        }))
    }
}
