//! PyTorch's DDP, replayed with gradients in device memory.

use std::sync::Arc;
use std::time::Duration;

use phalanx_native::NativeGroup;
use phalanx_nccl::NcclGroup;
use phalanx_pg::ProcessGroup;
use phalanx_pg::registry::{self, GroupInit};
use phalanx_testkit::Rank;

#[path = "../../../ddp/tests/common/golden.rs"]
mod golden;

/// Host memory by the native backend, device memory by NCCL: as a program with GPUs would have it.
pub(crate) fn connect_both(rank: &Rank, timeout: Duration) -> Arc<dyn ProcessGroup> {
    registry::register("native", NativeGroup::connect).unwrap();
    registry::register("nccl", NcclGroup::connect).unwrap();
    let mut init = GroupInit::new(rank.store(), rank.rank(), rank.size());
    init.timeout = timeout;
    registry::create("cpu:native,cuda:nccl", &init).unwrap()
}

pub(crate) fn replay_all(rank: &Rank) {
    let group = connect_both(rank, Duration::from_secs(60));
    let (mut replayed, mut left_out) = (0, 0);
    for case in golden::load(rank.size()) {
        // Compressing on the device takes a kernel, which a hook of a framework's would bring.
        if case["hook"]
            .as_str()
            .is_some_and(|hook| hook.ends_with("compress"))
        {
            left_out += 1;
            continue;
        }
        golden::replay(&case, Arc::clone(&group));
        replayed += 1;
    }
    println!("{replayed} cases replayed, {left_out} left out");
    assert!(replayed >= 10 && left_out <= 2, "{replayed} and {left_out}");
    group.shutdown().unwrap();
}
