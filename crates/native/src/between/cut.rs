//! How data is cut on its way between hosts.

use std::ops::{Range, RangeInclusive};

use phalanx_pg::{Error, Result};
use serde::{Deserialize, Serialize};

/// Says how many connections two ranks on different hosts have in a group.
const STREAMS_VAR: &str = "PHALANX_STREAMS";

/// Says how many bytes go on one of them before it is the next one's turn.
const PIECE_VAR: &str = "PHALANX_PIECE";

const MAX_STREAMS: usize = 16;

/// A piece holds at least an element of every type.
const MIN_PIECE: usize = 16;
const MAX_PIECE: usize = 64 << 20;

/// The same on all ranks of a world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cut {
    /// Connections between two ranks.
    pub(crate) streams: usize,
    /// Bytes of a piece.
    pub(crate) piece: usize,
}

impl Default for Cut {
    fn default() -> Self {
        Self {
            streams: 1,
            piece: 256 << 10,
        }
    }
}

impl Cut {
    /// As the variables say.
    pub(crate) fn from_environment() -> Result<Self> {
        let default = Self::default();
        Ok(Self {
            streams: number(STREAMS_VAR, default.streams, 1..=MAX_STREAMS)?,
            piece: number(PIECE_VAR, default.piece, MIN_PIECE..=MAX_PIECE)?,
        })
    }

    /// What ranks that were told different things use: the least of each.
    pub(crate) fn agree(all: impl Iterator<Item = Self>) -> Self {
        let least = all.reduce(|a, b| Self {
            streams: a.streams.min(b.streams),
            piece: a.piece.min(b.piece),
        });
        least.unwrap_or_default()
    }

    /// How many elements of this size a piece holds.
    pub(super) fn elements(self, size: usize) -> usize {
        (self.piece / size).max(1)
    }

    /// The bytes of a piece of so many; none if there is no such piece.
    pub(super) fn piece(self, bytes: usize, id: u32) -> Range<usize> {
        let at = |id: usize| id.saturating_mul(self.piece).min(bytes);
        at(id as usize)..at(id as usize + 1)
    }

    /// All pieces of so many bytes, with their numbers.
    pub(super) fn pieces(self, bytes: usize) -> impl Iterator<Item = (u32, Range<usize>)> {
        let all = 0..bytes.div_ceil(self.piece) as u32;
        all.map(move |id| (id, self.piece(bytes, id)))
    }
}

fn number(name: &str, default: usize, allowed: RangeInclusive<usize>) -> Result<usize> {
    match std::env::var(name) {
        Ok(text) => parse(name, &text, allowed),
        Err(_) => Ok(default),
    }
}

fn parse(name: &str, text: &str, allowed: RangeInclusive<usize>) -> Result<usize> {
    let number = text.trim().parse().ok();
    number.filter(|it| allowed.contains(it)).ok_or_else(|| {
        let (least, most) = allowed.into_inner();
        let what = format!("{name} is {text:?}; it must be a number from {least} to {most}");
        Error::invalid(what)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every byte is in one piece, in order, and no piece is longer than the others.
        #[test]
        fn pieces_cover_what_they_are_cut_from(bytes in 0usize..5000, piece in MIN_PIECE..700) {
            let cut = Cut { streams: 1, piece };
            let mut end = 0;
            for (id, range) in cut.pieces(bytes) {
                prop_assert_eq!(&range, &cut.piece(bytes, id));
                prop_assert_eq!(range.start, end);
                prop_assert!(range.len() == piece || range.end == bytes && !range.is_empty());
                end = range.end;
            }
            prop_assert_eq!(end, bytes);
            prop_assert!(cut.piece(bytes, u32::MAX).is_empty());
        }
    }

    #[test]
    fn a_piece_holds_an_element_of_every_type() {
        let cut = Cut {
            streams: 1,
            piece: MIN_PIECE,
        };
        assert_eq!([1, 4, 8, 16].map(|size| cut.elements(size)), [16, 4, 2, 1]);
    }

    #[test]
    fn ranks_agree_on_the_least() {
        let all = [(4, 100), (2, 300), (3, 200)].map(|(streams, piece)| Cut { streams, piece });
        let least = Cut {
            streams: 2,
            piece: 100,
        };
        assert_eq!(Cut::agree(all.into_iter()), least);
    }

    #[test]
    fn what_is_no_number_or_too_large_is_refused_by_name() {
        assert_eq!(parse("X", " 3 ", 1..=4).unwrap(), 3);
        for text in ["", "0", "5", "-1", "many", "1e3"] {
            let err = parse("X", text, 1..=4).unwrap_err().to_string();
            assert!(err.contains("X is") && err.contains("from 1 to 4"), "{err}");
        }
    }
}
