//! Sparse tensors that do not go together.

use phalanx_pg::{Buffer, DType, ErrorKind, ProcessGroupExt, Sparse};

mod common;

fn tensor(dtype: DType, dims: usize, row_len: usize) -> Sparse {
    Sparse {
        indices: vec![0; 2 * dims],
        dims,
        values: Buffer::zeroed(dtype, 2 * row_len),
    }
}

#[test]
fn ranks_that_differ_are_told_so_on_every_rank() {
    let errors = common::ranks(3, |rank, group| {
        let odd = rank == 2;
        let bad: [fn(bool) -> Sparse; 3] = [
            |odd| tensor(if odd { DType::I32 } else { DType::F32 }, 1, 4),
            |odd| tensor(DType::F32, if odd { 2 } else { 1 }, 4),
            |odd| tensor(DType::F32, 1, if odd { 3 } else { 4 }),
        ];
        let errors = bad.map(|make| group.allreduce_sparse(make(odd)).unwrap_err());
        common::assert_usable(&*group);
        group.shutdown().unwrap();
        errors
    });
    for (rank, errors) in errors.iter().enumerate() {
        let words = ["element type", "dimensions", "row"];
        for (err, word) in errors.iter().zip(words) {
            assert_eq!(err.kind(), ErrorKind::Mismatch, "rank {rank}: {err}");
            assert!(err.to_string().contains(word), "rank {rank}: {err}");
        }
    }
}
