//! Real processes, one of which dies in the middle of a backward.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{bits, examples, mlp, train};
use phalanx_ddp::builtin::{Sgd, cross_entropy};
use phalanx_ddp::{Ddp, DdpConfig};
use phalanx_pg::ErrorKind;
use phalanx_reference::{Options, ReferenceGroup};
use phalanx_testkit::World;

fn options(name: &str) -> Options {
    Options {
        name: name.into(),
        timeout: Duration::from_secs(60),
        ..Options::default()
    }
}

#[test]
fn survivors_of_a_death_during_backward_learn_who_it_was_and_train_on() {
    const DEAD: usize = 1;
    World::new(3).check(
        |ctx| {
            let group =
                ReferenceGroup::connect(ctx.store(), ctx.rank(), ctx.size(), &options("first"));
            let config = DdpConfig {
                bucket_cap_mb: Some(0.00001),
                ..DdpConfig::default()
            };
            let mut ddp = Ddp::new(mlp(1), group.unwrap(), config).unwrap();
            let mut sgd = Sgd::new(0.1).momentum(0.9);
            for n in 0..3 {
                train(&mut ddp, &mut sgd, &[n, ctx.rank()]).unwrap();
            }
            // Nobody is busy with an earlier step when one dies.
            ctx.store().barrier("trained", ctx.size()).unwrap();
            let before = bits(ddp.model());
            let (x, y) = examples(&[ctx.rank()]);
            let (_, grad) = ddp
                .forward(|net| cross_entropy(&net.forward(&x.into()), &y))
                .unwrap();
            let result = ddp.backward(|net| {
                let grads = net.backward(&grad);
                if ctx.rank() == DEAD {
                    // Some buckets are on their way.
                    std::process::abort();
                }
                grads
            });
            // A rank whose buckets were complete before the death may have got its averages; then
            // the next step fails.
            let err = match result {
                Err(err) => err,
                Ok(_) => {
                    let (x, _) = examples(&[0]);
                    ddp.forward(|net| net.forward(&x.into()))
                        .map(drop)
                        .and_then(|()| ddp.backward(|net| net.backward(&grad)).map(drop))
                        .unwrap_err()
                }
            };
            let lost = err.group().expect("a failure of the group");
            assert_eq!(lost.peer(), Some(DEAD), "{err}");
            assert!(
                matches!(lost.kind(), ErrorKind::PeerLost | ErrorKind::Broken),
                "{err}"
            );
            assert_eq!(bits(ddp.model()), before, "the model is as before");
            let rank = if ctx.rank() == 0 { 0 } else { 1 };
            let survivors =
                ReferenceGroup::connect(ctx.store(), rank, 2, &options("second")).unwrap();
            ddp.replace_group(Arc::clone(&survivors)).unwrap();
            for n in 0..3 {
                train(&mut ddp, &mut sgd, &[n, rank]).unwrap();
                assert!(ddp.replicas_agree().unwrap());
            }
            assert_ne!(bits(ddp.model()), before, "and trains on");
            survivors.shutdown().unwrap();
            println!("trained on");
        },
        |outcome| {
            for rank in outcome.ranks() {
                let trained_on = rank.log.contains("trained on");
                assert_eq!(trained_on, rank.rank != DEAD, "{}", outcome.report());
            }
        },
    );
}
