//! With one rank the averages are the gradients: those of plain candle, to the bit. And what must not
//! happen silently.

mod common;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, D, DType, Device, Layout, Module, Result, Shape, Tensor};
use candle_nn::{
    BatchNorm, Linear, ModuleT, VarBuilder, VarMap, batch_norm, layer_norm, linear, loss,
};
use common::ranks::{DEADLINE, Watched, alone, connect, distance};
use common::{Mlp, Model, Reader, classes, flat, numbers};
use phalanx_candle::{Ddp, DdpConfig, Error};
use phalanx_testkit::World;

/// Gradients of `Var`s by name, as bits.
fn gradients(vars: &VarMap, grads: &GradStore) -> Vec<(String, Option<Vec<u32>>)> {
    let map = vars.data().lock().unwrap();
    let bits = |tensor: &Tensor| flat(tensor).into_iter().map(f32::to_bits).collect();
    let all = map
        .iter()
        .map(|(name, var)| (name.clone(), grads.get(var).map(bits)));
    let mut all: Vec<_> = all.collect();
    all.sort();
    all
}

fn assert_same_as_plain<M: Model>() {
    let vars = VarMap::new();
    let mut ddp = Ddp::new(&vars, DType::F32, M::build, alone(), DdpConfig::default()).unwrap();
    let plain = M::build(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu)).unwrap();
    for step in 0..3 {
        let expected = plain.loss(step, 0..4).unwrap().backward().unwrap();
        let loss = ddp.forward(|model: &M| model.loss(step, 0..4)).unwrap();
        let grads = ddp.backward(&loss).unwrap();
        let (own, plain) = (gradients(&vars, &grads), gradients(&vars, &expected));
        for (own, plain) in own.iter().zip(&plain) {
            assert!(plain.1.is_some() && own == plain, "step {step}: {}", own.0);
        }
    }
}

#[test]
fn of_an_mlp_and_a_transformer() {
    assert_same_as_plain::<Mlp>();
    assert_same_as_plain::<Reader>();
}

#[test]
fn of_several_forwards_and_after_one_without_backward() {
    let vars = VarMap::new();
    let mut ddp = Ddp::new(&vars, DType::F32, Mlp::build, alone(), DdpConfig::default()).unwrap();
    let plain = Mlp::build(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu)).unwrap();
    drop(ddp.forward(|model: &Mlp| model.loss(9, 0..4)).unwrap());
    let first = ddp.forward(|model: &Mlp| model.loss(0, 0..4)).unwrap();
    let second = ddp.forward(|model: &Mlp| model.loss(1, 0..4)).unwrap();
    let grads = ddp.backward(&(first + second).unwrap()).unwrap();
    let expected = (plain.loss(0, 0..4).unwrap() + plain.loss(1, 0..4).unwrap()).unwrap();
    let expected = expected.backward().unwrap();
    assert_eq!(gradients(&vars, &grads), gradients(&vars, &expected));
}

#[test]
fn accumulated_gradients_count_once() {
    let vars = VarMap::new();
    let mut ddp = Ddp::new(&vars, DType::F32, Mlp::build, alone(), DdpConfig::default()).unwrap();
    let plain = Mlp::build(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu)).unwrap();
    for _ in 0..2 {
        {
            let mut ddp = ddp.no_sync();
            let loss = ddp.forward(|model: &Mlp| model.loss(0, 0..4)).unwrap();
            let own = ddp.backward(&loss).unwrap();
            let none = gradients(&vars, &own)
                .iter()
                .all(|(_, grad)| grad.is_none());
            assert!(none, "an optimizer could take them by mistake");
        }
        let loss = ddp.forward(|model: &Mlp| model.loss(1, 0..4)).unwrap();
        let grads = ddp.backward(&loss).unwrap();
        let expected = (plain.loss(0, 0..4).unwrap() + plain.loss(1, 0..4).unwrap()).unwrap();
        let expected = expected.backward().unwrap();
        for var in vars.all_vars() {
            let [own, plain] = [&grads, &expected].map(|grads| flat(grads.get(&var).unwrap()));
            assert!(distance(&own, &plain) < 1e-6);
        }
    }
}

fn text<T>(result: std::result::Result<T, Error>) -> String {
    match result {
        Ok(_) => panic!("that should not have worked"),
        Err(err) => err.to_string(),
    }
}

/// candle's own layer norm, or its own softmax over the last dimension.
struct Lossy {
    norm: Option<candle_nn::LayerNorm>,
    query: Linear,
    out: Linear,
}

impl Lossy {
    fn loss(&self, rows: Range<usize>) -> Result<Tensor> {
        let x = numbers(rows.clone(), 8, 0);
        let x = match &self.norm {
            Some(norm) => (norm.forward(&self.query.forward(&x)?)? + &x)?,
            None => (candle_nn::ops::softmax_last_dim(&self.query.forward(&x)?)? + &x)?,
        };
        loss::cross_entropy(&self.out.forward(&x)?, &classes(rows, 5, 0))
    }
}

#[test]
fn parameters_that_candle_does_not_differentiate_are_named() {
    for with_norm in [true, false] {
        let build = move |vb: VarBuilder<'_>| {
            Ok(Lossy {
                norm: with_norm
                    .then(|| layer_norm(8, 1e-5, vb.pp("norm")))
                    .transpose()?,
                query: linear(8, 8, vb.pp("query"))?,
                out: linear(8, 5, vb.pp("out"))?,
            })
        };
        let vars = VarMap::new();
        let mut ddp = Ddp::new(&vars, DType::F32, build, alone(), DdpConfig::default()).unwrap();
        let loss = ddp.forward(|model: &Lossy| model.loss(0..4)).unwrap();
        let message = text(ddp.backward(&loss));
        assert!(message.contains("query.weight"), "{message}");
        assert_eq!(message.contains("norm.weight"), with_norm, "{message}");
        assert!(
            message.contains("use phalanx_candle::layer_norm"),
            "{message}"
        );
        assert!(!message.contains("out.weight"), "{message}");
    }
}

#[test]
fn a_parameter_used_outside_forward_is_an_error() {
    let vars = VarMap::new();
    let mut ddp = Ddp::new(&vars, DType::F32, Mlp::build, alone(), DdpConfig::default()).unwrap();
    let loss = ddp.forward(|model: &Mlp| model.loss(0, 0..4)).unwrap();
    let weight = vars.data().lock().unwrap()["fc1.weight"].clone();
    let decay = weight.sqr().unwrap().sum_all().unwrap();
    let message = text(ddp.backward(&(loss + decay).unwrap()));
    assert!(
        message.contains("fc1.weight was used outside Ddp::forward"),
        "{message}"
    );
}

#[test]
fn in_place_a_backward_outside_ddp_is_an_error() {
    let mut ddp = Ddp::in_place(DType::F32, Mlp::build, alone(), DdpConfig::default()).unwrap();
    let loss = ddp.infer(|model: &Mlp| model.loss(0, 0..4)).unwrap();
    let err = loss.backward().unwrap_err().to_string();
    // A pass that is not open has nobody to hand gradients to.
    assert!(err.contains("outside of Ddp"), "{err}");
}

#[test]
fn in_place_nothing_can_be_ignored() {
    let config = DdpConfig {
        ignore: vec!["fc1.weight".into()],
        ..DdpConfig::default()
    };
    let message = text(Ddp::in_place(DType::F32, Mlp::build, alone(), config));
    assert!(
        message.contains("fc1.weight is on the ignore list"),
        "{message}"
    );
}

#[test]
fn a_model_that_asks_for_other_tensors_later_is_an_error() {
    let calls = AtomicUsize::new(0);
    let build = move |vb: VarBuilder<'_>| {
        let name = if calls.fetch_add(1, Ordering::Relaxed) == 0 {
            "first"
        } else {
            "second"
        };
        linear(4, 4, vb.pp(name))
    };
    let vars = VarMap::new();
    let mut ddp = Ddp::new(&vars, DType::F32, build, alone(), DdpConfig::default()).unwrap();
    let message = text(ddp.forward(|model: &Linear| model.forward(&numbers(0..4, 4, 0))));
    assert!(message.contains("asks for second.weight"), "{message}");
}

struct Normed {
    fc: Linear,
    norm: BatchNorm,
}

#[test]
fn running_means_are_buffers_and_rank_0s() {
    World::new(2).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        let build = |vb: VarBuilder<'_>| {
            Ok(Normed {
                fc: linear(4, 3, vb.pp("fc"))?,
                norm: batch_norm(3, 1e-5, vb.pp("norm"))?,
            })
        };
        let vars = VarMap::new();
        let config = DdpConfig::default();
        let mut ddp = Ddp::new(&vars, DType::F32, build, group.clone(), config).unwrap();
        let names: Vec<_> = ddp
            .reducer()
            .params()
            .iter()
            .map(|p| p.name.clone())
            .collect();
        assert_eq!(names, ["fc.weight", "fc.bias", "norm.weight", "norm.bias"]);
        for step in 0..3 {
            let rows = group.rank() * 4..group.rank() * 4 + 4;
            let loss = ddp.forward(|model: &Normed| {
                let x = model.fc.forward(&numbers(rows, 4, step))?;
                model.norm.forward_t(&x, true)?.sqr()?.sum_all()
            });
            ddp.backward(&loss.unwrap()).unwrap();
        }
        ddp.infer(|_| Ok(())).unwrap();
        assert!(ddp.replicas_agree().unwrap());
        let mean = vars.data().lock().unwrap()["norm.running_mean"].clone();
        assert!(
            flat(&mean).iter().any(|value| *value != 0.0),
            "nothing was tracked"
        );
        group.shutdown().unwrap();
    });
}

/// An identity that counts when its backward runs.
struct Probe(Arc<AtomicUsize>);

impl CustomOp1 for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(Some(grad.clone()))
    }
}

#[test]
fn each_layer_is_sent_before_backward_comes_to_the_next_one() {
    const LAYERS: usize = 12;
    let (count, notes) = (Arc::new(AtomicUsize::new(0)), Arc::default());
    let group = Watched {
        inner: alone(),
        count: Arc::clone(&count),
        notes: Arc::clone(&notes),
    };
    let config = DdpConfig {
        bucket_cap_mb: Some(0.000_001),
        ..DdpConfig::default()
    };
    let build = |vb: VarBuilder<'_>| {
        let layers = (0..LAYERS).map(|i| linear(8, 8, vb.pp(format!("fc{i}"))));
        layers.collect::<Result<Vec<Linear>>>()
    };
    let mut ddp = Ddp::in_place(DType::F32, build, Arc::new(group), config).unwrap();
    // The first pass learns the order in which gradients become ready.
    for _ in 0..2 {
        count.store(0, Ordering::Relaxed);
        notes.lock().clear();
        let loss = ddp.forward(|layers: &Vec<Linear>| {
            let x = layers.iter().try_fold(numbers(0..4, 8, 0), |x, layer| {
                layer
                    .forward(&x)?
                    .relu()?
                    .apply_op1(Probe(Arc::clone(&count)))
            })?;
            x.sqr()?.mean(D::Minus1)?.mean(0)
        });
        ddp.backward(&loss.unwrap()).unwrap();
    }
    let layers: Vec<usize> = (1..=LAYERS).flat_map(|n| [n; 2]).collect();
    assert_eq!(*notes.lock(), layers);
}
