//! Several processes train as one process does that has all of the batch.

mod common;

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, SGD, VarBuilder, VarMap};
use common::ranks::{DEADLINE, connect, distance, resident, same_bits, share};
use common::{Mlp, Model, Reader, flat};
use phalanx_candle::{Ddp, DdpConfig, Sgd};
use phalanx_testkit::{Rank, World};

const STEPS: usize = 50;
const ROWS: usize = 12;
const LEARNING_RATE: f64 = 0.1;
/// How far weights may be from those of one process, where they move by half: sums of products are
/// taken in another order, and 50 steps add up. It was less than 1e-6 in 600 trainings, each with other
/// first values.
const TOLERANCE: f32 = 1e-5;

/// Small enough for several buckets, which start while backward runs.
fn small_buckets() -> DdpConfig {
    DdpConfig {
        bucket_cap_mb: Some(0.001),
        ..DdpConfig::default()
    }
}

/// Values by name, in the order of the names.
fn weights(tensors: impl IntoIterator<Item = (String, Tensor)>) -> Vec<f32> {
    let sorted: BTreeMap<String, Tensor> = tensors.into_iter().collect();
    sorted.values().flat_map(flat).collect()
}

fn vars_of(map: &VarMap) -> Vec<f32> {
    let map = map.data().lock().unwrap();
    weights(
        map.iter()
            .map(|(name, var)| (name.clone(), var.as_tensor().clone())),
    )
}

/// A model of one process with the given values.
fn single<M: Model>(values: &VarMap) -> (VarMap, M) {
    let map = VarMap::new();
    let model = M::build(VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu)).unwrap();
    let values = values.data().lock().unwrap();
    for (name, var) in map.data().lock().unwrap().iter() {
        var.set(values[name].as_tensor()).unwrap();
    }
    (map, model)
}

fn assert_close(together: &[f32], alone: &[f32], start: &[f32]) {
    let (moved, apart) = (distance(start, together), distance(alone, together));
    println!("weights moved by up to {moved:e}, and are {apart:e} from those of one process");
    assert!(moved > 0.01, "nothing was learned: {moved}");
    assert!(apart <= TOLERANCE, "{apart} from one process");
}

/// With `Var`s and candle's optimizer.
fn compare<M: Model>(ctx: &Rank) {
    let group = connect(ctx);
    let vars = VarMap::new();
    let mut ddp = Ddp::new(&vars, DType::F32, M::build, group.clone(), small_buckets()).unwrap();
    let (alone, model) = single::<M>(&vars);
    let start = vars_of(&vars);
    let mut sgd = SGD::new(vars.all_vars(), LEARNING_RATE).unwrap();
    let mut sgd_alone = SGD::new(alone.all_vars(), LEARNING_RATE).unwrap();
    for step in 0..STEPS {
        let rows = share(group.rank(), group.size(), ROWS);
        let loss = ddp.forward(|model: &M| model.loss(step, rows)).unwrap();
        let grads = ddp.backward(&loss).unwrap();
        ddp.update(|_| sgd.step(&grads)).unwrap();
        assert!(same_bits(&*group, &vars_of(&vars)), "step {step}");
        sgd_alone
            .backward_step(&model.loss(step, 0..ROWS).unwrap())
            .unwrap();
    }
    assert!(ddp.reducer().buckets().len() > 1, "nothing could overlap");
    assert_close(&vars_of(&vars), &vars_of(&alone), &start);
    group.shutdown().unwrap();
}

/// With parameters that stay in place and the optimizer for them.
fn compare_in_place<M: Model>(ctx: &Rank) {
    let group = connect(ctx);
    let mut ddp = Ddp::in_place(DType::F32, M::build, group.clone(), small_buckets()).unwrap();
    let own = |ddp: &mut Ddp<M, _>| {
        let tensors = ddp.update(|parameters: &phalanx_candle::InPlace| Ok(parameters.tensors()));
        tensors.unwrap()
    };
    let tensors = own(&mut ddp);
    let alone = VarMap::new();
    let model = M::build(VarBuilder::from_varmap(&alone, DType::F32, &Device::Cpu)).unwrap();
    for (name, var) in alone.data().lock().unwrap().iter() {
        var.set(&tensors[name]).unwrap();
    }
    let start = vars_of(&alone);
    let mut sgd = Sgd::new(LEARNING_RATE);
    let mut sgd_alone = SGD::new(alone.all_vars(), LEARNING_RATE).unwrap();
    for step in 0..STEPS {
        let rows = share(group.rank(), group.size(), ROWS);
        let loss = ddp.forward(|model| model.loss(step, rows)).unwrap();
        let grads = ddp.backward(&loss).unwrap();
        ddp.update(|parameters| sgd.step(parameters, &grads))
            .unwrap();
        drop(grads);
        assert!(same_bits(&*group, &weights(own(&mut ddp))), "step {step}");
        sgd_alone
            .backward_step(&model.loss(step, 0..ROWS).unwrap())
            .unwrap();
    }
    assert_close(&weights(own(&mut ddp)), &vars_of(&alone), &start);
    group.shutdown().unwrap();
}

#[test]
fn two_ranks_train_an_mlp_as_one_process_does() {
    World::new(2).deadline(DEADLINE).run(|ctx| {
        compare::<Mlp>(ctx);
    });
}

#[test]
fn three_ranks_train_a_transformer_as_one_process_does() {
    World::new(3).deadline(DEADLINE).run(|ctx| {
        compare::<Reader>(ctx);
    });
}

#[test]
fn two_ranks_train_an_mlp_in_place_as_one_process_does() {
    World::new(2).deadline(DEADLINE).run(|ctx| {
        compare_in_place::<Mlp>(ctx);
    });
}

#[test]
fn two_ranks_train_a_transformer_in_place_as_one_process_does() {
    World::new(2).deadline(DEADLINE).run(|ctx| {
        compare_in_place::<Reader>(ctx);
    });
}

/// Both get the same gradients: Adam makes a whole step of a gradient near 0, so that those of two
/// backwards, which differ in their last bits, would take the weights apart.
#[test]
fn the_optimizers_in_place_compute_what_candles_do() {
    let vars = VarMap::new();
    let group = common::ranks::alone();
    let mut ddp = Ddp::in_place(DType::F32, Mlp::build, group, DdpConfig::default()).unwrap();
    let model = Mlp::build(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu)).unwrap();
    ddp.update(|parameters| {
        let tensors = parameters.tensors();
        let map = vars.data().lock().unwrap();
        map.iter()
            .try_for_each(|(name, var)| var.set(&tensors[name]))
    })
    .unwrap();
    let start = vars_of(&vars);
    let params = ParamsAdamW {
        lr: 0.01,
        ..ParamsAdamW::default()
    };
    let mut own = phalanx_candle::AdamW::new(params.clone());
    let mut candles = AdamW::new(vars.all_vars(), params).unwrap();
    for step in 0..20 {
        let loss = ddp.forward(|model: &Mlp| model.loss(step, 0..8)).unwrap();
        let grads = ddp.backward(&loss).unwrap();
        // candle makes a store of gradients only in a backward.
        let mut store = model.loss(step, 0..8).unwrap().backward().unwrap();
        let values = ddp.update(|parameters| {
            let map = vars.data().lock().unwrap();
            for (index, (name, tensor)) in parameters.parameters().enumerate() {
                let grad: &[f32] = grads.get(index).unwrap().as_slice().unwrap();
                let grad = Tensor::from_slice(grad, tensor.shape(), &Device::Cpu)?;
                store.insert(&map[name], grad).unwrap();
            }
            own.step(parameters, &grads)?;
            Ok(weights(parameters.tensors()))
        });
        candles.step(&store).unwrap();
        let apart = distance(&values.unwrap(), &vars_of(&vars));
        assert!(apart < 4e-7, "step {step}: {apart}");
    }
    let moved = distance(&start, &vars_of(&vars));
    assert!(moved > 0.01, "nothing was learned: {moved}");
}

#[test]
fn a_thousand_steps_need_no_more_memory_than_a_hundred() {
    const STEPS: usize = 1000;
    const ROOM: usize = 4 << 20;
    World::new(2).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        let vars = VarMap::new();
        let mut ddp = Ddp::new(
            &vars,
            DType::F32,
            Reader::build,
            group.clone(),
            small_buckets(),
        )
        .unwrap();
        let mut adam = AdamW::new(vars.all_vars(), ParamsAdamW::default()).unwrap();
        let mut early = 0;
        for step in 0..STEPS {
            let loss = ddp
                .forward(|model: &Reader| model.loss(step, 0..2))
                .unwrap();
            let grads = ddp.backward(&loss).unwrap();
            ddp.update(|_| adam.step(&grads)).unwrap();
            if step == STEPS / 10 {
                early = resident();
            }
        }
        let late = resident();
        println!(
            "{} KB after {}, {} KB after {STEPS} steps",
            early >> 10,
            STEPS / 10,
            late >> 10
        );
        assert!(late <= early + ROOM, "{early} bytes grew to {late}");
        group.shutdown().unwrap();
    });
}
