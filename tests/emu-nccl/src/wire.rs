//! What ranks and hub say to each other.

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The first thing a rank says on its connection.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) nonce: u64,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
}

/// One operation of a rank, with the bytes that it gives.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Request {
    /// Which of the rank's outstanding operations it is.
    pub(crate) index: usize,
    pub(crate) what: What,
    pub(crate) data: Vec<u8>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum What {
    Collective(Collective),
    Send {
        peer: usize,
        dtype: i32,
        count: usize,
    },
    Recv {
        peer: usize,
        dtype: i32,
        count: usize,
    },
    Split {
        color: i32,
        key: i32,
    },
    Finalize,
    /// This rank has come to its first operation.
    Connect,
}

/// What all ranks must call alike.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Collective {
    pub(crate) kind: Kind,
    pub(crate) dtype: i32,
    pub(crate) count: usize,
    pub(crate) op: Option<Op>,
    pub(crate) root: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    AllReduce,
    Reduce,
    ReduceScatter,
    AllGather,
    Broadcast,
}

/// Every rank has a factor of its own.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) enum Op {
    Plain(i32),
    PremulSum(f64),
}

impl PartialEq for Op {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Plain(a), Self::Plain(b)) => a == b,
            (Self::PremulSum(_), Self::PremulSum(_)) => true,
            _ => false,
        }
    }
}

/// What the hub answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Reply {
    /// None: it concerns all operations of the communicator.
    pub(crate) index: Option<usize>,
    pub(crate) result: Result<Vec<u8>, Failure>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(crate) code: i32,
    pub(crate) why: String,
}

/// Bytes of a message are the emulator's own; this is only to notice a stranger.
const MAX: usize = 1 << 30;

pub(crate) fn write(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let bytes = postcard::to_stdvec(message).map_err(io::Error::other)?;
    let mut frame = (bytes.len() as u64).to_le_bytes().to_vec();
    frame.extend(bytes);
    to.write_all(&frame)
}

pub(crate) fn read<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<T> {
    let mut len = [0; 8];
    from.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len) as usize;
    if len > MAX {
        return Err(io::Error::other("too long for a message"));
    }
    let mut bytes = vec![0; len];
    from.read_exact(&mut bytes)?;
    postcard::from_bytes(&bytes).map_err(io::Error::other)
}
