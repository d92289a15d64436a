//! Requests that own their bytes, and how to make many of them.

use phalanx_store::tcp::wire::{MAGIC, Request};
use proptest::prelude::*;

pub(crate) type Bytes = Vec<u8>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Owned {
    Set(Bytes, Bytes),
    CompareSet(Bytes, Bytes, Bytes),
    Get(Bytes),
    Add(Bytes, i64),
    Check(Vec<Bytes>),
    Wait(Vec<Bytes>),
    NumKeys,
    DeleteKey(Bytes),
    Append(Bytes, Bytes),
    MultiGet(Vec<Bytes>),
    MultiSet(Vec<(Bytes, Bytes)>),
    CancelWait,
    Ping(u32),
    QueuePush(Bytes, Bytes),
    QueuePop(Bytes),
    QueueLen(Bytes),
    ListKeys,
    Barrier(Bytes, i64),
}

impl Owned {
    pub(crate) fn borrow(&self) -> Request<'_> {
        match self {
            Self::Set(key, value) => Request::Set { key, value },
            Self::CompareSet(key, expected, desired) => Request::CompareSet {
                key,
                expected,
                desired,
            },
            Self::Get(key) => Request::Get { key },
            Self::Add(key, delta) => Request::Add { key, delta: *delta },
            Self::Check(keys) => Request::Check { keys },
            Self::Wait(keys) => Request::Wait { keys },
            Self::NumKeys => Request::NumKeys,
            Self::DeleteKey(key) => Request::DeleteKey { key },
            Self::Append(key, value) => Request::Append { key, value },
            Self::MultiGet(keys) => Request::MultiGet { keys },
            Self::MultiSet(pairs) => Request::MultiSet { pairs },
            Self::CancelWait => Request::CancelWait,
            Self::Ping(nonce) => Request::Ping { nonce: *nonce },
            Self::QueuePush(key, value) => Request::QueuePush { key, value },
            Self::QueuePop(key) => Request::QueuePop { key },
            Self::QueueLen(key) => Request::QueueLen { key },
            Self::ListKeys => Request::ListKeys,
            Self::Barrier(key, world_size) => Request::Barrier {
                key,
                world_size: *world_size,
            },
        }
    }

    pub(crate) fn encode(&self) -> Bytes {
        let mut out = Vec::new();
        self.borrow().encode(&mut out);
        out
    }
}

/// The bytes that open a connection.
pub(crate) fn validate() -> Bytes {
    let mut out = Vec::new();
    Request::Validate { magic: MAGIC }.encode(&mut out);
    out
}

/// Few keys, so that requests meet; now and then any bytes.
fn key() -> impl Strategy<Value = Bytes> {
    prop_oneof![
        12 => prop::sample::select(vec!["a", "b", "c", "d"]).prop_map(|k| k.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..20),
    ]
}

fn keys() -> impl Strategy<Value = Vec<Bytes>> {
    prop::collection::vec(key(), 0..4)
}

fn value() -> impl Strategy<Value = Bytes> {
    prop_oneof![
        4 => (-20..20_i64).prop_map(|n| n.to_string().into_bytes()),
        1 => Just(i64::MAX.to_string().into_bytes()),
        2 => Just(Vec::new()),
        2 => prop::collection::vec(any::<u8>(), 0..40),
        1 => (any::<u8>(), 0..3000_usize).prop_map(|(byte, len)| vec![byte; len]),
    ]
}

/// Any request but the handshake's.
pub(crate) fn request() -> impl Strategy<Value = Owned> {
    prop_oneof![
        3 => (key(), value()).prop_map(|(k, v)| Owned::Set(k, v)),
        2 => (key(), value(), value()).prop_map(|(k, e, d)| Owned::CompareSet(k, e, d)),
        2 => key().prop_map(Owned::Get),
        3 => (key(), -3..4_i64).prop_map(|(k, d)| Owned::Add(k, d)),
        2 => keys().prop_map(Owned::Check),
        6 => keys().prop_map(Owned::Wait),
        1 => Just(Owned::NumKeys),
        4 => key().prop_map(Owned::DeleteKey),
        2 => (key(), value()).prop_map(|(k, v)| Owned::Append(k, v)),
        1 => keys().prop_map(Owned::MultiGet),
        1 => prop::collection::vec((key(), value()), 0..4).prop_map(Owned::MultiSet),
        2 => Just(Owned::CancelWait),
        1 => any::<u32>().prop_map(Owned::Ping),
        4 => (key(), value()).prop_map(|(k, v)| Owned::QueuePush(k, v)),
        4 => key().prop_map(Owned::QueuePop),
        1 => key().prop_map(Owned::QueueLen),
        1 => Just(Owned::ListKeys),
        4 => (key(), -1..5_i64).prop_map(|(k, n)| Owned::Barrier(k, n)),
    ]
}
