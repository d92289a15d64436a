//! What ranks tell each other beside gloo. No sockets here.

use phalanx_pg::Word;

/// Tells groups of a job apart.
pub(crate) type GroupId = [u8; 16];

/// Group, length of what is said.
const HEAD_LEN: usize = 16 + 4;

/// What a rank says about a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Saying {
    /// Why it ends.
    Word(Word),
    /// The sender, who has left, closes its connection with the receiver: this many messages went
    /// over it, and no more will.
    Closing(u64),
    /// Has the receiver come to the collective of this number?
    HasCome(u64),
    /// The answer.
    Come(u64, bool),
}

/// What the encoded form begins with; words have numbers of their own, below.
const CLOSING: u8 = 16;
const HAS_COME: u8 = 17;
const COME: u8 = 18;

impl Saying {
    fn encode(&self) -> Vec<u8> {
        let numbered =
            |kind, number: u64, rest: &[u8]| [&[kind][..], &number.to_le_bytes(), rest].concat();
        match self {
            Self::Word(word) => word.encode(),
            Self::Closing(sent) => numbered(CLOSING, *sent, &[]),
            Self::HasCome(seq) => numbered(HAS_COME, *seq, &[]),
            Self::Come(seq, come) => numbered(COME, *seq, &[u8::from(*come)]),
        }
    }

    fn decode(bytes: &[u8], size: usize) -> Option<Self> {
        if let Some(word) = Word::decode(bytes, size) {
            return Some(Self::Word(word));
        }
        let (kind, rest) = bytes.split_first()?;
        let (number, rest) = rest.split_first_chunk::<8>()?;
        let number = u64::from_le_bytes(*number);
        match (*kind, rest) {
            (CLOSING, []) => Some(Self::Closing(number)),
            (HAS_COME, []) => Some(Self::HasCome(number)),
            (COME, [come @ 0..=1]) => Some(Self::Come(number, *come == 1)),
            _ => None,
        }
    }
}

/// Something said, with the group that it is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) group: GroupId,
    pub(crate) saying: Saying,
}

impl Frame {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let saying = self.saying.encode();
        let len = (saying.len() as u32).to_le_bytes();
        [&self.group[..], &len, &saying].concat()
    }
}

/// Bytes of one peer that are not a whole frame yet.
#[derive(Debug, Default)]
pub(crate) struct Assembly(Vec<u8>);

impl Assembly {
    /// Takes in what has come; the frames that are complete, or what is wrong with them. `size`
    /// is the number of ranks in the world.
    pub(crate) fn feed(&mut self, bytes: &[u8], size: usize) -> Result<Vec<Frame>, String> {
        self.0.extend(bytes);
        let mut frames = Vec::new();
        while let Some((frame, len)) = first_frame(&self.0, size)? {
            self.0.drain(..len);
            frames.push(frame);
        }
        Ok(frames)
    }
}

fn first_frame(bytes: &[u8], size: usize) -> Result<Option<(Frame, usize)>, String> {
    let Some((head, rest)) = bytes.split_at_checked(HEAD_LEN) else {
        return Ok(None);
    };
    let group: GroupId = head[..16].try_into().expect("sixteen bytes");
    let len = u32::from_le_bytes(head[16..].try_into().expect("four bytes")) as usize;
    if len > Word::MAX_LEN {
        return Err(format!("a frame of {len} bytes"));
    }
    let Some((saying, _)) = rest.split_at_checked(len) else {
        return Ok(None);
    };
    match Saying::decode(saying, size) {
        Some(saying) => Ok(Some((Frame { group, saying }, HEAD_LEN + len))),
        None => Err(format!("{len} bytes that make no sense")),
    }
}

#[cfg(test)]
mod tests {
    use phalanx_pg::{Error, ErrorKind, Notice};

    use super::*;

    fn frames() -> Vec<Frame> {
        let notice = Notice::of(&Error::new(ErrorKind::Aborted, "enough").from_peer(1), 1);
        let sayings = [
            Saying::Word(Word::Broken(notice.clone())),
            Saying::Word(Word::Past),
            Saying::Word(Word::Left(7, notice)),
            Saying::Closing(3),
            Saying::HasCome(u64::MAX),
            Saying::Come(5, true),
            Saying::Come(6, false),
        ];
        let frame = |(i, saying)| Frame {
            group: [i as u8; 16],
            saying,
        };
        sayings.into_iter().enumerate().map(frame).collect()
    }

    #[test]
    fn frames_survive_being_cut_anywhere() {
        let bytes: Vec<u8> = frames().iter().flat_map(Frame::encode).collect();
        for piece in [1, 2, 7, 20, 21, 22, bytes.len()] {
            let mut assembly = Assembly::default();
            let fed = bytes.chunks(piece).map(|piece| assembly.feed(piece, 2));
            let came: Vec<Frame> = fed.flat_map(Result::unwrap).collect();
            assert_eq!(came, frames(), "pieces of {piece}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let feed = |bytes: &[u8]| Assembly::default().feed(bytes, 2);
        let mut unknown = frames()[1].encode();
        unknown[20] = 9;
        assert!(feed(&unknown).is_err());
        let mut neither = frames()[5].encode();
        *neither.last_mut().unwrap() = 2;
        assert!(feed(&neither).is_err());
        let mut huge = frames()[1].encode();
        huge[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(feed(&huge).is_err());
        // Ranks that are not there.
        assert!(Assembly::default().feed(&frames()[0].encode(), 1).is_err());
    }
}
