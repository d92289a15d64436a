//! Why a group broke, as its ranks tell each other.

use crate::error::{Error, ErrorKind};

/// Longest text that travels; longer ones are cut.
const MAX_TEXT: usize = 1024;

/// Kind, origin, whether there is a peer, peer.
const FIXED_LEN: usize = 1 + 4 + 1 + 4;

/// The first cause of a group's end, as its ranks tell each other; for backends.
///
/// It is passed on unchanged, so every rank reports the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// Who found it.
    origin: usize,
    kind: ErrorKind,
    /// The rank at fault.
    peer: Option<usize>,
    text: String,
}

impl Notice {
    /// Longest encoded form.
    pub const MAX_LEN: usize = FIXED_LEN + MAX_TEXT;

    /// What rank `origin`, whose group `cause` has broken, tells the others.
    pub fn of(cause: &Error, origin: usize) -> Self {
        let cause = std::iter::successors(Some(cause), |err| err.cause())
            .last()
            .unwrap_or(cause);
        // The others do not know the operation that met it, unless it was the operation's own.
        let text = match cause.kind() {
            ErrorKind::Aborted | ErrorKind::PeerLost => cause.message().to_owned(),
            _ => cause.to_string(),
        };
        Self {
            origin,
            kind: from_code(code(cause.kind())),
            peer: cause.peer(),
            text: shortened(text),
        }
    }

    /// The error that those who are told end with.
    pub fn to_error(&self) -> Error {
        let Self { origin, text, .. } = self;
        let text = match (self.kind, self.peer) {
            (ErrorKind::Aborted, None) => format!("rank {origin} aborted the group: {text}"),
            // Passed on unchanged: it says which rank it speaks of.
            (ErrorKind::Aborted | ErrorKind::PeerLost, Some(_)) => text.clone(),
            _ => format!("rank {origin} reports: {text}"),
        };
        Error::new(self.kind, text).from_peer(self.peer.unwrap_or(*origin))
    }

    /// The form for the wire.
    pub fn encode(&self) -> Vec<u8> {
        let number = |rank: usize| u32::try_from(rank).unwrap_or(u32::MAX).to_le_bytes();
        let mut bytes = vec![code(self.kind)];
        bytes.extend(number(self.origin));
        bytes.push(self.peer.is_some().into());
        bytes.extend(number(self.peer.unwrap_or(0)));
        bytes.extend(self.text.as_bytes());
        bytes
    }

    /// Reads what a rank of a group of `size` has sent; `None` if it is no notice.
    pub fn decode(bytes: &[u8], size: usize) -> Option<Self> {
        let (fixed, text) = bytes.split_first_chunk::<FIXED_LEN>()?;
        let [kind, o0, o1, o2, o3, has_peer, p0, p1, p2, p3] = *fixed;
        let rank = |bytes| {
            let rank = u32::from_le_bytes(bytes) as usize;
            (rank < size).then_some(rank)
        };
        let peer = match has_peer {
            0 => None,
            _ => Some(rank([p0, p1, p2, p3])?),
        };
        Some(Self {
            origin: rank([o0, o1, o2, o3])?,
            kind: from_code(kind),
            peer,
            text: shortened(String::from_utf8_lossy(text).into_owned()),
        })
    }
}

/// What ranks tell each other about the end of their group; for backends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Word {
    /// The group is broken, for everybody and at once.
    Broken(Notice),
    /// The sender takes no part in collectives from this number on. What it gave before counts.
    Left(u64, Notice),
    /// The sender needs nothing more of the group's connections.
    Past,
}

/// Bytes of a collective's number.
const SEQ_LEN: usize = 8;

impl Word {
    /// Longest encoded form.
    pub const MAX_LEN: usize = 1 + SEQ_LEN + Notice::MAX_LEN;

    /// The form for the wire.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Broken(notice) => [&[1][..], &notice.encode()].concat(),
            Self::Left(seq, notice) => [&[2][..], &seq.to_le_bytes(), &notice.encode()].concat(),
            Self::Past => vec![3],
        }
    }

    /// Reads what a rank of a group of `size` has sent; `None` if it is no word.
    pub fn decode(bytes: &[u8], size: usize) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        match kind {
            1 => Notice::decode(rest, size).map(Self::Broken),
            2 => {
                let (seq, rest) = rest.split_first_chunk::<SEQ_LEN>()?;
                let notice = Notice::decode(rest, size)?;
                Some(Self::Left(u64::from_le_bytes(*seq), notice))
            }
            3 if rest.is_empty() => Some(Self::Past),
            _ => None,
        }
    }
}

fn shortened(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(MAX_TEXT));
    text
}

/// Only these break a group; anything else is the backend's own failure.
fn code(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::Timeout => 1,
        ErrorKind::PeerLost => 2,
        ErrorKind::Aborted => 3,
        _ => 0,
    }
}

fn from_code(code: u8) -> ErrorKind {
    match code {
        1 => ErrorKind::Timeout,
        2 => ErrorKind::PeerLost,
        3 => ErrorKind::Aborted,
        _ => ErrorKind::Backend,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_notice_survives_the_wire() {
        let lost = Error::new(ErrorKind::PeerLost, "rank 2 is gone").from_peer(2);
        let broken = Error::broken_by(&lost);
        for cause in [lost, broken, Error::new(ErrorKind::Aborted, "enough")] {
            let notice = Notice::of(&cause, 1);
            assert_eq!(Notice::decode(&notice.encode(), 3), Some(notice));
        }
    }

    #[test]
    fn words_survive_the_wire() {
        let notice = Notice::of(&Error::new(ErrorKind::Aborted, "enough"), 1);
        let words = [
            Word::Broken(notice.clone()),
            Word::Left(7, notice),
            Word::Past,
        ];
        for word in words {
            let bytes = word.encode();
            assert!(bytes.len() <= Word::MAX_LEN);
            assert_eq!(Word::decode(&bytes, 2), Some(word));
        }
        for nonsense in [&[][..], &[3, 0], &[9], &[2, 1, 2, 3]] {
            assert_eq!(Word::decode(nonsense, 2), None, "{nonsense:?}");
        }
    }

    #[test]
    fn a_report_of_a_broken_group_names_the_first_cause() {
        let lost = Error::new(ErrorKind::PeerLost, "rank 2 is gone").from_peer(2);
        let told = Notice::of(&Error::broken_by(&lost), 1).to_error();
        assert_eq!((told.kind(), told.peer()), (ErrorKind::PeerLost, Some(2)));
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        let cause = Error::new(ErrorKind::Aborted, "ä".repeat(MAX_TEXT));
        assert!(Notice::of(&cause, 0).encode().len() <= Notice::MAX_LEN);
        let cause = Error::new(ErrorKind::Aborted, format!("x{}", "ä".repeat(MAX_TEXT)));
        let notice = Notice::of(&cause, 0);
        assert_eq!(Notice::decode(&notice.encode(), 1), Some(notice));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_notice_or_none(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Some(notice) = Notice::decode(&bytes, 4) {
                prop_assert!(notice.to_error().peer().is_some_and(|peer| peer < 4));
            }
        }
    }
}
