//! With one rank the averages are the gradients: those of plain burn, to the bit.

mod common;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use common::ranks::{DEADLINE, alone, distance};
use common::{Cnn, Mlp, Reader, cross_entropy, device, numbers, weights};
use phalanx_burn::{Ddp, DdpConfig, Error};
use phalanx_testkit::World;

/// The gradients by path, as bits; `None` where there is none.
fn gradients<M: Module>(module: &M, grads: &GradientsParams) -> Vec<(String, Option<Vec<u32>>)> {
    struct Gradients<'a> {
        grads: &'a GradientsParams,
        path: Vec<String>,
        found: Vec<(String, Option<Vec<u32>>)>,
    }
    impl ModuleVisitor for Gradients<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.to_owned());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let bits = self.grads.get::<D>(param.id).map(|grad| {
                assert_eq!(grad.shape(), param.shape());
                let values = grad.into_data().try_to_vec::<f32>().unwrap();
                values.into_iter().map(f32::to_bits).collect()
            });
            self.found.push((self.path.join("."), bits));
        }
    }
    let mut visitor = Gradients {
        grads,
        path: Vec::new(),
        found: Vec::new(),
    };
    module.visit(&mut visitor);
    visitor.found
}

/// Compares gradients of three passes, with the buckets of the first and of later ones.
fn assert_same_as_plain<M: Module>(model: M, config: DdpConfig, loss: impl Fn(&M) -> Tensor<1>) {
    let mut ddp = Ddp::new(model.clone(), alone(), config).unwrap();
    for pass in 0..3 {
        device().seed(pass);
        let plain = GradientsParams::from_grads(loss(&model).backward(), &model);
        device().seed(pass);
        let loss = ddp.forward(&loss).unwrap();
        let grads = ddp.backward(loss).unwrap();
        let plain = gradients(&model, &plain);
        assert!(plain.iter().any(|(_, bits)| bits.is_some()));
        for (own, plain) in gradients(ddp.model(), &grads).iter().zip(&plain) {
            assert!(own == plain, "pass {pass}: {}", own.0);
        }
    }
}

fn finding_unused() -> DdpConfig {
    DdpConfig {
        find_unused_parameters: true,
        ..DdpConfig::default()
    }
}

#[test]
fn of_an_mlp_a_cnn_and_a_transformer() {
    // A process of its own: dropout draws from a generator that all threads share.
    World::new(1).deadline(DEADLINE).run(|_| {
        let config = DdpConfig::default;
        let mlp = Mlp::new(&[7, 9, 5], &device());
        assert_same_as_plain(mlp, config(), |mlp| mlp.loss(0, 0..4));
        assert_same_as_plain(Cnn::new(&device()), config(), |cnn| cnn.loss(0, 0..4));
        assert_same_as_plain(Reader::new(&device()), config(), |reader| {
            reader.loss(0, 0..4)
        });
    });
}

#[test]
fn with_checkpointed_activations() {
    let device = device().gradient_checkpointing();
    let model = Reader::new(&device);
    assert_same_as_plain(model, DdpConfig::default(), |reader| reader.loss(0, 0..4));
}

#[test]
fn of_frozen_unused_and_ignored_parameters() {
    let mlp = |device: &Device| Mlp::new(&[6, 6, 6, 6], device);
    let mut frozen = mlp(&device());
    frozen.layers[1] = frozen.layers[1].clone().no_grad();
    assert_same_as_plain(frozen, DdpConfig::default(), |mlp| mlp.loss(0, 0..4));

    let skip = |mlp: &Mlp| mlp.layers[2].forward(mlp.layers[0].forward(numbers(0..4, [0, 6], 0)));
    let unused = mlp(&device());
    assert_same_as_plain(unused, finding_unused(), |mlp| skip(mlp).square().mean());

    let ignoring = DdpConfig {
        ignore: vec!["layers.1.weight".into()],
        ..DdpConfig::default()
    };
    assert_same_as_plain(mlp(&device()), ignoring, |mlp| mlp.loss(0, 0..4));
}

#[test]
fn of_a_layer_that_is_used_twice() {
    let mlp = Mlp::new(&[6, 6, 6], &device());
    assert_same_as_plain(mlp, DdpConfig::default(), |mlp| {
        let x = mlp.forward(numbers(0..4, [0, 6], 0));
        relu(mlp.layers[0].forward(relu(x))).square().mean()
    });
}

#[test]
fn of_a_loss_made_of_several_forwards() {
    let mlp = Mlp::new(&[6, 6, 6], &device());
    let mut ddp = Ddp::new(mlp.clone(), alone(), DdpConfig::default()).unwrap();
    for _ in 0..2 {
        let plain = mlp.loss(0, 0..4) + mlp.loss(1, 0..4) * 2.0;
        let plain = GradientsParams::from_grads(plain.backward(), &mlp);
        let first = ddp.forward(|mlp| mlp.loss(0, 0..4)).unwrap();
        let second = ddp.forward(|mlp| mlp.loss(1, 0..4)).unwrap();
        let grads = ddp.backward(first + second * 2.0).unwrap();
        assert_eq!(gradients(&mlp, &grads), gradients(&mlp, &plain));
    }
}

#[test]
fn after_a_forward_without_backward() {
    let mlp = Mlp::new(&[6, 6, 6], &device());
    let mut ddp = Ddp::new(mlp.clone(), alone(), DdpConfig::default()).unwrap();
    for step in 0..3 {
        // Its graph is given up; the next forward belongs to the same pass.
        drop(ddp.forward(|mlp| mlp.loss(99, 0..4)).unwrap());
        let plain = GradientsParams::from_grads(mlp.loss(step, 0..4).backward(), &mlp);
        let loss = ddp.forward(|mlp| mlp.loss(step, 0..4)).unwrap();
        let grads = ddp.backward(loss).unwrap();
        assert_eq!(gradients(&mlp, &grads), gradients(&mlp, &plain));
    }
}

/// The same parameter in two fields: the words read and the words written.
#[derive(Module, Debug)]
struct Tied {
    words: Embedding,
    middle: Linear,
    out: Linear,
}

impl Tied {
    fn new(device: &Device) -> Self {
        let words: Embedding = EmbeddingConfig::new(8, 8).init(device);
        let mut out: Linear = LinearConfig::new(8, 8).with_bias(false).init(device);
        out.weight = words.weight.clone();
        let middle = LinearConfig::new(8, 8).init(device);
        Self { words, middle, out }
    }

    fn loss(&self) -> Tensor<1> {
        let words = common::classes(0..6, 8, 0);
        let x: Tensor<3> = self.words.forward(words.clone().unsqueeze::<2>());
        let x = relu(self.middle.forward(x.squeeze_dim::<2>(0)));
        cross_entropy(self.out.forward(x), words)
    }
}

#[test]
fn a_parameter_in_two_fields_has_one_gradient_and_stays_one_parameter() {
    let model = Tied::new(&device());
    let plain = GradientsParams::from_grads(model.loss().backward(), &model);
    let mut ddp = Ddp::new(model.clone(), alone(), DdpConfig::default()).unwrap();
    let names: Vec<String> = ddp
        .reducer()
        .params()
        .iter()
        .map(|p| p.name.clone())
        .collect();
    assert_eq!(names, ["words.weight", "middle.weight", "middle.bias"]);
    let mut optim: ModuleOptimizer = SgdConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..4 {
        let loss = ddp.forward(Tied::loss).unwrap();
        losses.push(loss.clone().into_scalar::<f32>());
        let grads = ddp.backward(loss).unwrap();
        if step == 0 {
            assert_eq!(gradients(&model, &grads), gradients(&model, &plain));
        }
        ddp.update(|model| optim.step(0.05, model, grads));
        let (read, written) = (&ddp.model().words.weight, &ddp.model().out.weight);
        assert_eq!(
            read.val().into_data(),
            written.val().into_data(),
            "step {step}"
        );
    }
    assert!(losses[3] < losses[0], "{losses:?}");
}

#[test]
fn evaluation_has_no_gates() {
    let mlp = Mlp::new(&[6, 6, 6], &device());
    let mut ddp = Ddp::new(mlp, alone(), DdpConfig::default()).unwrap();
    let loss = ddp.forward(|mlp| mlp.loss(0, 0..4)).unwrap();
    // In the middle of a pass.
    let (is_autodiff, output) = ddp
        .infer(|mlp| {
            let x = numbers(0..4, [0, 6], 0).without_autodiff();
            (mlp.layers[0].weight.val().is_autodiff(), mlp.forward(x))
        })
        .unwrap();
    assert!(!is_autodiff && !output.is_tracked());
    // The plain model's tensors are leaves, so records and optimizers know them.
    assert!(ddp.model().layers[0].weight.val().is_require_grad());
    let grads = ddp.backward(loss).unwrap();
    assert_eq!(grads.len(), 4);
}

#[test]
fn accumulated_gradients_count_once() {
    let mlp = Mlp::new(&[6, 6, 6], &device());
    let mut ddp = Ddp::new(mlp.clone(), alone(), DdpConfig::default()).unwrap();
    for _ in 0..2 {
        {
            let mut ddp = ddp.no_sync();
            for step in 0..2 {
                let loss = ddp.forward(|mlp| mlp.loss(step, 0..4)).unwrap();
                let own = ddp.backward(loss).unwrap();
                assert!(own.is_empty(), "an optimizer could take them by mistake");
            }
        }
        let loss = ddp.forward(|mlp| mlp.loss(2, 0..4)).unwrap();
        let grads = ddp.backward(loss).unwrap();
        let plain = mlp.loss(0, 0..4) + mlp.loss(1, 0..4) + mlp.loss(2, 0..4);
        let plain = GradientsParams::from_grads(plain.backward(), &mlp);
        for ((name, a), (_, b)) in gradients(&mlp, &grads)
            .into_iter()
            .zip(gradients(&mlp, &plain))
        {
            let floats = |bits: Option<Vec<u32>>| -> Vec<f32> {
                bits.unwrap().into_iter().map(f32::from_bits).collect()
            };
            let apart = distance(&floats(a), &floats(b));
            assert!(apart < 1e-6, "{name}: {apart}");
        }
    }
}

#[test]
fn a_record_loaded_in_the_middle_of_training_is_what_is_trained_on() {
    let (first, second) = (
        Mlp::new(&[6, 6, 6], &device()),
        Mlp::new(&[6, 6, 6], &device()),
    );
    let mut ddp = Ddp::new(first, alone(), DdpConfig::default()).unwrap();
    // A pass is open, with gates before the old values.
    drop(ddp.forward(|mlp| mlp.loss(0, 0..4)).unwrap());
    ddp.update(|mlp| mlp.load_record(second.clone().into_record()));
    assert_eq!(weights(ddp.model()), weights(&second));
    let plain = GradientsParams::from_grads(second.loss(0, 0..4).backward(), &second);
    let loss = ddp.forward(|mlp| mlp.loss(0, 0..4)).unwrap();
    let grads = ddp.backward(loss).unwrap();
    assert_eq!(gradients(ddp.model(), &grads), gradients(&second, &plain));
}

fn text(result: Result<impl Sized, Error>) -> String {
    match result {
        Ok(_) => panic!("that should not have worked"),
        Err(err) => err.to_string(),
    }
}

#[test]
fn a_parameter_used_outside_forward_is_an_error() {
    let mlp = Mlp::new(&[6, 6, 6], &device());
    let mut ddp = Ddp::new(mlp, alone(), DdpConfig::default()).unwrap();
    let plain = ddp.model().clone();
    let loss = ddp.forward(|mlp| mlp.loss(0, 0..4)).unwrap();
    let decay = plain.layers[1].weight.val().square().sum();
    let message = text(ddp.backward(loss + decay * 0.1));
    assert!(
        message.contains("layers.1.weight was used outside Ddp::forward"),
        "{message}"
    );
}

#[test]
fn a_backward_without_ddp_is_an_error_in_the_next_forward() {
    let mlp = Mlp::new(&[6, 6, 6], &device());
    let mut ddp = Ddp::new(mlp, alone(), DdpConfig::default()).unwrap();
    let loss = ddp.forward(|mlp| mlp.loss(0, 0..4)).unwrap();
    drop(loss.backward());
    let message = text(ddp.forward(|mlp| mlp.loss(0, 0..4)));
    assert!(message.contains("call Ddp::backward"), "{message}");
}

#[test]
fn unused_parameters_are_named() {
    let mlp = Mlp::new(&[6, 6, 6], &device());
    let mut ddp = Ddp::new(mlp, alone(), DdpConfig::default()).unwrap();
    let loss = ddp.forward(|mlp| mlp.layers[1].forward(numbers(0..4, [0, 6], 0)).mean());
    let message = text(ddp.backward(loss.unwrap()));
    assert!(message.contains("layers.0.weight"), "{message}");
    assert!(message.contains("find_unused_parameters"), "{message}");
}

#[test]
fn a_loss_without_a_model_is_an_error() {
    let mlp = Mlp::new(&[6, 6, 6], &device());
    let mut ddp = Ddp::new(mlp, alone(), DdpConfig::default()).unwrap();
    ddp.forward(|mlp| drop(mlp.loss(0, 0..4))).unwrap();
    let message = text(ddp.backward(Tensor::<1>::ones([1], &device())));
    assert!(message.contains("depends on no parameter"), "{message}");
    let loss = ddp.model().loss(0, 0..4);
    let mut fresh = Ddp::new(ddp.into_inner(), alone(), DdpConfig::default()).unwrap();
    let message = text(fresh.backward(loss));
    assert!(message.contains("there was no forward"), "{message}");
}

#[test]
fn models_that_cannot_be_trained_are_refused() {
    let plain = Mlp::new(&[6, 6], &Device::flex());
    let message = text(Ddp::new(plain, alone(), DdpConfig::default()));
    assert!(
        message.contains("no parameter that needs a gradient"),
        "{message}"
    );
}

#[test]
fn a_layer_that_thaws_is_an_error() {
    let mut mlp = Mlp::new(&[6, 6, 6], &device());
    mlp.layers[0] = mlp.layers[0].clone().no_grad();
    let mut ddp = Ddp::new(mlp, alone(), DdpConfig::default()).unwrap();
    ddp.update(|mlp| mlp.set_require_grad(true));
    let message = text(ddp.forward(|mlp| mlp.loss(0, 0..4)));
    assert!(
        message.contains("layers.0.weight needs a gradient now"),
        "{message}"
    );
}
