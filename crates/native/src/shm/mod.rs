//! Memory that the processes of a host share.

mod arena;
mod free_list;
mod room;
mod segment;

pub(crate) use arena::{Arenas, Block, Lent, MAX_SEGMENTS, Mark};
pub(crate) use segment::Segment;
