//! The backend on the emulated device: real processes, no GPU.

mod common;

use common::{Emulator, connect, download, upload};
use phalanx_pg::{ProcessGroupExt, ReduceOp};

#[test]
fn emu_ranks_sum_their_values() {
    let emulator = Emulator::new();
    emulator.world(2).run(|rank| {
        let group = connect(rank);
        let mine = upload(&*group, &[rank.rank() as f32 + 1.0; 4]);
        let sum = group
            .allreduce(mine, ReduceOp::Sum)
            .unwrap()
            .wait()
            .unwrap();
        assert_eq!(download::<f32>(&*group, &sum), [3.0; 4]);
        group.shutdown().unwrap();
    });
}
