//! What ranks do differently, and what must become the same.

mod common;

use std::collections::BTreeSet;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, InMemDataset};
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::{Device, Int, Tensor};
use common::ranks::{DEADLINE, connect};
use common::{Cnn, Mlp, device, numbers, weights};
use phalanx_burn::{Ddp, DdpConfig, ShardedDataset, seed_rank};
use phalanx_pg::{FakeGroup, ProcessGroupExt};
use phalanx_testkit::World;

#[test]
fn running_states_are_rank_0s() {
    World::new(2).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        let mut ddp = Ddp::new(Cnn::new(&device()), group.clone(), DdpConfig::default()).unwrap();
        // Rank 0's examples, by a module that nobody else writes to.
        let alone = ddp.model().valid().train();
        for step in 0..4 {
            let rows = group.rank() * 4..group.rank() * 4 + 4;
            let loss = ddp.forward(|cnn| cnn.loss(step, rows)).unwrap();
            ddp.backward(loss).unwrap();
            drop(alone.loss(step, 0..4));
        }
        let mean = ddp.infer(|cnn| cnn.norm.running_mean.value()).unwrap();
        let expected = alone.norm.running_mean.value_sync();
        assert_eq!(mean.into_data(), expected.into_data());
        assert!(ddp.replicas_agree().unwrap());
        group.shutdown().unwrap();
    });
}

/// A layer with tensors that are not trained, of other types than floats too.
#[derive(Module, Debug)]
struct Mixed {
    linear: Linear,
    frozen: Linear,
    table: Param<Tensor<1, Int>>,
}

impl Mixed {
    fn new(rank: usize, device: &Device) -> Self {
        let linear = || burn::nn::LinearConfig::new(3, 3).init(device);
        let table = Tensor::from_data([rank as i64, 7], device);
        Self {
            linear: linear(),
            frozen: linear().no_grad(),
            table: Param::initialized(burn::module::ParamId::new(), table),
        }
    }
}

#[test]
fn all_tensors_begin_as_rank_0s() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        seed_rank(&device(), 5, &*group);
        let model = Mixed::new(ctx.rank(), &device());
        let before = group.allgather_slice(&weights(&model)).unwrap();
        let own: BTreeSet<Vec<u32>> = before
            .chunks_exact(12)
            .map(|weights| weights.iter().map(|weight| weight.to_bits()).collect())
            .collect();
        assert_eq!(own.len(), 3, "seeds differ");
        let ddp = Ddp::new(model, group.clone(), DdpConfig::default()).unwrap();
        assert!(ddp.replicas_agree().unwrap());
        let table: Vec<i64> = ddp.model().table.val().into_data().iter().collect();
        assert_eq!(table, [0, 7]);
        assert_eq!(weights(ddp.model()), before[..12]);
        group.shutdown().unwrap();
    });
}

#[test]
fn different_models_are_an_error_on_every_rank() {
    World::new(2).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        let width = 5 + ctx.rank();
        let model = Mlp::new(&[4, width, 3], &device());
        let err = Ddp::new(model, group.clone(), DdpConfig::default()).unwrap_err();
        assert!(err.to_string().contains("layers.0.weight"), "{err}");
        // A model that this rank alone cannot train.
        let device = if ctx.rank() == 0 {
            device()
        } else {
            Device::flex()
        };
        let model = Mlp::new(&[4, 4], &device);
        let err = Ddp::new(model, group.clone(), DdpConfig::default()).unwrap_err();
        assert!(
            err.to_string().contains("different numbers of parameters"),
            "{err}"
        );
        group.shutdown().unwrap();
    });
}

#[test]
fn a_layer_that_only_one_rank_uses_gets_its_share() {
    World::new(2).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        let config = DdpConfig {
            find_unused_parameters: true,
            ..DdpConfig::default()
        };
        let mlp = Mlp::new(&[4, 4, 4, 4], &device());
        let mut ddp = Ddp::new(mlp, group.clone(), config).unwrap();
        for _ in 0..3 {
            let x = numbers(0..4, [0, 4], 0);
            let loss = ddp.forward(|mlp| {
                // Nobody uses the second layer, and only rank 1 the third.
                let x = mlp.layers[0].forward(x);
                match ctx.rank() {
                    0 => x.square().mean(),
                    _ => mlp.layers[2].forward(x).square().mean(),
                }
            });
            let grads = ddp.backward(loss.unwrap()).unwrap();
            let layers = &ddp.model().layers;
            assert!(grads.get::<2>(layers[1].weight.id).is_none());
            let own = grads.get::<2>(layers[2].weight.id).unwrap().into_data();
            let own = own.try_to_vec::<f32>().unwrap();
            let all = group.allgather_slice(&own).unwrap();
            assert_eq!(all[..own.len()], all[own.len()..]);
            assert!(own.iter().any(|value| *value != 0.0));
        }
        group.shutdown().unwrap();
    });
}

#[test]
fn a_data_set_is_divided_without_rest() {
    let all = || InMemDataset::new((0..10).collect::<Vec<usize>>());
    let shares = |divide: fn(ShardedDataset<InMemDataset<usize>>) -> Vec<usize>| {
        let share = |rank| divide(ShardedDataset::new(all(), &FakeGroup::new(rank, 4)).unwrap());
        (0..4).map(share).collect::<Vec<_>>()
    };
    let items = |share: &ShardedDataset<InMemDataset<usize>>| -> Vec<usize> {
        share.iter().map(Result::unwrap).collect()
    };
    let padded = shares(|share| share.iter().map(Result::unwrap).collect());
    assert_eq!(padded, [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]);
    let dropped = shares(|share| share.drop_last().iter().map(Result::unwrap).collect());
    assert_eq!(dropped, [[0, 4], [1, 5], [2, 6], [3, 7]]);
    let uneven = shares(|share| {
        let share = share.shuffle(1).uneven();
        share.set_epoch(3);
        share.iter().map(Result::unwrap).collect()
    });
    assert_eq!(uneven.concat().len(), 10);
    assert_eq!(
        uneven.concat().into_iter().collect::<BTreeSet<_>>().len(),
        10
    );

    let share = ShardedDataset::new(all(), &FakeGroup::new(1, 2))
        .unwrap()
        .shuffle(3);
    let other = share.clone();
    let first = items(&share);
    other.set_epoch(1);
    assert_ne!(items(&share), first, "clones share the epoch");
    other.set_epoch(0);
    assert_eq!(items(&share), first);
    assert_eq!(share.get_many(vec![1, 0]).unwrap(), [first[1], first[0]]);
}

#[derive(Clone)]
struct Collect;

impl Batcher<usize, Vec<usize>> for Collect {
    fn batch(&self, items: Vec<usize>, _: &Device) -> Vec<usize> {
        items
    }
}

#[test]
fn burns_loaders_read_a_share() {
    let all = InMemDataset::new((0..20).collect::<Vec<usize>>());
    let share = ShardedDataset::new(all, &FakeGroup::new(0, 2))
        .unwrap()
        .shuffle(7);
    let loader = DataLoaderBuilder::new(Collect)
        .batch_size(4)
        .num_workers(2)
        .build(share.clone());
    for epoch in 0..2 {
        share.set_epoch(epoch);
        let read: BTreeSet<usize> = loader.iter().flat_map(Result::unwrap).collect();
        let expected: BTreeSet<usize> = share.iter().map(Result::unwrap).collect();
        assert_eq!(read, expected);
    }
}
