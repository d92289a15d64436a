//! Collectives of the ranks that share a host.
//!
//! | file | what it is |
//! |---|---|
//! | `control.rs` | the segment through which they coordinate: where each word is |
//! | `descriptor.rs` | what a rank says about its part in an operation |
//! | `books.rs` | which operations have been announced, and what is in use for them |
//! | `bell.rs`, `wait.rs` | sleeping and waking; spinning, yielding, sleeping |
//! | `models.rs` | the protocol of the segment under a model checker |
//! | `local/` | one rank of a group on this host: announcing, meeting, waiting, breaking |
//! | `parts.rs` | reductions whose parts are done by whoever has a processor |
//! | `pull.rs` | calls in which each rank reads what it needs from the others' inputs |
//! | `joined.rs` | calls of a batch that are one operation |
//! | `reduce.rs` | calls in which each rank reduces a slice of everybody's memory |
//! | `asking.rs` | whether it asks for peers' lines before it reads them |

mod asking;
mod bell;
mod books;
mod control;
mod descriptor;
mod joined;
mod local;
#[cfg(test)]
mod models;
mod parts;
mod pull;
mod reduce;
mod wait;

pub(crate) use control::Control;
pub(crate) use descriptor::Descriptor;
pub(crate) use local::{Current, Input, Local, PerRank, SMALL_REDUCTION, Seat};
pub(crate) use reduce::slice_start;
