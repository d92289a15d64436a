//! Tests that cross crates, and the examples in the documentation: each Rust block of the README
//! and of `docs/` is compiled, and run unless it says otherwise.
#![forbid(unsafe_code)]

use std::sync::Arc;

use phalanx::prelude::*;
use phalanx_reference::ReferenceGroup;

/// Runs `body` as every rank of a group of two threads, so that an example shows what it is about.
///
/// # Panics
///
/// If a rank fails.
pub fn on_two_ranks(body: fn(Arc<dyn ProcessGroup>) -> phalanx::Result<()>) {
    std::thread::scope(|scope| {
        for group in ReferenceGroup::threads(2) {
            scope.spawn(move || body(group).expect("the example works"));
        }
    });
}

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
mod readme {}

#[cfg(doctest)]
#[doc = include_str!("../../docs/store.md")]
mod store {}

#[cfg(doctest)]
#[doc = include_str!("../../docs/rendezvous.md")]
mod rendezvous {}

#[cfg(doctest)]
#[doc = include_str!("../../docs/process-groups.md")]
mod process_groups {}

#[cfg(doctest)]
#[doc = include_str!("../../docs/custom-backend.md")]
mod custom_backend {}
