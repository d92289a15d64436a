//! What two processes tell each other besides the data of collectives.
//!
//! A frame is a head of fixed size and, for some kinds, a payload. No sockets here: bytes in,
//! frames out.

/// Bytes of a head.
pub(crate) const HEAD: usize = 48;

/// Longest payload of one frame.
pub(crate) const MAX_PAYLOAD: usize = 256 << 10;

/// A group, by a digest of its name and members; the same on all of them.
pub(crate) type GroupId = [u8; 16];

/// What a frame is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// The sender's arena number `a` has `b` bytes; a descriptor comes with it.
    Arena = 1,
    /// The control segment of a group, of `b` bytes; a descriptor comes with it.
    Control = 2,
    /// The group is broken; the payload is a notice.
    Broken = 3,
    /// The sender has shut the group down in order.
    Left = 4,
    /// A message; the payload is its data.
    Message = 5,
    /// A message of `b` bytes with ticket `a`, in the sender's memory: the payload says where if
    /// the receiver can reach it.
    Offer = 6,
    /// The data of the offer with ticket `a` is wanted.
    Wanted = 7,
    /// The data of the offer with ticket `a` is not needed any more.
    Taken = 8,
    /// The next part of the data of the offer with ticket `a`.
    Piece = 9,
    /// The sender leaves in order.
    Bye = 10,
    /// The sender takes no part in the group any more; the payload is a notice.
    Dropped = 11,
    /// Are you there? With ticket `a`.
    Ping = 12,
    /// The answer to the question with ticket `a`.
    Pong = 13,
}

impl Kind {
    const ALL: [Kind; 13] = [
        Kind::Arena,
        Kind::Control,
        Kind::Broken,
        Kind::Left,
        Kind::Message,
        Kind::Offer,
        Kind::Wanted,
        Kind::Taken,
        Kind::Piece,
        Kind::Bye,
        Kind::Dropped,
        Kind::Ping,
        Kind::Pong,
    ];

    /// Whether a descriptor comes with it.
    pub(crate) fn has_descriptor(self) -> bool {
        matches!(self, Kind::Arena | Kind::Control)
    }
}

/// The fixed part of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) kind: Kind,
    pub(crate) tag: u32,
    pub(crate) group: GroupId,
    pub(crate) a: u64,
    pub(crate) b: u64,
    /// Bytes of the payload.
    pub(crate) len: usize,
}

impl Head {
    /// A frame of this kind with nothing else in it.
    pub(crate) fn new(kind: Kind, group: GroupId) -> Self {
        Self {
            kind,
            tag: 0,
            group,
            a: 0,
            b: 0,
            len: 0,
        }
    }

    pub(crate) fn encode(&self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        bytes[0] = self.kind as u8;
        bytes[4..8].copy_from_slice(&self.tag.to_le_bytes());
        bytes[8..24].copy_from_slice(&self.group);
        bytes[24..32].copy_from_slice(&self.a.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.b.to_le_bytes());
        bytes[40..48].copy_from_slice(&(self.len as u64).to_le_bytes());
        bytes
    }

    /// The head in these bytes; `None` if it is none.
    pub(crate) fn decode(bytes: &[u8; HEAD]) -> Option<Self> {
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let kind = Kind::ALL.into_iter().find(|&kind| kind as u8 == bytes[0])?;
        let len = usize::try_from(long(40)).ok()?;
        (len <= MAX_PAYLOAD).then_some(Self {
            kind,
            tag: u32::from_le_bytes(bytes[4..8].try_into().expect("4 bytes")),
            group: bytes[8..24].try_into().expect("16 bytes"),
            a: long(24),
            b: long(32),
            len,
        })
    }
}

/// Puts frames together from bytes as they come.
#[derive(Debug, Default)]
pub(crate) struct Assembly {
    bytes: Vec<u8>,
    /// Up to here they have been handed out.
    used: usize,
}

impl Assembly {
    /// Bytes have come.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if self.used > 0 {
            self.bytes.drain(..self.used);
            self.used = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole frame. The error means that what comes is no frames.
    pub(crate) fn next(&mut self) -> Result<Option<(Head, &[u8])>, ()> {
        let Some((head, rest)) = self.bytes[self.used..].split_first_chunk::<HEAD>() else {
            return Ok(None);
        };
        let head = Head::decode(head).ok_or(())?;
        if rest.len() < head.len {
            return Ok(None);
        }
        let start = self.used + HEAD;
        self.used = start + head.len;
        Ok(Some((head, &self.bytes[start..self.used])))
    }
}

/// Where an offer's data is, if the receiver can reach it.
pub(crate) fn encode_location(segment: u32, offset: usize) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&segment.to_le_bytes());
    bytes[4..].copy_from_slice(&(offset as u64).to_le_bytes());
    bytes
}

/// The same, read; `None` if the payload is empty or something else.
pub(crate) fn decode_location(bytes: &[u8]) -> Option<(u32, usize)> {
    let bytes: &[u8; 12] = bytes.try_into().ok()?;
    let segment = u32::from_le_bytes(bytes[..4].try_into().expect("4 bytes"));
    let offset = u64::from_le_bytes(bytes[4..].try_into().expect("8 bytes"));
    Some((segment, usize::try_from(offset).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(kind: Kind, len: usize) -> Head {
        Head {
            kind,
            tag: 7,
            group: [3; 16],
            a: 1 << 40,
            b: u64::MAX,
            len,
        }
    }

    proptest! {
        /// However the bytes are cut, the same frames come out.
        #[test]
        fn frames_survive_any_cut(lens in proptest::collection::vec(0usize..300, 1..8), cuts in 1usize..200) {
            let mut bytes = Vec::new();
            for (at, &len) in lens.iter().enumerate() {
                bytes.extend(head(Kind::ALL[at % 13], len).encode());
                bytes.extend(std::iter::repeat_n(at as u8, len));
            }
            let mut assembly = Assembly::default();
            let mut seen = 0;
            for piece in bytes.chunks(cuts) {
                assembly.push(piece);
                while let Some((got, payload)) = assembly.next().unwrap() {
                    prop_assert_eq!(got, head(Kind::ALL[seen % 13], lens[seen]));
                    prop_assert!(payload.iter().all(|&byte| byte == seen as u8));
                    seen += 1;
                }
            }
            prop_assert_eq!(seen, lens.len());
        }

        #[test]
        fn anything_may_come(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let mut assembly = Assembly::default();
            assembly.push(&bytes);
            while let Ok(Some(_)) = assembly.next() {}
        }
    }

    #[test]
    fn payloads_that_are_too_long_are_no_frames() {
        let mut assembly = Assembly::default();
        assembly.push(&head(Kind::Message, MAX_PAYLOAD + 1).encode());
        assert!(assembly.next().is_err());
        let mut assembly = Assembly::default();
        assembly.push(&[99; HEAD]);
        assert!(assembly.next().is_err());
    }

    #[test]
    fn locations_are_read_back() {
        assert_eq!(
            decode_location(&encode_location(3, 1 << 40)),
            Some((3, 1 << 40))
        );
        assert_eq!(decode_location(&[]), None);
    }
}
