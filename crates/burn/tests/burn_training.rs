//! Several processes train as one process does that has all of the batch.

mod common;

use std::ops::Range;

use burn::module::Module;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::Tensor;
use common::ranks::{DEADLINE, connect, distance, same_bits, share};
use common::{Cnn, Mlp, Reader, device, weights};
use phalanx_burn::{Ddp, DdpConfig};
use phalanx_testkit::{Rank, World};

const STEPS: usize = 50;
const ROWS: usize = 12;
const LEARNING_RATE: f64 = 0.05;
/// How far weights may be from those of one process: sums of products are taken in another order,
/// and 50 steps add up.
const TOLERANCE: f32 = 2e-5;

fn sgd() -> ModuleOptimizer {
    let momentum = MomentumConfig::new().with_momentum(0.9);
    SgdConfig::new().with_momentum(Some(momentum)).init()
}

/// Small enough for several buckets, which start while backward runs.
fn small_buckets() -> DdpConfig {
    DdpConfig {
        bucket_cap_mb: Some(0.001),
        ..DdpConfig::default()
    }
}

/// Trains with the group by `loss` of this rank's examples, and alone by the mean of all ranks'.
fn compare<M: Module>(
    ctx: &Rank,
    model: impl FnOnce() -> M,
    loss: impl Fn(&M, usize, usize, Range<usize>) -> Tensor<1>,
) {
    let group = connect(ctx);
    let (rank, ranks) = (group.rank(), group.size());
    // Other values on each rank: all get rank 0's.
    device().seed(100 + rank as u64);
    let mut ddp = Ddp::new(model(), group.clone(), small_buckets()).unwrap();
    let mut alone = ddp.model().clone();
    let start = weights(&alone);
    let (mut optim, mut optim_alone) = (sgd(), sgd());
    for step in 0..STEPS {
        let own = ddp.forward(|model| loss(model, step, rank, share(rank, ranks, ROWS)));
        let grads = ddp.backward(own.unwrap()).unwrap();
        ddp.update(|model| optim.step(LEARNING_RATE, model, grads));
        assert!(same_bits(&*group, &weights(ddp.model())), "step {step}");

        let shares = (0..ranks).map(|rank| loss(&alone, step, rank, share(rank, ranks, ROWS)));
        let whole = shares.reduce(|sum, loss| sum + loss).unwrap() / ranks as f64;
        let grads = GradientsParams::from_grads(whole.backward(), &alone);
        alone = optim_alone.step(LEARNING_RATE, alone, grads);
    }
    let moved = distance(&start, &weights(ddp.model()));
    let apart = distance(&weights(&alone), &weights(ddp.model()));
    println!("weights moved by up to {moved:e}, and are {apart:e} from those of one process");
    assert!(moved > 0.01, "nothing was learned: {moved}");
    assert!(apart <= TOLERANCE, "{apart} from one process");
    assert!(ddp.reducer().buckets().len() > 1, "nothing could overlap");
    group.shutdown().unwrap();
}

#[test]
fn two_ranks_train_an_mlp_as_one_process_does() {
    World::new(2).deadline(DEADLINE).run(|ctx| {
        let model = || Mlp::new(&[16, 24, 24, 5], &device());
        compare(ctx, model, |mlp, step, _, rows| mlp.loss(step, rows));
    });
}

#[test]
fn three_ranks_train_a_transformer_as_one_process_does() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        let model = || Reader::new(&device());
        compare(ctx, model, |reader, step, _, rows| reader.loss(step, rows));
    });
}

#[test]
fn two_ranks_train_a_cnn_with_batch_norm_and_dropout_as_one_process_does() {
    World::new(2).deadline(DEADLINE).run(|ctx| {
        // Each rank normalises over its own examples and drops units of its own choice; one process
        // does the same by taking the shares one after the other, with the ranks' seeds.
        compare(
            ctx,
            || Cnn::new(&device()),
            |cnn, step, rank, rows| {
                device().seed((step * 100 + rank) as u64);
                cnn.loss(step, rows)
            },
        );
    });
}

/// The mean of the whole batch rather than of the shares: the same for models without batch norm.
#[test]
fn the_average_over_shares_is_the_gradient_of_the_whole_batch() {
    World::new(2).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        let mut ddp = Ddp::new(Reader::new(&device()), group.clone(), small_buckets()).unwrap();
        let mut alone = ddp.model().clone();
        let (mut optim, mut optim_alone) = (sgd(), sgd());
        for step in 0..STEPS {
            let rows = share(group.rank(), group.size(), ROWS);
            let loss = ddp.forward(|reader| reader.loss(step, rows)).unwrap();
            let grads = ddp.backward(loss).unwrap();
            ddp.update(|model| optim.step(LEARNING_RATE, model, grads));
            let loss = alone.loss(step, 0..ROWS);
            let grads = GradientsParams::from_grads(loss.backward(), &alone);
            alone = optim_alone.step(LEARNING_RATE, alone, grads);
        }
        let apart = distance(&weights(&alone), &weights(ddp.model()));
        println!("{apart:e} from one process with the whole batch");
        assert!(apart <= TOLERANCE, "{apart}");
        group.shutdown().unwrap();
    });
}
