//! What ranks tell each other beside gloo: why a group ends. No sockets here.

use phalanx_pg::Notice;

/// Tells groups of a job apart.
pub(crate) type GroupId = [u8; 16];

/// Kind, group, length of the rest.
const HEAD_LEN: usize = 1 + 16 + 4;

/// Collectives that the sender has finished, before the notice.
const COUNT_LEN: usize = 8;

/// Longest frame.
const MAX_LEN: usize = HEAD_LEN + COUNT_LEN + Notice::MAX_LEN;

/// One word about one group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Word {
    /// The group is broken, for everybody and at once.
    Broken(Notice),
    /// The sender takes no part in collectives from this number on. What it gave before counts.
    Left(u64, Notice),
    /// The sender needs nothing more of the group's connections.
    Past,
}

/// A word with the group that it is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) group: GroupId,
    pub(crate) word: Word,
}

impl Frame {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (kind, payload) = match &self.word {
            Word::Broken(notice) => (1u8, notice.encode()),
            Word::Left(count, notice) => (2, [&count.to_le_bytes()[..], &notice.encode()].concat()),
            Word::Past => (3, Vec::new()),
        };
        let mut bytes = vec![kind];
        bytes.extend(self.group);
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend(payload);
        bytes
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
    let group: GroupId = head[1..17].try_into().expect("sixteen bytes");
    let len = u32::from_le_bytes(head[17..].try_into().expect("four bytes")) as usize;
    if HEAD_LEN + len > MAX_LEN {
        return Err(format!("a frame of {len} bytes"));
    }
    let Some((payload, _)) = rest.split_at_checked(len) else {
        return Ok(None);
    };
    let notice = |bytes: &[u8]| {
        Notice::decode(bytes, size).ok_or_else(|| "a notice that makes no sense".to_owned())
    };
    let word = match (head[0], payload.split_first_chunk::<COUNT_LEN>()) {
        (1, _) => Word::Broken(notice(payload)?),
        (2, Some((count, rest))) => Word::Left(u64::from_le_bytes(*count), notice(rest)?),
        (3, _) if payload.is_empty() => Word::Past,
        (kind, _) => return Err(format!("a frame of kind {kind} and {len} bytes")),
    };
    Ok(Some((Frame { group, word }, HEAD_LEN + len)))
}

#[cfg(test)]
mod tests {
    use phalanx_pg::{Error, ErrorKind};

    use super::*;

    fn frames() -> Vec<Frame> {
        let notice = Notice::of(&Error::new(ErrorKind::Aborted, "enough").from_peer(1), 1);
        let words = [
            Word::Broken(notice.clone()),
            Word::Past,
            Word::Left(7, notice),
            Word::Past,
        ];
        let frame = |(i, word)| Frame {
            group: [i as u8; 16],
            word,
        };
        words.into_iter().enumerate().map(frame).collect()
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
        unknown[0] = 9;
        assert!(feed(&unknown).is_err());
        let mut huge = frames()[1].encode();
        huge[17..21].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(feed(&huge).is_err());
        // Ranks that are not there.
        assert!(Assembly::default().feed(&frames()[0].encode(), 1).is_err());
    }
}
