//! Replays what PyTorch did, on any group. Tests of other crates include this file.

use std::sync::Arc;

use phalanx_ddp::builtin::{Bag, Gradients, Input, Matrix, Net, Sgd, cross_entropy};
use phalanx_ddp::reducer::{AllReduceHook, CommHook, CompressHook, Slot};
use phalanx_ddp::{Ddp, DdpConfig, Join, JoinOptions, Replica, Tensor};
use phalanx_pg::{Device, ProcessGroup};
use serde_json::Value;

/// How far numbers may be from PyTorch's: it sums products in another order than we do.
const ABSOLUTE: f32 = 1e-6;
const RELATIVE: f32 = 1e-5;

pub(crate) fn load(world: usize) -> Vec<Value> {
    let text = match world {
        2 => include_str!("../../golden/ddp_2.json"),
        4 => include_str!("../../golden/ddp_4.json"),
        _ => panic!("there are worlds of 2 and 4"),
    };
    let golden: Value = serde_json::from_str(text).unwrap();
    assert_eq!(golden["world"], world);
    golden["cases"].as_array().unwrap().clone()
}

/// One rank's part of a case; panics where it differs. Where the group has devices, gradients are
/// on that of the rank's number.
pub(crate) fn replay(case: &Value, group: Arc<dyn ProcessGroup>) {
    let rank = group.rank();
    let mut net = build(&case["net"]);
    if group.capabilities().cuda {
        net = net.with_gradients_on(Device::Cuda(rank as u32), Arc::clone(&group));
    }
    fill(&mut net, &case["initial"], rank);
    if case["active"].is_null() {
        net.set_branch("never", false);
    }
    let config = config(&case["config"]);
    let mut ddp = Ddp::new(net, group, config).unwrap();
    let expect = &case["expect"];
    assert_eq!(
        lists(&expect["initial_layout"]),
        ddp.reducer().buckets(),
        "{}",
        case["name"]
    );
    assert_eq!(
        list(&expect["bucket_sizes"]),
        ddp.log().reducer.bucket_sizes
    );
    if let Some(hook) = hook(&case["hook"]) {
        ddp.register_comm_hook(hook).unwrap();
    }
    let mut sgd = Sgd::new(0.1).momentum(case["momentum"].as_f64().unwrap() as f32);
    let steps = case["data"][rank].as_array().unwrap();
    let options = JoinOptions {
        divide_by_initial_world_size: case["join"] != "effective",
        enable: !case["join"].is_null(),
        ..JoinOptions::default()
    };
    let join = Join::begin(&mut [&mut ddp], options).unwrap();
    let mut order = Vec::new();
    for (s, micro) in steps.iter().enumerate() {
        order = ddp.log().reducer.prev_iteration_grad_ready_order_indices;
        let grads = step(case, &mut ddp, s, micro.as_array().unwrap(), rank);
        if rank == 0 && (s == 0 || s + 1 == steps.len()) {
            let which = usize::from(s > 0);
            check_grads(case, &ddp, &grads, &expect["grads"][which]);
        }
        ddp.update(|net| sgd.step(net, &grads));
    }
    join.end(&mut [&mut ddp]).unwrap();
    if rank == 0 {
        assert_eq!(list(&expect["ready_order"]), order, "{}", case["name"]);
    }
    let rebuilt = ddp.log().reducer.rebuilt_per_bucket_param_indices;
    assert_eq!(lists(&expect["rebuilt"]), rebuilt, "{}", case["name"]);
    check_end(case, &ddp);
}

fn step(case: &Value, ddp: &mut Ddp<Net>, s: usize, micro: &[Value], rank: usize) -> Gradients {
    let branches = case["active"][rank][s].as_bool();
    let mut last = None;
    for (m, data) in micro.iter().enumerate() {
        let (input, targets) = batch(data);
        let mut run = |ddp: &mut Ddp<Net>| {
            let forward = ddp.forward(|net| {
                if let Some(on) = branches {
                    net.set_branch("extra", on);
                    net.set_branch("never", false);
                }
                cross_entropy(&net.forward(&input), &targets)
            });
            let (_, grad) = forward.unwrap();
            last = Some(ddp.backward(|net| net.backward(&grad)).unwrap());
        };
        match m + 1 == micro.len() {
            true => run(ddp),
            false => run(&mut ddp.no_sync()),
        }
    }
    last.unwrap()
}

fn check_grads(case: &Value, ddp: &Ddp<Net>, grads: &Gradients, expected: &Value) {
    for (i, spec) in ddp.model().specs().enumerate() {
        let what = format!("{} gradient of {}", case["name"], spec.name);
        let ours = grads.dense(i, spec);
        match &expected[&spec.name] {
            Value::Null => assert!(ours.is_none(), "{what}"),
            values => close(&ours.expect("a gradient"), values, case, &what),
        }
    }
}

fn check_end(case: &Value, ddp: &Ddp<Net>) {
    let net = ddp.model();
    let expect = &case["expect"];
    for (i, spec) in net.specs().enumerate() {
        let what = format!("{} parameter {}", case["name"], spec.name);
        close(
            net.values(i),
            &expect["parameters"][&spec.name],
            case,
            &what,
        );
    }
    let unsynced = case["config"]["forward_sync_buffers"] == false;
    if unsynced && ddp.group().rank() != 0 {
        return; // each rank has its own, and the file has rank 0's
    }
    for (i, spec) in net.buffers().iter().enumerate() {
        let mut bytes = vec![0; spec.len() * spec.dtype.size()];
        net.read(Tensor::Buffer(i), &mut bytes).unwrap();
        // Buffers are sent before each forward: at the end each rank has its last batch in it.
        if ddp.group().rank() != 0 && case["join"].is_null() {
            continue;
        }
        let values: Vec<f32> = match spec.dtype {
            phalanx_pg::DType::I64 => vec![i64::from_ne_bytes(bytes.try_into().unwrap()) as f32],
            _ => bytemuck::pod_collect_to_vec(&bytes),
        };
        let what = format!("{} buffer {}", case["name"], spec.name);
        close(&values, &expect["buffers"][&spec.name], case, &what);
    }
}

fn close(ours: &[f32], theirs: &Value, case: &Value, what: &str) {
    let theirs = theirs
        .as_array()
        .unwrap_or_else(|| panic!("{what} is missing"));
    assert_eq!(ours.len(), theirs.len(), "{what}");
    // 16 bits leave 11 or 8 digits; the order of rounding differs.
    let (absolute, relative) = match case["hook"].as_str() {
        Some("fp16_compress") => (1e-3, 2e-3),
        Some("bf16_compress") => (8e-3, 1.6e-2),
        _ => (ABSOLUTE, RELATIVE),
    };
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        let b = b.as_f64().unwrap() as f32;
        let allowed = absolute + relative * b.abs();
        assert!(
            (a - b).abs() <= allowed,
            "{what}[{i}]: {a} here, {b} in PyTorch"
        );
    }
}

fn build(layers: &Value) -> Net {
    let mut net = Net::new(0);
    for layer in layers.as_array().unwrap() {
        let name = layer[1].as_str().unwrap_or_default();
        let size = |at: usize| layer[at].as_u64().unwrap() as usize;
        net = match layer[0].as_str().unwrap() {
            "linear" => net.linear(name, size(2), size(3)),
            "relu" => net.relu(),
            "batch_norm" => net.batch_norm(name, size(2)),
            "branch" => net.branch(name, size(2)),
            "embedding_bag" => {
                let bag = if layer[4] == "sum" {
                    Bag::Sum
                } else {
                    Bag::Mean
                };
                net.embedding_bag(name, size(2), size(3), bag, true)
            }
            other => panic!("{other}"),
        };
    }
    net
}

/// Rank 0 has the values; the others get them from it.
fn fill(net: &mut Net, initial: &Value, rank: usize) {
    let names: Vec<String> = net.specs().map(|spec| spec.name.clone()).collect();
    for (i, name) in names.iter().enumerate() {
        let values = initial[name].as_array().unwrap().iter();
        let values = values.map(|value| value.as_f64().unwrap() as f32);
        let to = net.values_mut(i).iter_mut();
        to.zip(values)
            .for_each(|(to, value)| *to = if rank == 0 { value } else { 0.25 });
    }
}

fn config(given: &Value) -> DdpConfig {
    let mut config = serde_json::to_value(DdpConfig::default()).unwrap();
    for (name, value) in given.as_object().unwrap() {
        config[name] = value.clone();
    }
    serde_json::from_value(config).unwrap()
}

fn hook(name: &Value) -> Option<Arc<dyn CommHook>> {
    Some(match name.as_str()? {
        "allreduce" => Arc::new(AllReduceHook),
        "fp16_compress" => Arc::new(CompressHook::F16),
        "bf16_compress" => Arc::new(CompressHook::Bf16),
        other => panic!("{other}"),
    })
}

fn batch(data: &Value) -> (Input, Vec<usize>) {
    let targets = list(&data["targets"]);
    if let Some(bags) = data["bags"].as_array() {
        let (mut indices, mut offsets) = (Vec::new(), Vec::new());
        for bag in bags {
            offsets.push(indices.len());
            indices.extend(list(bag));
        }
        return (Input::Bags { indices, offsets }, targets);
    }
    let rows = data["x"].as_array().unwrap();
    let values = rows.iter().flat_map(|row| row.as_array().unwrap());
    let values: Vec<f32> = values.map(|value| value.as_f64().unwrap() as f32).collect();
    (
        Matrix::new(rows.len(), values.len() / rows.len(), values).into(),
        targets,
    )
}

fn list(value: &Value) -> Vec<usize> {
    let numbers = value.as_array().unwrap().iter();
    numbers.map(|n| n.as_u64().unwrap() as usize).collect()
}

fn lists(value: &Value) -> Vec<Vec<Slot>> {
    value.as_array().unwrap().iter().map(list).collect()
}
