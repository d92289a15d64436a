//! What every implementation of a Phalanx trait has to do, as code that runs against any of them.
//!
//! | module | for |
//! |---|---|
//! | [`store`] | whoever writes a [`Store`](phalanx_store::Store): the cases, one by one or all, and a form for several processes |
//! | [`group`] | whoever writes a [`ProcessGroup`](phalanx_pg::ProcessGroup): run by every rank, threads or processes |
//! | [`chaos`] | backends whose ranks may die: a random mix of calls in which one is killed or stopped |
//! | [`fuzz`] | the parsers and the server's state machine under arbitrary bytes, for fuzzers and property tests |
#![forbid(unsafe_code)]

pub mod chaos;
pub mod fuzz;
pub mod group;
pub mod store;
