//! Training as a whole: shards equal the full batch, replicas stay the same to the bit.

mod common;

use common::{Group, bits, examples, mlp, ranks, train};
use phalanx_ddp::builtin::{Net, Sgd, cross_entropy};
use phalanx_ddp::{Ddp, DdpConfig, DistributedSampler};
use phalanx_pg::FakeGroup;

const BATCH: usize = 12;

fn sizes(config: &DdpConfig, size: usize, steps: usize) -> Vec<Vec<u32>> {
    let config = config.clone();
    ranks(size, move |rank, group| {
        // Every rank starts from other values and gets rank 0's.
        let mut ddp = Ddp::new(mlp(rank as u64 + 1), group, config.clone()).unwrap();
        let mut sgd = Sgd::new(0.1).momentum(0.9);
        for n in 0..steps {
            let mut sampler = DistributedSampler::new(BATCH, size, rank).unwrap();
            sampler.set_epoch(n as u64);
            train(&mut ddp, &mut sgd, &sampler.indices()).unwrap();
            assert!(ddp.replicas_agree().unwrap(), "step {n}");
        }
        bits(ddp.model())
    })
}

#[test]
fn shards_train_as_the_full_batch_does() {
    let mut alone = mlp(1);
    let mut sgd = Sgd::new(0.1).momentum(0.9);
    let all: Vec<usize> = (0..BATCH).collect();
    for _ in 0..50 {
        let (x, y) = examples(&all);
        let (_, grad) = cross_entropy(&alone.forward(&x.into()), &y);
        let grads = alone.backward(&grad);
        sgd.step(&mut alone, &grads);
    }
    for size in [2, 3, 4] {
        let together = sizes(&DdpConfig::default(), size, 50);
        let pairs = together[0].iter().zip(bits(&alone));
        let off = pairs.map(|(&a, b)| (f32::from_bits(a) - f32::from_bits(b)).abs());
        let worst = off.fold(0.0, f32::max);
        assert!(worst < 2e-5, "{size} ranks: {worst}");
        let moved = bits(&mlp(1)).into_iter().zip(bits(&alone));
        let moved = moved.map(|(a, b)| (f32::from_bits(a) - f32::from_bits(b)).abs());
        assert!(moved.fold(0.0, f32::max) > 0.1, "training moves the model");
    }
}

#[test]
fn bucket_caps_change_no_bit() {
    let with = |caps: &[f64]| {
        let config = DdpConfig {
            bucket_cap_mb_list: caps.to_vec(),
            ..DdpConfig::default()
        };
        sizes(&config, 3, 20)
    };
    let whole = with(&[]);
    assert_eq!(with(&[0.000001]), whole);
    assert_eq!(with(&[0.00002, 0.0001]), whole);
    let view = DdpConfig {
        gradient_as_bucket_view: true,
        bucket_cap_mb: Some(0.00005),
        ..DdpConfig::default()
    };
    assert_eq!(sizes(&view, 3, 20), whole);
}

#[test]
fn the_other_modes_give_the_same_bits_where_nothing_is_unused() {
    let whole = sizes(&DdpConfig::default(), 2, 10);
    let base = DdpConfig::default();
    for config in [
        DdpConfig {
            static_graph: true,
            ..base.clone()
        },
        DdpConfig {
            find_unused_parameters: true,
            ..base.clone()
        },
        DdpConfig {
            find_unused_parameters: true,
            rebuild_with_unused: true,
            ..base.clone()
        },
        DdpConfig {
            find_unused_parameters: true,
            skip_all_reduce_unused_params: true,
            ..base
        },
    ] {
        assert_eq!(sizes(&config, 2, 10), whole, "{config:?}");
    }
}

/// Bytes of memory that this process has in use.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * 4096
}

#[test]
fn memory_stays_the_same_over_a_thousand_steps() {
    let group: Group = std::sync::Arc::new(FakeGroup::new(0, 1));
    let net = Net::new(1)
        .linear("fc1", 4, 4096)
        .relu()
        .linear("fc2", 4096, 3);
    let config = DdpConfig {
        bucket_cap_mb: Some(0.02),
        gradient_as_bucket_view: true,
        ..DdpConfig::default()
    };
    let mut ddp = Ddp::new(net, group, config).unwrap();
    let mut sgd = Sgd::new(0.01);
    let mut step = |ddp: &mut Ddp<Net>| train(ddp, &mut sgd, &[0, 1]).unwrap();
    (0..50).for_each(|_| _ = step(&mut ddp));
    let before = resident();
    (0..1000).for_each(|_| _ = step(&mut ddp));
    let grown = resident().saturating_sub(before);
    // One pass has 140 kB of gradients: a thousand that leak would be 140 MB.
    assert!(grown < 4 << 20, "{grown} bytes");
}
