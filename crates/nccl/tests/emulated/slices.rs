//! Memory of programs that use cudarc themselves.

use cudarc::driver::CudaContext;
use phalanx_nccl::buffer_from_slice;
use phalanx_pg::{ProcessGroupExt, ReduceOp};

use crate::device::Emulator;
use crate::scenarios::{connect, download};

#[test]
fn emu_a_slice_of_cudarcs_is_reduced_where_it_is() {
    Emulator::new().world(2).run(|rank| {
        let group = connect(rank);
        let stream = CudaContext::new(rank.rank()).unwrap().new_stream().unwrap();
        let slice = stream.clone_htod(&[rank.rank() as f32 + 1.0; 100]).unwrap();
        let sum = group.allreduce(buffer_from_slice(slice), ReduceOp::Sum);
        let sum = sum.unwrap().wait().unwrap();
        assert_eq!(download::<f32>(&*group, &sum), [3.0; 100]);
        drop(sum);
        stream.synchronize().unwrap();
        group.shutdown().unwrap();
    });
}
