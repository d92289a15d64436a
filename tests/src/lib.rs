//! Tests that cross crates, and the examples in the documentation: each Rust block of the README
//! and of `docs/` is compiled, and run unless it says otherwise.
#![forbid(unsafe_code)]

pub mod example;

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use phalanx::prelude::*;
use phalanx_reference::ReferenceGroup;
use phalanx_testkit::World;

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
    let examples = ["--example", "allreduce", "--example", "checkpoint"];
    BUILT.get_or_init(|| build(&examples)).clone()
}

/// What the tests around this are built without, which this has to leave out too: other packages
/// mean other features, and everything built again.
fn left_out() -> Vec<String> {
    let packages = std::env::var("PHALANX_WITHOUT").unwrap_or_default();
    let packages = packages.split(',').filter(|package| !package.is_empty());
    packages
        .flat_map(|package| ["--exclude".into(), package.into()])
        .collect()
}

/// The directory with the program `phalanx` and what else cargo is told to build.
///
/// # Panics
///
/// If it does not build.
pub fn build(targets: &[&str]) -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let deps = test.parent().expect("a directory");
    let built = deps.parent().expect("a directory above it").to_owned();
    let target = built.parent().expect("a target directory");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // The whole workspace, so that features, and with them what is built already, are the same.
    let status = Command::new(cargo)
        .args(["build", "--quiet", "--workspace", "--bin", "phalanx"])
        .args(targets)
        .args(left_out())
        // Said again: a relative CARGO_TARGET_DIR was meant from elsewhere.
        .arg("--target-dir")
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .expect("run cargo build");
    assert!(status.success(), "the programs do not build");
    built
}

/// Ranks that the right launcher for a backend starts: mpirun for `mpi`, the testkit for others.
pub fn world_for(backend: &str, size: usize) -> World {
    let world = World::new(size).env("PHALANX_BACKEND", backend);
    match backend {
        "mpi" => world
            // More ranks than processors, and as root if need be: what Open MPI would refuse.
            .launcher(["mpirun", "-n", "{n}", "--oversubscribe"])
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .env("OMPI_MCA_mpi_yield_when_idle", "1"),
        _ => world,
    }
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
#[doc = include_str!("../../docs/backends.md")]
mod backends {}

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
