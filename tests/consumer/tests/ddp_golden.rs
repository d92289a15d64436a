//! PyTorch's DDP, replayed on this backend: what is above process groups does not care which.

// Formatted where it lives.
#[rustfmt::skip]
#[path = "../../../crates/ddp/tests/common/golden.rs"]
mod golden;

use std::sync::Arc;
use std::time::Duration;

use phalanx_testkit::World;

#[test]
fn training_gives_pytorchs_numbers() {
    let world = World::new(2).deadline(Duration::from_secs(240));
    world.env("PHALANX_TIMEOUT", "60").run(|ctx| {
        phalanx_files::register().unwrap();
        let group = phalanx::init_with("files").unwrap();
        for case in golden::load(ctx.size()) {
            golden::replay(&case, Arc::clone(&group));
        }
        group.shutdown().unwrap();
    });
}
