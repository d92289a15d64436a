//! PyTorch 2.13's TCPStore protocol as bytes in and values out: no sockets, no clock.
//!
//! Integers are little-endian, byte strings are a `u64` length and the bytes. A request is an
//! opcode and its arguments; there are no request numbers and no error answers: a server that
//! refuses something closes the connection. [`Decoder`] reads requests, [`ReplyDecoder`] reads
//! answers; both accept any fragmentation, check every length before they wait for the bytes, and
//! never hold more than one element.

use std::fmt;

/// What a client sends in `VALIDATE`, so that a server knows the protocol.
pub const MAGIC: u32 = 0x3C85_F7CE;
/// Longest key, the leading `/` included; the limit of PyTorch's libuv server.
pub const MAX_KEY_LEN: usize = 8192;
/// Longest value in one request; the limit of PyTorch's libuv server.
pub const MAX_VALUE_LEN: usize = 8 << 20;
/// Most keys in one request; the limit of PyTorch's libuv server.
pub const MAX_LIST_LEN: usize = 128 << 10;
/// Largest answer a client accepts. Values can outgrow [`MAX_VALUE_LEN`] by appending.
pub const MAX_REPLY_LEN: usize = 1 << 30;
/// Most keys in an answer that a client accepts: as many as [`MAX_REPLY_LEN`] bytes of memory hold
/// if all are empty.
pub const MAX_REPLY_KEYS: usize = MAX_REPLY_LEN / size_of::<Vec<u8>>();
/// Bytes in an authentication message: a nonce or a proof.
pub const AUTH_LEN: usize = 32;

/// Answer to `CHECK`: all keys exist. Also the answer that ends a `WAIT` or `BARRIER`.
pub const READY: u8 = 0;
/// Answer to `CHECK`: some key is missing. Also the answer to `CANCEL_WAIT`.
pub const NOT_READY: u8 = 1;

/// First byte of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names are the protocol's")]
pub enum Opcode {
    Validate = 0,
    Set = 1,
    CompareSet = 2,
    Get = 3,
    Add = 4,
    Check = 5,
    Wait = 6,
    NumKeys = 7,
    DeleteKey = 8,
    Append = 9,
    MultiGet = 10,
    MultiSet = 11,
    CancelWait = 12,
    Ping = 13,
    QueuePush = 14,
    QueuePop = 15,
    QueueLen = 16,
    ListKeys = 17,
    Barrier = 18,
    /// Ours: carries the client's nonce, then its proof that it knows the job token.
    Auth = 0xA0,
}

impl Opcode {
    fn from_byte(byte: u8) -> Option<Self> {
        use Opcode::*;
        const BY_NUMBER: [Opcode; 19] = [
            Validate, Set, CompareSet, Get, Add, Check, Wait, NumKeys, DeleteKey, Append, MultiGet,
            MultiSet, CancelWait, Ping, QueuePush, QueuePop, QueueLen, ListKeys, Barrier,
        ];
        match byte {
            0xA0 => Some(Auth),
            n => BY_NUMBER.get(usize::from(n)).copied(),
        }
    }
}

/// Why bytes are not a request or an answer. The only cure is to close the connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The first byte of a request names no operation.
    #[error("unknown opcode {0:#04x}")]
    UnknownOpcode(u8),
    /// A length or count field is over its limit.
    #[error("{what} of {got} is over the limit of {limit}")]
    TooLong {
        /// Which field.
        what: &'static str,
        /// What it said.
        got: u64,
        /// What is allowed.
        limit: usize,
    },
    /// An answer that cannot be one.
    #[error("{0}")]
    BadReply(String),
}

/// A whole request, for the side that sends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the protocol's")]
pub enum Request<'a> {
    Validate {
        magic: u32,
    },
    Set {
        key: &'a [u8],
        value: &'a [u8],
    },
    CompareSet {
        key: &'a [u8],
        expected: &'a [u8],
        desired: &'a [u8],
    },
    Get {
        key: &'a [u8],
    },
    Add {
        key: &'a [u8],
        delta: i64,
    },
    Check {
        keys: &'a [Vec<u8>],
    },
    Wait {
        keys: &'a [Vec<u8>],
    },
    NumKeys,
    DeleteKey {
        key: &'a [u8],
    },
    Append {
        key: &'a [u8],
        value: &'a [u8],
    },
    MultiGet {
        keys: &'a [Vec<u8>],
    },
    MultiSet {
        pairs: &'a [(Vec<u8>, Vec<u8>)],
    },
    CancelWait,
    Ping {
        nonce: u32,
    },
    QueuePush {
        key: &'a [u8],
        value: &'a [u8],
    },
    QueuePop {
        key: &'a [u8],
    },
    QueueLen {
        key: &'a [u8],
    },
    ListKeys,
    Barrier {
        key: &'a [u8],
        world_size: i64,
    },
    Auth {
        message: &'a [u8; AUTH_LEN],
    },
}

impl Request<'_> {
    /// The operation.
    pub fn opcode(&self) -> Opcode {
        match self {
            Self::Validate { .. } => Opcode::Validate,
            Self::Set { .. } => Opcode::Set,
            Self::CompareSet { .. } => Opcode::CompareSet,
            Self::Get { .. } => Opcode::Get,
            Self::Add { .. } => Opcode::Add,
            Self::Check { .. } => Opcode::Check,
            Self::Wait { .. } => Opcode::Wait,
            Self::NumKeys => Opcode::NumKeys,
            Self::DeleteKey { .. } => Opcode::DeleteKey,
            Self::Append { .. } => Opcode::Append,
            Self::MultiGet { .. } => Opcode::MultiGet,
            Self::MultiSet { .. } => Opcode::MultiSet,
            Self::CancelWait => Opcode::CancelWait,
            Self::Ping { .. } => Opcode::Ping,
            Self::QueuePush { .. } => Opcode::QueuePush,
            Self::QueuePop { .. } => Opcode::QueuePop,
            Self::QueueLen { .. } => Opcode::QueueLen,
            Self::ListKeys => Opcode::ListKeys,
            Self::Barrier { .. } => Opcode::Barrier,
            Self::Auth { .. } => Opcode::Auth,
        }
    }

    /// Appends the request's bytes to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(self.opcode() as u8);
        match *self {
            Self::Validate { magic: number } | Self::Ping { nonce: number } => {
                out.extend(number.to_le_bytes());
            }
            Self::Set { key, value }
            | Self::Append { key, value }
            | Self::QueuePush { key, value } => {
                put_bytes(out, key);
                put_bytes(out, value);
            }
            Self::CompareSet {
                key,
                expected,
                desired,
            } => {
                put_bytes(out, key);
                put_bytes(out, expected);
                put_bytes(out, desired);
            }
            Self::Get { key }
            | Self::DeleteKey { key }
            | Self::QueuePop { key }
            | Self::QueueLen { key } => put_bytes(out, key),
            Self::Add { key, delta: number }
            | Self::Barrier {
                key,
                world_size: number,
            } => {
                put_bytes(out, key);
                out.extend(number.to_le_bytes());
            }
            Self::Check { keys } | Self::Wait { keys } | Self::MultiGet { keys } => {
                put_len(out, keys.len());
                keys.iter().for_each(|key| put_bytes(out, key));
            }
            Self::MultiSet { pairs } => {
                put_len(out, pairs.len());
                for (key, value) in pairs {
                    put_bytes(out, key);
                    put_bytes(out, value);
                }
            }
            Self::Auth { message } => out.extend(message),
            Self::NumKeys | Self::CancelWait | Self::ListKeys => {}
        }
    }
}

fn put_len(out: &mut Vec<u8>, len: usize) {
    out.extend((len as u64).to_le_bytes());
}

/// Appends a byte string: its length, then its bytes.
pub fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_len(out, bytes.len());
    out.extend_from_slice(bytes);
}

/// An operation on a list of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the protocol's")]
pub enum ListOp {
    Check,
    Wait,
    MultiGet,
    MultiSet,
}

/// What the server acts on: a whole small request, or one step of a list.
///
/// Lists come element by element, so that a request of a hundred thousand keys occupies no more
/// memory than its longest element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the protocol's")]
pub enum Part<'a> {
    Whole(Request<'a>),
    ListStart(ListOp),
    ListKey(ListOp, &'a [u8]),
    ListPair(&'a [u8], &'a [u8]),
    ListEnd(ListOp),
}

/// Cuts a stream of bytes into [`Part`]s.
#[derive(Debug, Default)]
pub struct Decoder {
    /// The list in progress and how many elements it still has.
    list: Option<(ListOp, u64)>,
}

impl Decoder {
    /// The next part at the start of `input` and its length, or `None` if bytes are missing.
    ///
    /// The caller drops that many bytes before the next call. The part at the end of a list has
    /// no bytes of its own.
    pub fn next<'a>(&mut self, input: &'a [u8]) -> Result<Option<(Part<'a>, usize)>, WireError> {
        let mut cursor = Cursor { input, at: 0 };
        match self.part(&mut cursor) {
            Ok(part) => Ok(Some((part, cursor.at))),
            Err(Stop::Short) => Ok(None),
            Err(Stop::Bad(err)) => Err(err),
        }
    }

    fn part<'a>(&mut self, cursor: &mut Cursor<'a>) -> Result<Part<'a>, Stop> {
        if let Some((op, left)) = self.list {
            return self.element(cursor, op, left);
        }
        let byte = cursor.u8()?;
        let opcode = Opcode::from_byte(byte).ok_or(WireError::UnknownOpcode(byte))?;
        let request = match opcode {
            Opcode::Validate => Request::Validate {
                magic: cursor.u32()?,
            },
            Opcode::Set => Request::Set {
                key: cursor.key()?,
                value: cursor.value()?,
            },
            Opcode::CompareSet => {
                let (key, expected) = (cursor.key()?, cursor.value()?);
                Request::CompareSet {
                    key,
                    expected,
                    desired: cursor.value()?,
                }
            }
            Opcode::Get => Request::Get { key: cursor.key()? },
            Opcode::Add => Request::Add {
                key: cursor.key()?,
                delta: cursor.i64()?,
            },
            Opcode::Check => return self.start(cursor, ListOp::Check),
            Opcode::Wait => return self.start(cursor, ListOp::Wait),
            Opcode::MultiGet => return self.start(cursor, ListOp::MultiGet),
            Opcode::MultiSet => return self.start(cursor, ListOp::MultiSet),
            Opcode::NumKeys => Request::NumKeys,
            Opcode::DeleteKey => Request::DeleteKey { key: cursor.key()? },
            Opcode::Append => Request::Append {
                key: cursor.key()?,
                value: cursor.value()?,
            },
            Opcode::CancelWait => Request::CancelWait,
            Opcode::Ping => Request::Ping {
                nonce: cursor.u32()?,
            },
            Opcode::QueuePush => Request::QueuePush {
                key: cursor.key()?,
                value: cursor.value()?,
            },
            Opcode::QueuePop => Request::QueuePop { key: cursor.key()? },
            Opcode::QueueLen => Request::QueueLen { key: cursor.key()? },
            Opcode::ListKeys => Request::ListKeys,
            Opcode::Barrier => Request::Barrier {
                key: cursor.key()?,
                world_size: cursor.i64()?,
            },
            Opcode::Auth => Request::Auth {
                message: cursor.array()?,
            },
        };
        Ok(Part::Whole(request))
    }

    fn start<'a>(&mut self, cursor: &mut Cursor<'a>, op: ListOp) -> Result<Part<'a>, Stop> {
        let count = cursor.length("number of keys", MAX_LIST_LEN)?;
        self.list = Some((op, count));
        Ok(Part::ListStart(op))
    }

    fn element<'a>(
        &mut self,
        cursor: &mut Cursor<'a>,
        op: ListOp,
        left: u64,
    ) -> Result<Part<'a>, Stop> {
        if left == 0 {
            self.list = None;
            return Ok(Part::ListEnd(op));
        }
        let key = cursor.key()?;
        let part = match op {
            ListOp::MultiSet => Part::ListPair(key, cursor.value()?),
            _ => Part::ListKey(op, key),
        };
        self.list = Some((op, left - 1));
        Ok(part)
    }
}

enum Stop {
    Short,
    Bad(WireError),
}

impl From<WireError> for Stop {
    fn from(err: WireError) -> Self {
        Self::Bad(err)
    }
}

struct Cursor<'a> {
    input: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], Stop> {
        let bytes = self.input[self.at..].first_chunk().ok_or(Stop::Short)?;
        self.at += N;
        Ok(bytes)
    }

    fn u8(&mut self) -> Result<u8, Stop> {
        self.array().map(|&[byte]| byte)
    }

    fn u32(&mut self) -> Result<u32, Stop> {
        self.array().copied().map(u32::from_le_bytes)
    }

    fn i64(&mut self) -> Result<i64, Stop> {
        self.array().copied().map(i64::from_le_bytes)
    }

    fn length(&mut self, what: &'static str, limit: usize) -> Result<u64, Stop> {
        let got = self.array().copied().map(u64::from_le_bytes)?;
        match got <= limit as u64 {
            true => Ok(got),
            false => Err(WireError::TooLong { what, got, limit }.into()),
        }
    }

    fn bytes(&mut self, what: &'static str, limit: usize) -> Result<&'a [u8], Stop> {
        let len = self.length(what, limit)? as usize;
        let bytes = self.input[self.at..].get(..len).ok_or(Stop::Short)?;
        self.at += len;
        Ok(bytes)
    }

    fn key(&mut self) -> Result<&'a [u8], Stop> {
        self.bytes("key length", MAX_KEY_LEN)
    }

    fn value(&mut self) -> Result<&'a [u8], Stop> {
        self.bytes("value length", MAX_VALUE_LEN)
    }
}

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

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?} ({})", *self as u8)
    }
}
