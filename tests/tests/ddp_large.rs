//! Gradients that are large enough to be averaged where they are, one real process per rank.

use std::sync::Arc;
use std::time::Duration;

use phalanx::ddp::builtin::{Gradients, Matrix, Net, Sgd, cross_entropy};
use phalanx::ddp::{Ddp, DdpConfig, Result};
use phalanx::pg::ErrorKind;
use phalanx::reducer::AllReduceHook;
use phalanx_tests::world_for;

const FEATURES: usize = 64;

/// Two weights of 256 KiB and more among small parameters.
fn net(seed: u64) -> Net {
    Net::new(seed)
        .linear("fc1", FEATURES, 1024)
        .relu()
        .linear("fc2", 1024, 96)
        .relu()
        .linear("fc3", 96, 3)
}

fn examples(step: usize, rank: usize) -> (Matrix, Vec<usize>) {
    let feature = |i: usize| ((i * 7 + step * 13 + rank * 3) as f32 * 0.61).sin();
    let rows = 4;
    let x = Matrix::new(rows, FEATURES, (0..rows * FEATURES).map(feature).collect());
    (x, (0..rows).map(|row| (row + rank) % 3).collect())
}

/// A backward with averages.
fn average(ddp: &mut Ddp<Net>, step: usize, rank: usize) -> Result<Gradients> {
    let (x, y) = examples(step, rank);
    let (_, grad) = ddp.forward(|net| cross_entropy(&net.forward(&x.into()), &y))?;
    ddp.backward(|net| net.backward(&grad))
}

fn bits(net: &Net) -> Vec<u32> {
    let all = (0..net.specs().count()).flat_map(|i| net.values(i));
    all.map(|value| value.to_bits()).collect()
}

#[test]
fn they_give_the_bits_that_buckets_give() {
    for backend in phalanx::backends() {
        for size in [2, 3] {
            let world = world_for(&backend, size).deadline(Duration::from_secs(240));
            world.run(|ctx| {
                let group = phalanx::init().unwrap();
                let trained = |view: bool, in_buckets: bool| {
                    let config = DdpConfig {
                        gradient_as_bucket_view: view,
                        bucket_cap_mb: Some(0.3),
                        ..DdpConfig::default()
                    };
                    let mut ddp = Ddp::new(net(7), Arc::clone(&group), config).unwrap();
                    if in_buckets {
                        // A hook gets buckets whatever the group can do.
                        let hook = Arc::new(AllReduceHook);
                        ddp.register_comm_hook(hook).unwrap();
                    }
                    let mut sgd = Sgd::new(0.1).momentum(0.9);
                    for step in 0..6 {
                        let grads = average(&mut ddp, step, ctx.rank()).unwrap();
                        ddp.update(|net| sgd.step(net, &grads));
                        assert!(ddp.replicas_agree().unwrap(), "step {step}");
                    }
                    bits(ddp.model())
                };
                let buckets = trained(false, true);
                assert_ne!(buckets, bits(&net(7)), "training moves the model");
                for view in [false, true] {
                    assert!(trained(view, false) == buckets, "as views: {view}");
                }
                group.shutdown().unwrap();
            });
        }
    }
}

#[test]
fn a_death_in_the_middle_of_them_names_the_dead() {
    const DEAD: usize = 1;
    world_for("native", 3).check(
        |ctx| {
            let group = phalanx::init().unwrap();
            let mut ddp = Ddp::new(net(7), group, DdpConfig::default()).unwrap();
            for step in 0..2 {
                average(&mut ddp, step, ctx.rank()).unwrap();
            }
            // Nobody is busy with an earlier step when one dies.
            ctx.store().barrier("trained", ctx.size()).unwrap();
            let before = bits(ddp.model());
            let (x, y) = examples(2, ctx.rank());
            let (_, grad) = ddp
                .forward(|net| cross_entropy(&net.forward(&x.into()), &y))
                .unwrap();
            let result = ddp.backward(|net| match ctx.rank() {
                DEAD => std::process::abort(),
                _ => net.backward(&grad),
            });
            let err = result.map(drop).unwrap_err();
            let lost = err.group().expect("a failure of the group");
            assert_eq!(lost.peer(), Some(DEAD), "{err}");
            // A rank that comes to its all-reduce after the news finds the group broken by them.
            let first = lost.cause().unwrap_or(lost);
            assert_eq!(first.kind(), ErrorKind::PeerLost, "{err}");
            assert_eq!(bits(ddp.model()), before, "the model is as before");
            println!("learnt of it");
        },
        |outcome| {
            for rank in outcome.ranks() {
                let learnt = rank.log.contains("learnt of it");
                assert_eq!(learnt, rank.rank != DEAD, "{}", outcome.report());
            }
        },
    );
}
