//! Averages are views of the buckets, and buckets are used again only when nobody looks.

mod common;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use burn::backend::Flex;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::Tensor;
use common::ranks::{DEADLINE, alone, connect, resident, share};
use common::{Mlp, device, weights};
use parking_lot::Mutex;
use phalanx_burn::{Ddp, DdpConfig};
use phalanx_pg::{
    Buffer, Call, CallKind, CallOptions, Capabilities, DType, Device, ErrorKind, Fault, FaultPlan,
    Faulty, ProcessGroup, RawWork, Result,
};
use phalanx_testkit::World;

/// Remembers what memory it gave away.
#[derive(Debug)]
struct Lender {
    inner: Arc<dyn ProcessGroup>,
    lent: Arc<Lent>,
    /// Says that it works on memory of any kind.
    scattered: bool,
}

/// Addresses.
type Lent = Mutex<Vec<Range<usize>>>;

impl ProcessGroup for Lender {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn backend(&self) -> &str {
        self.inner.backend()
    }

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn global_ranks(&self) -> &[usize] {
        self.inner.global_ranks()
    }

    fn timeout(&self) -> Duration {
        self.inner.timeout()
    }

    fn sequence(&self) -> u64 {
        self.inner.sequence()
    }

    fn p2p_sequence(&self) -> u64 {
        self.inner.p2p_sequence()
    }

    fn capabilities(&self) -> Capabilities {
        let mut known = self.inner.capabilities();
        known.scattered = self.scattered;
        known
    }

    fn allocate(&self, device: Device, dtype: DType, len: usize) -> Result<Buffer> {
        let buffer = self.inner.allocate(device, dtype, len)?;
        let start = buffer.as_ptr().as_ptr() as usize;
        self.lent.lock().push(start..start + buffer.byte_len());
        Ok(buffer)
    }

    fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        self.inner.submit(call, options)
    }

    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
        self.inner.split(ranks, name)
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn shutdown(&self) -> Result<()> {
        self.inner.shutdown()
    }
}

fn lender(scattered: bool) -> (Arc<dyn ProcessGroup>, Arc<Lent>) {
    let lent = Arc::default();
    let group = Lender {
        inner: alone(),
        lent: Arc::clone(&lent),
        scattered,
    };
    (Arc::new(group), lent)
}

/// Where the gradients are in memory, and their values.
fn places<M: Module>(module: &M, grads: &GradientsParams) -> Vec<(usize, Vec<f32>)> {
    struct Places<'a>(&'a GradientsParams, Vec<(usize, Vec<f32>)>);
    impl ModuleVisitor for Places<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let grad = self.0.get::<D>(param.id).unwrap();
            let grad = grad.try_into_primitive::<Flex>().unwrap();
            let values = grad.as_slice::<f32>().unwrap();
            self.1.push((values.as_ptr() as usize, values.to_vec()));
        }
    }
    let mut places = Places(grads, Vec::new());
    module.visit(&mut places);
    places.1
}

fn step(ddp: &mut Ddp<Mlp>, number: usize) -> GradientsParams {
    let loss = ddp.forward(|mlp| mlp.loss(number, 0..4)).unwrap();
    ddp.backward(loss).unwrap()
}

#[test]
fn gradients_are_in_the_buckets_memory() {
    let (group, lent) = lender(false);
    let mut ddp = Ddp::new(Mlp::new(&[6, 6, 6], &device()), group, DdpConfig::default()).unwrap();
    for number in 0..3 {
        let grads = step(&mut ddp, number);
        let lent = lent.lock();
        for (place, values) in places(ddp.model(), &grads) {
            let inside = |range: &Range<usize>| range.contains(&place);
            assert!(lent.iter().any(inside), "a gradient was copied");
            assert!(values.iter().any(|value| *value != 0.0));
        }
    }
}

/// Wide enough for a weight that is averaged where burn has put its gradient.
const WIDE: [usize; 3] = [200, 200, 6];

#[test]
fn large_gradients_stay_where_they_are() {
    let (group, lent) = lender(true);
    let mut ddp = Ddp::new(Mlp::new(&WIDE, &device()), group, DdpConfig::default()).unwrap();
    for number in 0..3 {
        let grads = step(&mut ddp, number);
        for (place, values) in places(ddp.model(), &grads) {
            let lent = lent.lock();
            let copied = lent.iter().any(|range| range.contains(&place));
            assert_eq!(copied, values.len() < 200 * 200);
        }
    }
}

#[test]
fn gradients_that_are_kept_stay_as_they_are() {
    let (group, lent) = lender(false);
    let mut ddp = Ddp::new(Mlp::new(&[6, 6, 6], &device()), group, DdpConfig::default()).unwrap();
    let kept: Vec<_> = (0..4).map(|number| step(&mut ddp, number)).collect();
    let seen: Vec<_> = kept
        .iter()
        .map(|grads| places(ddp.model(), grads))
        .collect();
    for number in 4..8 {
        drop(step(&mut ddp, number));
    }
    for (grads, seen) in kept.iter().zip(&seen) {
        assert_eq!(places(ddp.model(), grads), *seen);
    }
    // And those that nobody keeps make room: the last four shared one bucket.
    let before = lent.lock().len();
    drop(kept);
    for number in 8..16 {
        drop(step(&mut ddp, number));
    }
    assert_eq!(lent.lock().len(), before);
}

/// SGD with momentum keeps its first gradient as the velocity: a view of the bucket.
#[test]
fn an_optimizer_that_keeps_a_view_is_not_disturbed() {
    let momentum = MomentumConfig::new().with_momentum(0.9);
    let optimizers: [fn(MomentumConfig) -> ModuleOptimizer; 3] = [
        |momentum| SgdConfig::new().with_momentum(Some(momentum)).init(),
        |_| SgdConfig::new().init(),
        |_| AdamConfig::new().init(),
    ];
    let widths: [(&[usize], bool); 2] = [(&[6, 6, 6], false), (&WIDE, true)];
    let all = optimizers
        .into_iter()
        .flat_map(|optimizer| widths.map(|widths| (optimizer, widths)));
    for (optimizer, (widths, scattered)) in all {
        let (group, lent) = lender(scattered);
        let mut plain = Mlp::new(widths, &device());
        let mut ddp = Ddp::new(plain.clone(), group, DdpConfig::default()).unwrap();
        let (mut optim, mut optim_plain) =
            (optimizer(momentum.clone()), optimizer(momentum.clone()));
        let mut buckets = Vec::new();
        for number in 0..12 {
            let grads = step(&mut ddp, number);
            ddp.update(|model| optim.step(0.05, model, grads));
            buckets.push(lent.lock().len());
            let grads = plain.loss(number, 0..4).backward();
            let grads = GradientsParams::from_grads(grads, &plain);
            plain = optim_plain.step(0.05, plain, grads);
            assert_eq!(weights(ddp.model()), weights(&plain), "step {number}");
        }
        assert_eq!(
            buckets[4], buckets[11],
            "buckets are used again: {buckets:?}"
        );
    }
}

#[test]
fn an_error_during_backward_comes_out_of_backward() {
    let plan = FaultPlan::new().at_kind(CallKind::AllReduce, 2, Fault::Fail(ErrorKind::PeerLost));
    let group = Faulty::new(alone(), plan);
    let mut ddp = Ddp::new(Mlp::new(&[6, 6, 6], &device()), group, DdpConfig::default()).unwrap();
    drop(step(&mut ddp, 0));
    drop(step(&mut ddp, 1));
    let before = weights(ddp.model());
    let loss = ddp.forward(|mlp| mlp.loss(2, 0..4)).unwrap();
    let err = ddp.backward(loss).unwrap_err();
    assert_eq!(err.group().unwrap().kind(), ErrorKind::PeerLost, "{err}");
    assert_eq!(weights(ddp.model()), before, "the model is as before");
    let err = ddp.forward(|mlp| drop(mlp.loss(3, 0..4))).unwrap_err();
    assert!(err.to_string().contains("earlier"), "{err}");
}

#[test]
fn a_thousand_steps_need_no_more_memory_than_a_hundred() {
    const STEPS: usize = 1000;
    /// A copy of the parameters alone would be 80 MB by the end.
    const ROOM: usize = 4 << 20;
    World::new(2).deadline(DEADLINE).run(|ctx| {
        let group = connect(ctx);
        let config = DdpConfig {
            bucket_cap_mb: Some(0.02),
            ..DdpConfig::default()
        };
        let mut ddp = Ddp::new(
            Mlp::new(&[64, 96, 96, 10], &device()),
            group.clone(),
            config,
        )
        .unwrap();
        let momentum = MomentumConfig::new().with_momentum(0.9);
        let mut optim: ModuleOptimizer = SgdConfig::new().with_momentum(Some(momentum)).init();
        let rows = share(group.rank(), group.size(), 8);
        let mut early = 0;
        for number in 0..STEPS {
            if number % 10 == 0 {
                // A forward that no backward follows.
                drop(ddp.forward(|mlp| mlp.loss(number, rows.clone())).unwrap());
            }
            let loss = ddp.forward(|mlp| mlp.loss(number, rows.clone())).unwrap();
            let grads = ddp.backward(loss).unwrap();
            ddp.update(|model| optim.step(0.01, model, grads));
            if number == STEPS / 10 {
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
