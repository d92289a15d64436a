//! Ranks with different numbers of inputs.

mod common;

use std::sync::Arc;

use common::{Group, bits, examples, mlp, ranks, train};
use phalanx_ddp::builtin::{Bag, Input, Matrix, Net, Sgd, cross_entropy};
use phalanx_ddp::reducer::{AllReduceHook, ParamSpec};
use phalanx_ddp::{
    Ddp, DdpConfig, Error, Join, JoinConfig, JoinHook, JoinOptions, Joinable, Result,
};
use phalanx_pg::{DType, ProcessGroup, ProcessGroupExt, ReduceOp};

/// The gradient of a one-by-one weight for an input is the input.
fn one_by_one(ddp: &mut Ddp<Net>, x: f32) -> f32 {
    let input: Input = Matrix::new(1, 1, vec![x]).into();
    ddp.forward(|net| net.forward(&input)).unwrap();
    let grads = ddp
        .backward(|net| net.backward(&Matrix::new(1, 1, vec![1.0])))
        .unwrap();
    grads
        .dense(0, &ParamSpec::new("fc.weight", [1, 1], DType::F32))
        .unwrap()[0]
}

#[test]
fn gradients_are_divided_by_all_ranks_or_by_those_with_inputs() {
    for (divide_by_initial_world_size, expected) in
        [(true, [1.0, 1.0, 1.5]), (false, [1.0, 2.0, 3.0])]
    {
        ranks(2, move |rank, group| {
            let net = Net::new(0).linear("fc", 1, 1);
            let mut ddp = Ddp::new(net, group, DdpConfig::default()).unwrap();
            let options = JoinOptions {
                divide_by_initial_world_size,
                ..JoinOptions::default()
            };
            let inputs: &[f32] = if rank == 0 { &[1.0, 2.0, 3.0] } else { &[1.0] };
            let join = Join::begin(&mut [&mut ddp], options).unwrap();
            let grads: Vec<f32> = inputs.iter().map(|&x| one_by_one(&mut ddp, x)).collect();
            join.end(&mut [&mut ddp]).unwrap();
            assert_eq!(grads, expected[..inputs.len()]);
            assert!(ddp.log().join_uneven_inputs);
        });
    }
}

/// Trains `steps[rank]` steps inside a join and checks that replicas agree at the end.
fn uneven(net: fn() -> Net, config: DdpConfig, hook: bool, steps: &'static [usize]) {
    ranks(steps.len(), move |rank, group| {
        let mut ddp = Ddp::new(net(), group, config.clone()).unwrap();
        if hook {
            ddp.register_comm_hook(Arc::new(AllReduceHook)).unwrap();
        }
        let mut sgd = Sgd::new(0.1);
        let join = Join::begin(&mut [&mut ddp], JoinOptions::default()).unwrap();
        for n in 0..steps[rank] {
            train(&mut ddp, &mut sgd, &[n + rank, n + 1]).unwrap();
        }
        join.end(&mut [&mut ddp]).unwrap();
        assert!(ddp.replicas_agree().unwrap());
        // Training goes on with even inputs.
        train(&mut ddp, &mut sgd, &[rank, rank + 5]).unwrap();
        let all = ddp.group().allgather_object(&bits(ddp.model())).unwrap();
        assert!(all.iter().all(|other| *other == all[0]));
    });
}

#[test]
fn all_ranks_end_with_the_same_model() {
    let base = DdpConfig {
        bucket_cap_mb: Some(0.00005),
        ..DdpConfig::default()
    };
    let uneven_steps: [&'static [usize]; 4] = [&[4, 1], &[1, 4, 2], &[0, 3], &[2, 2]];
    for steps in uneven_steps {
        uneven(|| mlp(1), base.clone(), false, steps);
    }
    uneven(|| mlp(1), base.clone(), true, &[1, 4, 2]);
    let with = |change: fn(&mut DdpConfig)| {
        let mut config = base.clone();
        change(&mut config);
        config
    };
    uneven(
        || mlp(1),
        with(|config| config.find_unused_parameters = true),
        false,
        &[1, 4, 2],
    );
    uneven(
        || mlp(1),
        with(|config| {
            config.find_unused_parameters = true;
            config.skip_all_reduce_unused_params = true;
        }),
        false,
        &[3, 1],
    );
    uneven(
        || mlp(1),
        with(|config| config.static_graph = true),
        false,
        &[1, 5, 2],
    );
    // The rank without inputs learns the graph from the others.
    uneven(
        || mlp(1),
        with(|config| config.static_graph = true),
        false,
        &[0, 3],
    );
    uneven(
        || mlp(1).batch_norm("bn", 3),
        base.clone(),
        false,
        &[1, 4, 2],
    );
    uneven(
        || mlp(1).batch_norm("bn", 3),
        with(|config| config.forward_sync_buffers = false),
        false,
        &[1, 4, 2],
    );
}

#[test]
fn sparse_gradients_join_too() {
    ranks(2, |rank, group| {
        let net = Net::new(3)
            .embedding_bag("table", 5, 2, Bag::Sum, true)
            .linear("fc", 2, 3);
        let mut ddp = Ddp::new(net, group, DdpConfig::default()).unwrap();
        let mut sgd = Sgd::new(0.1);
        let join = Join::begin(&mut [&mut ddp], JoinOptions::default()).unwrap();
        for n in 0..3 - 2 * rank {
            let input = Input::Bags {
                indices: vec![n, rank],
                offsets: vec![0],
            };
            let (_, grad) = ddp
                .forward(|net| cross_entropy(&net.forward(&input), &[1]))
                .unwrap();
            let grads = ddp.backward(|net| net.backward(&grad)).unwrap();
            ddp.update(|net| sgd.step(net, &grads));
        }
        join.end(&mut [&mut ddp]).unwrap();
        assert!(ddp.replicas_agree().unwrap());
    });
}

#[test]
fn accumulation_joins_too() {
    ranks(2, |rank, group| {
        let mut ddp = Ddp::new(mlp(1), group, DdpConfig::default()).unwrap();
        let mut sgd = Sgd::new(0.1);
        let join = Join::begin(&mut [&mut ddp], JoinOptions::default()).unwrap();
        for n in 0..2 + 2 * rank {
            let (x, y) = examples(&[n, n + rank]);
            let quiet = |ddp: &mut Ddp<Net>| {
                let (_, grad) =
                    ddp.forward(|net| cross_entropy(&net.forward(&x.clone().into()), &y))?;
                ddp.backward(|net| net.backward(&grad))
            };
            quiet(&mut ddp.no_sync()).unwrap();
            let grads = quiet(&mut ddp).unwrap();
            ddp.update(|net| sgd.step(net, &grads));
        }
        join.end(&mut [&mut ddp]).unwrap();
        assert!(ddp.replicas_agree().unwrap());
    });
}

#[test]
fn the_last_ranks_model_is_everybodys() {
    ranks(3, |rank, group| {
        let mut ddp = Ddp::new(mlp(1), group, DdpConfig::default()).unwrap();
        let mut sgd = Sgd::new(0.1);
        let join = Join::begin(&mut [&mut ddp], JoinOptions::default()).unwrap();
        let steps = [1, 3, 2][rank];
        for n in 0..steps {
            train(&mut ddp, &mut sgd, &[n, rank]).unwrap();
        }
        let own = bits(ddp.model());
        join.end(&mut [&mut ddp]).unwrap();
        assert_eq!(bits(ddp.model()) == own, rank == 1);
    });
}

#[test]
fn all_stop_when_one_has_no_inputs_if_asked_for() {
    ranks(3, |rank, group| {
        let mut ddp = Ddp::new(mlp(1), group.clone(), DdpConfig::default()).unwrap();
        let mut sgd = Sgd::new(0.1);
        let options = JoinOptions {
            throw_on_early_termination: true,
            ..JoinOptions::default()
        };
        let join = Join::begin(&mut [&mut ddp], options).unwrap();
        let mut steps = 0;
        let result = (0..if rank == 1 { 2 } else { 9 }).try_for_each(|n| {
            train(&mut ddp, &mut sgd, &[n, rank])?;
            steps += 1;
            Ok(())
        });
        let result: Result<()> = match result {
            Ok(()) => join.end(&mut [&mut ddp]),
            err => {
                if rank == 0 {
                    // Not needed, and no harm.
                    join.end(&mut [&mut ddp]).unwrap();
                }
                err
            }
        };
        assert!(
            matches!(result, Err(Error::EarlyEnd { rank: at }) if at == rank),
            "{result:?}"
        );
        assert_eq!(steps, 2);
        train(&mut ddp, &mut sgd, &[rank]).unwrap();
        assert!(ddp.replicas_agree().unwrap());
    });
}

#[test]
fn a_join_that_is_switched_off_sends_nothing() {
    ranks(2, |rank, group| {
        let mut ddp = Ddp::new(mlp(1), group.clone(), DdpConfig::default()).unwrap();
        let options = JoinOptions {
            enable: false,
            ..JoinOptions::default()
        };
        let before = group.sequence();
        let join = Join::begin(&mut [&mut ddp], options).unwrap();
        train(&mut ddp, &mut Sgd::new(0.1), &[rank]).unwrap();
        join.end(&mut [&mut ddp]).unwrap();
        assert_eq!(group.sequence(), before + 1, "the bucket");
    });
}

/// Counts, across ranks, how many have something: another participant.
struct Counter {
    group: Group,
    join: Option<JoinConfig>,
    total: i64,
    last: Option<bool>,
}

impl Counter {
    fn count(&mut self, own: i64) -> Result<()> {
        if let Some(join) = &self.join {
            join.notify()?;
        }
        let mut sum = [own];
        self.group.allreduce_in_place(&mut sum, ReduceOp::Sum)?;
        self.total += sum[0];
        Ok(())
    }
}

impl Joinable for Counter {
    fn join_group(&self) -> Arc<dyn ProcessGroup> {
        Arc::clone(&self.group)
    }

    fn set_join(&mut self, config: Option<JoinConfig>) {
        self.join = config;
    }

    fn join_hook(&mut self) -> Box<dyn JoinHook + '_> {
        Box::new(CounterHook(self))
    }
}

struct CounterHook<'a>(&'a mut Counter);

impl JoinHook for CounterHook<'_> {
    fn main_hook(&mut self) -> Result<()> {
        let mut sum = [0i64];
        self.0.group.allreduce_in_place(&mut sum, ReduceOp::Sum)?;
        self.0.total += sum[0];
        Ok(())
    }

    fn post_hook(&mut self, is_last_joiner: bool) -> Result<()> {
        self.0.last = Some(is_last_joiner);
        Ok(())
    }
}

fn counter(group: &Group) -> Counter {
    Counter {
        group: Arc::clone(group),
        join: None,
        total: 0,
        last: None,
    }
}

#[test]
fn several_take_part_in_one_join() {
    ranks(3, |rank, group| {
        let mut ddp = Ddp::new(mlp(1), group.clone(), DdpConfig::default()).unwrap();
        let mut counter = counter(&group);
        let mut sgd = Sgd::new(0.1);
        let join = Join::begin(&mut [&mut ddp, &mut counter], JoinOptions::default()).unwrap();
        for n in 0..rank + 1 {
            train(&mut ddp, &mut sgd, &[n, rank]).unwrap();
            counter.count(1).unwrap();
        }
        join.end(&mut [&mut ddp, &mut counter]).unwrap();
        assert_eq!(counter.total, 6, "3 + 2 + 1");
        assert_eq!(counter.last, Some(rank == 2));
        assert!(ddp.replicas_agree().unwrap());
    });
}

#[test]
fn all_participants_divide_by_the_ranks_that_have_inputs() {
    ranks(3, |rank, group| {
        let net = || Ddp::new(mlp(1), group.clone(), DdpConfig::default()).unwrap();
        let (mut first, mut second) = (net(), net());
        let options = JoinOptions {
            divide_by_initial_world_size: false,
            ..JoinOptions::default()
        };
        let join = Join::begin(&mut [&mut first, &mut second], options).unwrap();
        let (mut one, mut other) = (Sgd::new(0.1), Sgd::new(0.1));
        for n in 0..rank + 1 {
            train(&mut first, &mut one, &[n, rank]).unwrap();
            train(&mut second, &mut other, &[n, rank]).unwrap();
        }
        join.end(&mut [&mut first, &mut second]).unwrap();
        assert!(first.log().join_uneven_inputs);
        // Equal models with equal inputs, so equal to the end.
        assert_eq!(bits(first.model()), bits(second.model()));
    });
}

#[test]
fn participants_have_one_group() {
    ranks(2, |_, group| {
        let other = group.new_group(&[0, 1], "other").unwrap().unwrap();
        let (mut a, mut b) = (counter(&group), counter(&other));
        let err = Join::begin(&mut [&mut a, &mut b], JoinOptions::default()).unwrap_err();
        assert!(err.to_string().contains("one group"), "{err}");
        let none = Join::begin(&mut [], JoinOptions::default()).unwrap_err();
        assert!(none.to_string().contains("needs a participant"), "{none}");
        other.shutdown().unwrap();
    });
}
