//! Checkpoints between real processes.

use phalanx::checkpoint::{Checkpoints, TensorRef};
use phalanx::prelude::*;
use phalanx_testkit::World;

#[test]
fn every_rank_gets_the_tensors_and_its_own_state() {
    World::new(3).run(|ctx| {
        let group = phalanx::init().unwrap();
        let checkpoints = Checkpoints::new(ctx.dir().join("checkpoints"));
        assert!(checkpoints.load::<usize>(&*group).unwrap().is_none());
        // Rank 0's tensors are what counts.
        let weights = [group.rank() as f32, 2.0, 3.0, 4.0];
        let counts = [7i64];
        for step in [3, 4] {
            let tensors = [
                ("weights", TensorRef::new(&[2, 2], &weights).unwrap()),
                ("counts", TensorRef::new(&[1], &counts).unwrap()),
            ];
            let state = 100 * step as usize + group.rank();
            checkpoints.save(&*group, step, &tensors, &state).unwrap();
        }
        let loaded = checkpoints.load::<usize>(&*group).unwrap().unwrap();
        assert_eq!(loaded.step, 4);
        assert_eq!(*loaded.state(group.rank()).unwrap(), 400 + group.rank());
        assert_eq!(loaded.states, [400, 401, 402]);
        let weights = loaded.tensor("weights").unwrap();
        assert_eq!(weights.shape(), [2, 2]);
        assert_eq!(weights.to_vec::<f32>().unwrap(), [0.0, 2.0, 3.0, 4.0]);
        assert_eq!(
            loaded.tensor("counts").unwrap().to_vec::<i64>().unwrap(),
            [7]
        );
        let err = loaded
            .tensor("weights")
            .unwrap()
            .to_vec::<f64>()
            .unwrap_err();
        assert!(err.to_string().contains("F32, not of f64"), "{err}");
        let err = loaded.tensor("wieghts").unwrap_err().to_string();
        assert!(err.contains("wieghts") && err.contains("counts"), "{err}");
        let err = loaded.state(3).unwrap_err().to_string();
        assert!(err.contains("saved by 3 ranks"), "{err}");
        group.shutdown().unwrap();
    });
}

#[test]
fn all_ranks_learn_that_a_checkpoint_cannot_be_written_or_read() {
    World::new(2).run(|ctx| {
        let group = phalanx::init().unwrap();
        // Where the directory should be, there is a file.
        let path = ctx.dir().join("in-the-way");
        std::fs::write(&path, "").unwrap();
        let tensors = [("w", TensorRef::new(&[1], &[1.0f32]).unwrap())];
        let save = |dir: &std::path::Path| Checkpoints::new(dir).save(&*group, 1, &tensors, &());
        let err = save(&path.join("below")).unwrap_err().to_string();
        assert!(err.contains("checkpoint 1 was not saved in"), "{err}");
        let dir = ctx.dir().join("fine");
        save(&dir).unwrap();
        let err = Checkpoints::new(&dir).load::<String>(&*group).unwrap_err();
        assert!(
            err.to_string().contains("not what this program expects"),
            "{err}"
        );
        group.barrier().unwrap();
        if group.rank() == 0 {
            for file in dir.read_dir().unwrap() {
                std::fs::write(file.unwrap().path(), "damaged").unwrap();
            }
        }
        group.barrier().unwrap();
        let err = Checkpoints::new(&dir).load::<()>(&*group).unwrap_err();
        assert!(err.to_string().contains("no checkpoint is whole"), "{err}");
        // The group is as it was.
        group.barrier().unwrap();
        group.shutdown().unwrap();
    });
}

#[test]
fn a_shape_that_does_not_fit_is_refused() {
    let err = TensorRef::new(&[2, 2], &[1.0f32]).unwrap_err().to_string();
    assert!(err.contains("has 4 elements, not 1"), "{err}");
}
