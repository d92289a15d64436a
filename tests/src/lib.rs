//! Tests that cross crates, and the examples in the documentation: each Rust block of the README
//! and of `docs/` is compiled, and run unless it says otherwise.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, OnceLock};

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

/// The directory with the program `phalanx`, and below it `examples/` with those of the facade.
///
/// Built if need be: cargo makes the programs of other packages for no test.
///
/// # Panics
///
/// If they do not build.
pub fn programs() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let build = || {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        // The whole workspace, so that features, and with them what is built already, are the same.
        let status = Command::new(cargo)
            .args(["build", "--quiet", "--workspace", "--bin", "phalanx"])
            .args(["--example", "allreduce", "--example", "checkpoint"])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()
            .expect("run cargo build");
        assert!(status.success(), "the programs do not build");
        let test = std::env::current_exe().expect("the path of this test");
        let deps = test.parent().expect("a directory");
        deps.parent().expect("a directory above it").to_owned()
    };
    BUILT.get_or_init(build).clone()
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
#[doc = include_str!("../../docs/native-backend.md")]
mod native_backend {}

#[cfg(doctest)]
#[doc = include_str!("../../docs/nccl.md")]
mod nccl {}

#[cfg(doctest)]
#[doc = include_str!("../../docs/custom-backend.md")]
mod custom_backend {}

#[cfg(doctest)]
#[doc = include_str!("../../docs/checkpoints.md")]
mod checkpoints {}

#[doc = include_str!("../../docs/ddp.md")]
mod ddp {}
