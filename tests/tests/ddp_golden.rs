//! PyTorch's DDP, replayed on every built-in backend, one real process per rank.

#[path = "../../crates/ddp/tests/common/golden.rs"]
mod golden;

use std::sync::Arc;
use std::time::Duration;

use phalanx_tests::world_for;

#[test]
fn every_backend_gives_pytorchs_numbers() {
    for backend in phalanx::backends() {
        for size in [2, 4] {
            let world = world_for(&backend, size).deadline(Duration::from_secs(240));
            world.run(|ctx| {
                let group = phalanx::init().unwrap();
                for case in golden::load(ctx.size()) {
                    golden::replay(&case, Arc::clone(&group));
                }
                group.shutdown().unwrap();
            });
        }
    }
}
