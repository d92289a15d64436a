//! The backend on the emulated device: real processes, no GPU.
//!
//! What these show is the backend's own order, ownership and handling of faults, against our
//! reading of CUDA's and NCCL's documentation (`tests/emu-cuda`, `tests/emu-nccl`).

mod device;
mod suite;

use device::{Emulator, connect, download, upload};
use phalanx_pg::{ProcessGroupExt, ReduceOp};

#[test]
fn emu_ranks_sum_their_values() {
    Emulator::new().world(2).run(|rank| {
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
