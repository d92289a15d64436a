//! Gradients are handed over while backward runs, as soon as they are complete.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::{Autodiff, Flex};
use burn::module::{Module, Param};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use common::ranks::{Watched, alone};
use common::{device, numbers};
use parking_lot::Mutex;
use phalanx_burn::{Ddp, DdpConfig};

const LAYERS: usize = 12;
const WIDTH: usize = 8;

/// An identity that counts when its backward runs, or says how far the count is.
#[derive(Debug)]
struct Probe;

#[derive(Debug, Clone)]
enum Then {
    Count(Arc<AtomicUsize>),
    Note(Arc<AtomicUsize>, Arc<Mutex<Vec<usize>>>),
}

impl Backward<Flex, 1> for Probe {
    type State = Then;

    fn backward(self, ops: Ops<Then, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<Flex>(&ops.node);
        match &ops.state {
            Then::Count(count) => _ = count.fetch_add(1, Ordering::Relaxed),
            Then::Note(count, notes) => notes.lock().push(count.load(Ordering::Relaxed)),
        }
        let [parent] = ops.parents;
        grads.register::<Flex>(parent.unwrap().id, grad);
    }
}

fn probe<const D: usize>(x: Tensor<D>, then: Then) -> Tensor<D> {
    let x = x.try_into_primitive::<Autodiff<Flex>>().unwrap();
    let (tensor, guard) = x.into_parts();
    let prepared = Probe.prepare::<NoCheckpointing>([guard]).compute_bound();
    let OpsKind::Tracked(tracked) = prepared.stateful() else {
        panic!("what is not differentiated cannot be probed");
    };
    Tensor::from_primitive::<Autodiff<Flex>>(tracked.finish(then, tensor))
}

/// Layers that are used in the order in which they stand, or from the last to the first.
#[derive(Module, Debug)]
struct Deep {
    layers: Vec<Layer>,
    backwards: bool,
}

/// Most of its parameters are reshaped before they meet an activation: in plain burn, and with an
/// identity before them, their gradients would be complete at the very end.
#[derive(Module, Debug)]
struct Layer {
    norm: LayerNorm,
    linear: Linear,
}

const PARAMETERS_PER_LAYER: usize = 4;

impl Deep {
    fn new(backwards: bool, device: &Device) -> Self {
        let layer = |_| Layer {
            norm: LayerNormConfig::new(WIDTH).init(device),
            linear: LinearConfig::new(WIDTH, WIDTH).init(device),
        };
        Self {
            layers: (0..LAYERS).map(layer).collect(),
            backwards,
        }
    }

    fn loss(&self, count: &Arc<AtomicUsize>) -> Tensor<1> {
        let mut order: Vec<&Layer> = self.layers.iter().collect();
        if self.backwards {
            order.reverse();
        }
        let x = order
            .into_iter()
            .fold(numbers(0..4, [0, WIDTH], 0), |x, layer| {
                let x = relu(layer.linear.forward(layer.norm.forward(x)));
                probe(x, Then::Count(Arc::clone(count)))
            });
        x.square().mean()
    }
}

/// How many layers' backwards had begun when each bucket was sent, one per parameter.
fn sent_after(backwards: bool) -> Vec<usize> {
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
    let model = Deep::new(backwards, &device());
    let mut ddp = Ddp::new(model, Arc::new(group), config).unwrap();
    // The first pass learns the order in which gradients become ready.
    for _ in 0..2 {
        count.store(0, Ordering::Relaxed);
        notes.lock().clear();
        let loss = ddp.forward(|model| model.loss(&count)).unwrap();
        ddp.backward(loss).unwrap();
    }
    assert_eq!(count.load(Ordering::Relaxed), LAYERS, "all of backward ran");
    let notes = notes.lock().clone();
    assert_eq!(notes.len(), LAYERS * PARAMETERS_PER_LAYER);
    notes
}

#[test]
fn each_layer_is_sent_before_backward_comes_to_the_next_one() {
    let notes = sent_after(false);
    let layers: Vec<usize> = (1..=LAYERS)
        .flat_map(|n| [n; PARAMETERS_PER_LAYER])
        .collect();
    assert_eq!(notes, layers);
}

#[test]
fn the_order_of_use_counts_and_not_that_of_the_fields() {
    assert_eq!(sent_after(true), sent_after(false));
}

/// What gates are compared with: an identity operation before a parameter.
#[test]
fn a_plain_identity_would_hand_the_last_layer_over_at_the_end() {
    let (count, notes) = (Arc::new(AtomicUsize::new(0)), Arc::default());
    let mut model = Deep::new(false, &device());
    let last = model.layers.last_mut().unwrap();
    let then = Then::Note(Arc::clone(&count), Arc::clone(&notes));
    let weight = last.linear.weight.clone();
    last.linear.weight = Param::initialized(weight.id, probe(weight.val(), then));
    model.loss(&count).backward();
    assert_eq!(*notes.lock(), [LAYERS], "after all of backward");
}
