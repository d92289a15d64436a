//! The builtin model under [`Ddp`](phalanx_ddp::Ddp) against PyTorch's DistributedDataParallel:
//! the same layouts, the same ready order, the same numbers.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::golden::{load, replay};
use common::ranks;
use phalanx_ddp::{DistributedSampler, randperm};
use phalanx_pg::Checked;
use phalanx_reference::{Options, ReferenceGroup};
use phalanx_testkit::World;
use serde_json::Value;

#[test]
fn pytorch_with_2_ranks_does_the_same() {
    for case in load(2) {
        ranks(2, move |_, group| replay(&case, group));
    }
}

#[test]
fn pytorch_with_4_ranks_does_the_same() {
    for case in load(4) {
        ranks(4, move |_, group| replay(&case, group));
    }
}

#[test]
fn processes_over_tcp_do_the_same() {
    World::new(2).deadline(Duration::from_secs(120)).run(|ctx| {
        let options = Options {
            timeout: Duration::from_secs(60),
            ..Options::default()
        };
        let store: Arc<dyn phalanx_store::Store> = ctx.store();
        let group = ReferenceGroup::connect(store, ctx.rank(), ctx.size(), &options).unwrap();
        for case in load(2) {
            replay(&case, Arc::clone(&group));
        }
        group.shutdown().unwrap();
    });
}

#[test]
fn all_ranks_make_the_same_calls() {
    for case in load(4) {
        ranks(4, move |_, group| {
            // Compares every call across ranks before it runs.
            replay(&case, Checked::new(group).unwrap());
        });
    }
}

fn sampler() -> Value {
    serde_json::from_str(include_str!("../golden/sampler.json")).unwrap()
}

fn list(value: &Value) -> Vec<usize> {
    let numbers = value.as_array().unwrap().iter();
    numbers.map(|n| n.as_u64().unwrap() as usize).collect()
}

#[test]
fn permutations_are_pytorchs() {
    for one in sampler()["permutations"].as_array().unwrap() {
        let n = one["n"].as_u64().unwrap() as usize;
        let items = randperm(n, one["seed"].as_u64().unwrap());
        assert_eq!(items.len(), n);
        assert!(
            items.starts_with(&list(&one["head"])) && items.ends_with(&list(&one["tail"])),
            "{one}"
        );
        let sum = items
            .iter()
            .enumerate()
            .map(|(i, item)| (i + 1) * item)
            .sum::<usize>();
        assert_eq!(
            sum % 1_000_003,
            one["sum"].as_u64().unwrap() as usize,
            "{one}"
        );
    }
}

#[test]
fn shares_are_pytorchs() {
    for share in sampler()["shares"].as_array().unwrap() {
        let number = |name: &str| share[name].as_u64().unwrap() as usize;
        let sampler =
            DistributedSampler::new(number("n"), number("world"), number("rank")).unwrap();
        let mut sampler = sampler
            .shuffle(share["shuffle"].as_bool().unwrap())
            .drop_last(share["drop_last"].as_bool().unwrap())
            .seed(share["seed"].as_u64().unwrap());
        sampler.set_epoch(share["epoch"].as_u64().unwrap());
        assert_eq!(sampler.num_samples(), number("num_samples"), "{share}");
        assert_eq!(sampler.indices(), list(&share["indices"]), "{share}");
    }
    let err = DistributedSampler::new(10, 4, 4).unwrap_err().to_string();
    assert!(err.contains("rank 4 is none of 4"), "{err}");
}
