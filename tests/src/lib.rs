//! Tests that cross crates, and the examples in the documentation: each Rust block of the README
//! and of `docs/` is compiled, and run unless it says otherwise.
#![forbid(unsafe_code)]

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
mod readme {}

#[cfg(doctest)]
#[doc = include_str!("../../docs/store.md")]
mod store {}

#[cfg(doctest)]
#[doc = include_str!("../../docs/rendezvous.md")]
mod rendezvous {}
