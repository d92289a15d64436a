//! What users of [`Ddp`] meet: construction, errors, no_sync, buffers, ignore lists, groups.

mod common;

use std::sync::Arc;

use common::{Group, bits, examples, mlp, ranks, train};
use parking_lot::Mutex;
use phalanx_ddp::builtin::{Gradient, Matrix, Net, Sgd, cross_entropy};
use phalanx_ddp::reducer::{self, AllReduceHook, GradTarget};
use phalanx_ddp::{BufferHook, Ddp, DdpConfig, Error, NamedBuffer, Replica, Result, Tensor, When};
use phalanx_pg::{Buffer, DType, ProcessGroup, ProcessGroupExt, ReduceOp};

fn ddp(net: Net, group: Group) -> Ddp<Net> {
    Ddp::new(net, group, DdpConfig::default()).unwrap()
}

#[test]
fn every_rank_starts_with_rank_0s_values() {
    ranks(3, |rank, group| {
        let ddp = ddp(mlp(rank as u64), group);
        assert_eq!(bits(ddp.model()), bits(&mlp(0)));
        assert!(ddp.replicas_agree().unwrap());
    });
}

#[test]
fn without_init_sync_values_stay_and_nothing_is_verified() {
    ranks(2, |rank, group| {
        let config = DdpConfig {
            init_sync: false,
            ..DdpConfig::default()
        };
        let before = group.sequence();
        let mut ddp = Ddp::new(mlp(rank as u64), group.clone(), config).unwrap();
        assert_eq!(group.sequence(), before);
        assert_eq!(bits(ddp.model()), bits(&mlp(rank as u64)));
        assert!(!ddp.replicas_agree().unwrap());
        ddp.broadcast_state(1).unwrap();
        assert_eq!(bits(ddp.model()), bits(&mlp(1)));
    });
}

fn refused(build: fn(usize) -> (Net, DdpConfig), parts: &'static [&'static str]) {
    ranks(3, move |rank, group| {
        let (net, config) = build(rank);
        let err = Ddp::new(net, group.clone(), config).unwrap_err();
        for part in parts {
            assert!(err.to_string().contains(part), "rank {rank}: {err}");
        }
        // Nobody hangs, and the group goes on.
        ddp(mlp(0), group);
    });
}

#[test]
fn ranks_with_other_models_are_all_told() {
    refused(
        |rank| {
            let net = mlp(0);
            let net = if rank == 1 {
                net.linear("more", 3, 3)
            } else {
                net
            };
            (net, DdpConfig::default())
        },
        &["rank 0 has 4, rank 1 has 6"],
    );
    refused(
        |rank| {
            (
                Net::new(0).linear("fc", 4, 3 + rank / 2),
                DdpConfig::default(),
            )
        },
        &[
            "shape of parameter 0 (fc.weight)",
            "rank 0 has [3, 4], rank 2 has [4, 4]",
        ],
    );
    refused(
        |rank| {
            let name = if rank == 2 { "norm" } else { "bn" };
            (mlp(0).batch_norm(name, 3), DdpConfig::default())
        },
        &["name of parameter 4", "bn.weight", "norm.weight"],
    );
}

#[test]
fn ranks_with_other_options_are_all_told() {
    refused(
        |rank| {
            let config = DdpConfig {
                bucket_cap_mb: (rank == 1).then_some(25.0),
                ..DdpConfig::default()
            };
            (mlp(0), config)
        },
        &["bucket_cap_mb", "rank 0 has default, rank 1 has 25"],
    );
}

#[test]
fn a_fault_that_one_rank_finds_alone_reaches_all() {
    refused(
        |rank| {
            let net = mlp(0);
            let twice = if rank == 1 {
                net.batch_norm("bn", 3).batch_norm("bn", 3)
            } else {
                net
            };
            (twice, DdpConfig::default())
        },
        &["rank 1"],
    );
    refused(
        |_| (Net::new(0).relu(), DdpConfig::default()),
        &["no parameter that needs a gradient"],
    );
    refused(
        |rank| match rank {
            0 => (mlp(0), DdpConfig::default()),
            _ => (Net::new(0).relu(), DdpConfig::default()),
        },
        &["rank 0 has 4", "has 0"],
    );
}

#[test]
fn backward_needs_a_forward() {
    ranks(1, |_, group| {
        let mut ddp = ddp(mlp(0), group);
        let err = ddp.backward(|_| Default::default()).unwrap_err();
        assert!(err.to_string().contains("Ddp::forward"), "{err}");
    });
}

#[test]
fn several_forwards_feed_one_backward() {
    ranks(2, |rank, group| {
        let mut ddp = ddp(mlp(0), group.clone());
        let before = group.sequence();
        for _ in 0..3 {
            let (x, _) = examples(&[rank]);
            ddp.forward(|net| net.forward(&x.into())).unwrap();
        }
        assert_eq!(group.sequence(), before);
        let grad = Matrix::new(1, 3, vec![1.0; 3]);
        let grads = ddp.backward(|net| net.backward(&grad)).unwrap();
        assert!(matches!(grads.get(0), Some(Gradient::View(_))));
    });
}

#[test]
fn no_sync_sends_nothing_and_the_next_backward_averages_all() {
    ranks(2, |rank, group| {
        let net = Net::new(0).linear("fc", 1, 1);
        let mut ddp = ddp(net, group.clone());
        let step = |ddp: &mut Ddp<Net>, x: f32| {
            let input = Matrix::new(1, 1, vec![x]);
            ddp.forward(|net| net.forward(&input.into()))?;
            let grads = ddp.backward(|net| net.backward(&Matrix::new(1, 1, vec![1.0])))?;
            Ok::<_, Error>(grads.dense(0, net_spec()))
        };
        let before = group.sequence();
        {
            let mut quiet = ddp.no_sync();
            assert_eq!(step(&mut quiet, 1.0 + rank as f32).unwrap(), None);
            assert_eq!(step(&mut quiet, 10.0).unwrap(), None);
            let sum = quiet.reducer().accumulated(GradTarget::Model, 0);
            let Some(reducer::Grad::Dense(sum)) = sum else {
                panic!("accumulated");
            };
            assert_eq!(sum.as_slice::<f32>().unwrap(), [11.0 + rank as f32]);
        }
        assert_eq!(group.sequence(), before, "nothing was sent");
        assert_eq!(step(&mut ddp, 100.0).unwrap(), Some(vec![111.5]));
        assert_eq!(step(&mut ddp, 2.0).unwrap(), Some(vec![2.0]), "used up");
    });
}

fn net_spec() -> &'static reducer::ParamSpec {
    static SPEC: std::sync::OnceLock<reducer::ParamSpec> = std::sync::OnceLock::new();
    SPEC.get_or_init(|| reducer::ParamSpec::new("fc.weight", [1, 1], DType::F32))
}

#[test]
fn a_forward_under_no_sync_that_no_backward_follows_is_forgotten() {
    ranks(2, |rank, group| {
        let mut ddp = ddp(mlp(0), group);
        let (x, _) = examples(&[rank]);
        let mut quiet = ddp.no_sync();
        quiet.forward(|net| net.forward(&x.into())).unwrap();
        drop(quiet);
        let mut sgd = Sgd::new(0.1);
        train(&mut ddp, &mut sgd, &[rank]).unwrap();
        assert!(ddp.replicas_agree().unwrap(), "the step was synchronised");
    });
}

fn running_mean(ddp: &Ddp<Net>) -> Vec<f32> {
    let spec = &ddp.model().buffers()[0];
    let mut bytes = vec![0; spec.len() * 4];
    ddp.model().read(Tensor::Buffer(0), &mut bytes).unwrap();
    bytemuck::pod_collect_to_vec(&bytes)
}

/// A net whose only buffer of interest is set apart on each rank.
fn norm(group: Group, rank: usize, config: DdpConfig) -> Ddp<Net> {
    let mut ddp = Ddp::new(
        Net::new(0).linear("fc", 4, 3).batch_norm("bn", 3),
        group,
        config,
    )
    .unwrap();
    ddp.update(|net| {
        let value = [rank as f32 + 1.0; 3];
        net.write(Tensor::Buffer(0), bytemuck::cast_slice(&value))
            .unwrap();
        net.set_training(false);
    });
    ddp
}

fn look(ddp: &mut Ddp<Net>) {
    let (x, _) = examples(&[0]);
    ddp.forward(|net| net.forward(&x.into())).unwrap();
}

#[test]
fn buffers_are_rank_0s_before_each_forward() {
    ranks(2, |rank, group| {
        let mut ddp = norm(group.clone(), rank, DdpConfig::default());
        assert_eq!(running_mean(&ddp), [rank as f32 + 1.0; 3]);
        look(&mut ddp);
        assert_eq!(running_mean(&ddp), [1.0; 3]);
        let config = DdpConfig {
            forward_sync_buffers: false,
            ..DdpConfig::default()
        };
        let mut ddp = norm(group, rank, config);
        look(&mut ddp);
        assert_eq!(running_mean(&ddp), [rank as f32 + 1.0; 3]);
    });
}

#[test]
fn a_forward_under_no_sync_spares_the_next_one_the_buffers() {
    ranks(2, |rank, group| {
        let mut ddp = norm(group, rank, DdpConfig::default());
        let set = |ddp: &mut Ddp<Net>| {
            ddp.update(|net| {
                let value = [rank as f32 + 1.0; 3];
                net.write(Tensor::Buffer(0), bytemuck::cast_slice(&value))
                    .unwrap();
            });
        };
        look(&mut ddp.no_sync());
        assert_eq!(running_mean(&ddp), [1.0; 3], "it is synchronised itself");
        set(&mut ddp);
        look(&mut ddp);
        assert_eq!(
            running_mean(&ddp),
            [rank as f32 + 1.0; 3],
            "the next is not"
        );
        look(&mut ddp);
        assert_eq!(running_mean(&ddp), [1.0; 3]);
        // Evaluation synchronises too, and spares the next one likewise.
        set(&mut ddp);
        let (x, _) = examples(&[0]);
        ddp.infer(|net| net.forward(&x.into())).unwrap();
        assert_eq!(running_mean(&ddp), [1.0; 3]);
    });
}

struct Averaging(Arc<Mutex<Vec<String>>>);

impl BufferHook for Averaging {
    fn run(&mut self, buffers: &mut [NamedBuffer], group: &dyn ProcessGroup) -> Result<()> {
        for buffer in buffers
            .iter_mut()
            .filter(|buffer| buffer.spec.dtype == DType::F32)
        {
            self.0.lock().push(buffer.spec.name.clone());
            group.allreduce_in_place(buffer.values.as_mut_slice::<f32>()?, ReduceOp::Avg)?;
        }
        Ok(())
    }
}

#[test]
fn a_hook_may_average_buffers_before_or_after_forward() {
    for when in [When::Before, When::After] {
        ranks(2, move |rank, group| {
            let mut ddp = norm(group, rank, DdpConfig::default());
            let seen = Arc::new(Mutex::new(Vec::new()));
            ddp.register_buffer_hook(when, Box::new(Averaging(Arc::clone(&seen))));
            let inside = ddp.forward(|net| {
                let mut mean = [0u8; 12];
                net.read(Tensor::Buffer(0), &mut mean).unwrap();
                bytemuck::pod_collect_to_vec::<u8, f32>(&mean)[0]
            });
            let expected = if when == When::Before {
                1.5
            } else {
                rank as f32 + 1.0
            };
            assert_eq!(inside.unwrap(), expected);
            assert_eq!(running_mean(&ddp), [1.5; 3]);
            assert_eq!(*seen.lock(), ["bn.running_mean", "bn.running_var"]);
        });
    }
}

/// Leaves buffers of another length, another type, or an error, on rank 1 only.
struct Careless(usize);

impl BufferHook for Careless {
    fn run(&mut self, buffers: &mut [NamedBuffer], group: &dyn ProcessGroup) -> Result<()> {
        // Nobody is still busy with what came before.
        group.barrier()?;
        match (group.rank(), self.0) {
            (0, _) => group.barrier()?,
            (_, 0) => buffers[0].values = Buffer::from_vec(vec![0.0f32; 2]),
            (_, 1) => buffers[0].values = Buffer::from_vec(vec![0i32; 3]),
            _ => return Err(Error::invalid("no luck")),
        }
        Ok(())
    }
}

#[test]
fn a_buffer_hook_that_fails_on_one_rank_fails_on_all() {
    for fault in 0..3 {
        ranks(2, move |rank, group| {
            let mut ddp = norm(group, rank, DdpConfig::default());
            ddp.register_buffer_hook(When::Before, Box::new(Careless(fault)));
            let err = ddp.forward(|_| ()).unwrap_err().to_string();
            let expected = match (rank, fault) {
                (0, _) => "the buffer hook of rank 1 failed",
                (_, 0) => "made 2 x f32 of buffer bn.running_mean, which is 3 x f32",
                (_, 1) => "made 3 x i32 of buffer bn.running_mean",
                _ => "no luck",
            };
            assert!(err.contains(expected), "rank {rank}: {err}");
            ddp.forward(|_| ()).unwrap_err();
        });
    }
}

#[test]
fn ignored_tensors_are_left_alone() {
    ranks(2, |rank, group| {
        let config = DdpConfig {
            ignore: vec!["fc1.bias".into(), "bn.running_mean".into()],
            ..DdpConfig::default()
        };
        let mut net = mlp(rank as u64).batch_norm("bn", 3);
        net.write(Tensor::Buffer(0), bytemuck::cast_slice(&[rank as f32; 3]))
            .unwrap();
        let own = mlp(rank as u64).values(1).to_vec();
        let mut ddp = Ddp::new(net, group, config).unwrap();
        assert_eq!(ddp.model().values(1), own, "not broadcast");
        assert_eq!(running_mean(&ddp), [rank as f32; 3]);
        assert_eq!(ddp.model().values(0), mlp(0).values(0));
        assert_eq!(ddp.reducer().params().len(), 5);
        let (x, y) = examples(&[rank, rank + 2]);
        let (_, grad) = ddp
            .forward(|net| cross_entropy(&net.forward(&x.into()), &y))
            .unwrap();
        let grads = ddp.backward(|net| net.backward(&grad)).unwrap();
        let all = ddp
            .group()
            .allgather_object(&grads.dense(1, &ddp.model().parameters()[1]))
            .unwrap();
        assert_ne!(all[0], all[1], "its gradient is this rank's own");
        let all = ddp
            .group()
            .allgather_object(&grads.dense(0, &ddp.model().parameters()[0]))
            .unwrap();
        assert_eq!(all[0], all[1]);
    });
}

#[test]
fn the_group_can_be_replaced_by_a_smaller_one_and_by_the_first_again() {
    ranks(3, |rank, group| {
        let mut ddp = ddp(mlp(0), group.clone());
        let mut sgd = Sgd::new(0.1);
        train(&mut ddp, &mut sgd, &[rank]).unwrap();
        train(&mut ddp, &mut sgd, &[rank]).unwrap();
        assert!(ddp.log().reducer.has_rebuilt_buckets);
        let pair = group.new_group(&[0, 1], "pair").unwrap();
        if let Some(pair) = pair {
            ddp.replace_group(pair.clone()).unwrap();
            assert!(!ddp.log().reducer.has_rebuilt_buckets);
            for _ in 0..3 {
                train(&mut ddp, &mut sgd, &[rank]).unwrap();
                assert!(ddp.replicas_agree().unwrap());
            }
            assert!(ddp.log().reducer.has_rebuilt_buckets, "again");
            ddp.replace_group(group.clone()).unwrap();
            pair.shutdown().unwrap();
        } else {
            ddp.replace_group(group.clone()).unwrap();
        }
        ddp.broadcast_state(0).unwrap();
        train(&mut ddp, &mut sgd, &[rank]).unwrap();
        assert!(ddp.replicas_agree().unwrap());
    });
}

#[test]
fn unused_parameters_are_named_when_they_are_not_allowed() {
    ranks(2, |_, group| {
        let net = mlp(0).branch("extra", 3);
        let mut ddp = ddp(net, group);
        let (x, y) = examples(&[0]);
        let forward = ddp.forward(|net| {
            net.set_branch("extra", false);
            cross_entropy(&net.forward(&x.into()), &y)
        });
        let (_, grad) = forward.unwrap();
        let err = ddp.backward(|net| net.backward(&grad)).unwrap_err();
        for part in ["4 (extra.weight), 5 (extra.bias)", "find_unused_parameters"] {
            assert!(err.to_string().contains(part), "{err}");
        }
        let (x, _) = examples(&[0]);
        let err = ddp.forward(|net| net.forward(&x.into())).unwrap_err();
        assert!(
            err.to_string().contains("replace the process group"),
            "{err}"
        );
    });
}

#[test]
fn views_keep_their_values_while_training_goes_on() {
    for as_views in [false, true] {
        views_keep_their_values(as_views);
    }
}

fn views_keep_their_values(as_views: bool) {
    ranks(2, move |rank, group| {
        let config = DdpConfig {
            gradient_as_bucket_view: as_views,
            ..DdpConfig::default()
        };
        let mut ddp = Ddp::new(mlp(0), group, config).unwrap();
        let mut kept = Vec::new();
        for n in 0..4 {
            let (x, y) = examples(&[n, rank]);
            let (_, grad) = ddp
                .forward(|net| cross_entropy(&net.forward(&x.into()), &y))
                .unwrap();
            let grads = ddp.backward(|net| net.backward(&grad)).unwrap();
            let Some(Gradient::View(view)) = grads.get(0).cloned() else {
                panic!("a view");
            };
            let values = view.as_slice::<f32>().unwrap().to_vec();
            kept.push((view, values));
        }
        for (view, values) in kept {
            assert_eq!(view.as_slice::<f32>().unwrap(), values);
        }
    });
}

#[test]
fn the_log_tells_what_happened_and_is_json() {
    ranks(2, |rank, group| {
        let mut ddp = ddp(mlp(0), group);
        ddp.register_comm_hook(Arc::new(AllReduceHook)).unwrap();
        let mut sgd = Sgd::new(0.1);
        for n in 0..3 {
            train(&mut ddp, &mut sgd, &[n, rank]).unwrap();
        }
        let log = ddp.log();
        assert_eq!((log.world_size, log.rank), (2, rank));
        assert_eq!(log.backend_name, "reference");
        let json = serde_json::to_value(&log).unwrap();
        assert_eq!(json["iteration"], 3);
        assert_eq!(json["num_parameter_tensors"], 4);
        assert_eq!(json["total_parameter_size_bytes"], (24 + 6 + 18 + 3) * 4);
        assert_eq!(json["comm_hook"], "allreduce");
        assert_eq!(json["has_rebuilt_buckets"], true);
        assert_eq!(
            json["prev_iteration_grad_ready_order_indices"],
            serde_json::json!([3, 2, 1, 0])
        );
        assert_eq!(
            json["rebuilt_per_bucket_param_indices"],
            serde_json::json!([[3, 2, 1, 0]])
        );
        assert_eq!(json["dtypes"], serde_json::json!(["f32"]));
        assert!(
            json["timeline"][0]["launched_ns"].as_u64() < json["timeline"][0]["done_ns"].as_u64()
        );
        let times = log.reducer.last;
        assert!(times.communication_ns > 0 && log.reducer.average.communication_ns > 0);
        let back: phalanx_ddp::DdpLog = serde_json::from_value(json).unwrap();
        assert_eq!(back, log);
        assert!(!log.environment.contains_key("PHALANX_TOKEN"));
    });
}

#[test]
fn the_plain_model_is_there_at_any_time() {
    ranks(1, |_, group| {
        let ddp = ddp(mlp(5), group);
        assert_eq!(ddp.model().specs().count(), 4);
        let mut net = ddp.into_inner();
        let (x, y) = examples(&[1]);
        let (_, grad) = cross_entropy(&net.forward(&x.into()), &y);
        assert!(matches!(
            net.backward(&grad).get(0),
            Some(Gradient::Dense(_))
        ));
    });
}

/// What was logged, as text.
#[derive(Clone, Default)]
struct Logged(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Logged {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn training_past_ddp_is_warned_about_once() {
    ranks(1, |_, group| {
        let logged = Logged::default();
        let writer = logged.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let mut ddp = ddp(mlp(0), group);
            let mut sgd = Sgd::new(0.1);
            train(&mut ddp, &mut sgd, &[0]).unwrap();
            assert!(!text(&logged).contains("without averaged gradients"));
            // Gradients of the plain model, which nobody averages.
            for _ in 0..2 {
                ddp.update(|net| {
                    let (x, y) = examples(&[0]);
                    let (_, grad) = cross_entropy(&net.forward(&x.into()), &y);
                    let grads = net.backward(&grad);
                    sgd.step(net, &grads);
                });
            }
            assert_eq!(
                text(&logged).matches("without averaged gradients").count(),
                1
            );
        });
    });
}

fn text(logged: &Logged) -> String {
    String::from_utf8(logged.0.lock().clone()).unwrap()
}
