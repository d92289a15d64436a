//! What travels on a connection once both ends know each other.
//!
//! A message is one or more chunks, each behind a header of fixed size, the last one marked. The
//! receiver never needs to believe a length: memory grows with what has arrived, a chunk at a
//! time.
//!
//! | byte | 0 | 1 | 2..4 | 4..8 | 8..16 | 16..20 |
//! |---|---|---|---|---|---|---|
//! | | kind | last chunk | zero | length | sequence number or tag | part |
//!
//! Numbers are little endian.

use crate::mailbox::Label;
use phalanx_pg::Notice;

/// Bytes of a header.
pub(crate) const HEADER_LEN: usize = 20;

/// Most bytes in a chunk.
pub(crate) const MAX_CHUNK: usize = 256 << 10;

/// Most bytes in a message.
pub(crate) const MAX_MESSAGE: usize = 1 << 40;

const COLLECTIVE: u8 = 1;
const TAG: u8 = 2;
const GOODBYE: u8 = 3;
const ABORT: u8 = 4;
const LEFT: u8 = 5;

/// A header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Header {
    /// A piece of a message follows.
    Chunk {
        label: Label,
        last: bool,
        len: usize,
    },
    /// The sender shuts down; nothing follows.
    Goodbye,
    /// The sender sends nothing more, and a notice why follows.
    Left { len: usize },
    /// The sender's group is broken; a notice follows.
    Abort { len: usize },
}

impl Header {
    /// The form for the wire.
    pub(crate) fn encode(&self) -> [u8; HEADER_LEN] {
        let (kind, last, len, id, part) = match *self {
            Self::Chunk { label, last, len } => match label {
                Label::Collective { seq, part } => (COLLECTIVE, last, len, seq, part),
                Label::Tag(tag) => (TAG, last, len, tag.into(), 0),
            },
            Self::Goodbye => (GOODBYE, true, 0, 0, 0),
            Self::Left { len } => (LEFT, true, len, 0, 0),
            Self::Abort { len } => (ABORT, true, len, 0, 0),
        };
        let mut bytes = [0; HEADER_LEN];
        bytes[0] = kind;
        bytes[1] = last.into();
        bytes[4..8].copy_from_slice(&(len as u32).to_le_bytes());
        bytes[8..16].copy_from_slice(&id.to_le_bytes());
        bytes[16..].copy_from_slice(&part.to_le_bytes());
        bytes
    }

    /// Reads a header; the error says what is wrong with it. Lengths that come out are in bounds.
    pub(crate) fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, String> {
        let [kind, last, 0, 0, l0, l1, l2, l3, id @ .., p0, p1, p2, p3] = *bytes else {
            return Err("a header with reserved bytes set".into());
        };
        let last = match last {
            0 => false,
            1 => true,
            other => return Err(format!("a header with {other} for the last chunk")),
        };
        let len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        let (id, part) = (u64::from_le_bytes(id), u32::from_le_bytes([p0, p1, p2, p3]));
        let bounded = |limit: usize| match len <= limit {
            true => Ok(len),
            false => Err(format!("a length of {len}, the limit is {limit}")),
        };
        let chunk = |label| {
            let len = bounded(MAX_CHUNK)?;
            Ok(Self::Chunk { label, last, len })
        };
        match kind {
            COLLECTIVE => chunk(Label::Collective { seq: id, part }),
            TAG => match u32::try_from(id) {
                Ok(tag) if part == 0 => chunk(Label::Tag(tag)),
                _ => Err(format!("a tag of {id}")),
            },
            GOODBYE => Ok(Self::Goodbye),
            LEFT => Ok(Self::Left {
                len: bounded(Notice::MAX_LEN)?,
            }),
            ABORT => Ok(Self::Abort {
                len: bounded(Notice::MAX_LEN)?,
            }),
            other => Err(format!("a frame of kind {other}")),
        }
    }
}

/// Puts the chunks of one sender's messages together.
#[derive(Debug, Default)]
pub(crate) struct Assembly {
    unfinished: Option<Label>,
    data: Vec<u8>,
}

impl Assembly {
    /// Room for a chunk of this message, to be filled before the next call; the error says why
    /// there is none.
    pub(crate) fn room(&mut self, label: Label, len: usize) -> Result<&mut [u8], String> {
        if self
            .unfinished
            .is_some_and(|unfinished| unfinished != label)
        {
            return Err("a message inside another".into());
        }
        let start = self.data.len();
        if start + len > MAX_MESSAGE {
            return Err(format!("a message of more than {MAX_MESSAGE} bytes"));
        }
        self.unfinished = Some(label);
        self.data.resize(start + len, 0);
        Ok(&mut self.data[start..])
    }

    /// The message, now that its last chunk is there.
    pub(crate) fn finish(&mut self) -> Vec<u8> {
        self.unfinished = None;
        std::mem::take(&mut self.data)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn label() -> impl Strategy<Value = Label> {
        prop_oneof![
            (any::<u64>(), any::<u32>()).prop_map(|(seq, part)| Label::Collective { seq, part }),
            any::<u32>().prop_map(Label::Tag),
        ]
    }

    proptest! {
        #[test]
        fn a_header_survives_the_wire(label in label(), last: bool, len in 0..=MAX_CHUNK) {
            let header = Header::Chunk { label, last, len };
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn what_decodes_is_in_bounds(bytes: [u8; HEADER_LEN]) {
            use Header::{Abort, Chunk, Left};
            if let Ok(Chunk { len, .. } | Left { len } | Abort { len }) = Header::decode(&bytes) {
                prop_assert!(len <= MAX_CHUNK);
            }
        }
    }

    #[test]
    fn a_lying_length_is_refused() {
        let header = Header::Chunk {
            label: Label::Tag(0),
            last: true,
            len: MAX_CHUNK + 1,
        };
        assert!(Header::decode(&header.encode()).is_err());
    }

    #[test]
    fn messages_do_not_mix() {
        let mut assembly = Assembly::default();
        assembly
            .room(Label::Tag(1), 2)
            .unwrap()
            .copy_from_slice(b"ab");
        assert!(assembly.room(Label::Tag(2), 1).is_err());
        assembly
            .room(Label::Tag(1), 1)
            .unwrap()
            .copy_from_slice(b"c");
        assert_eq!(assembly.finish(), b"abc");
        assert!(assembly.room(Label::Tag(2), 0).is_ok());
        assert!(assembly.finish().is_empty());
    }
}
