//! What `PHALANX_LOG` shows of a program that trains.
#![cfg(feature = "log")]

use std::process::Command;

use phalanx::ddp::builtin::{Matrix, Net};
use phalanx::prelude::*;

const CHILD: &str = "TEST_LOG_CHILD";

/// Trains, when it is a child of the test below: in the second pass a parameter has no gradient.
#[test]
fn training() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    assert!(phalanx::log::init("warn") && !phalanx::log::init("warn"));
    let group = phalanx::init_with("native").unwrap();
    let config = DdpConfig {
        find_unused_parameters: true,
        rebuild_with_unused: true,
        ..DdpConfig::default()
    };
    let net = Net::new(1).linear("fc", 2, 2).branch("extra", 2);
    let mut ddp = Ddp::new(net, group.clone(), config).unwrap();
    let x = Matrix::new(1, 2, vec![1.0, 2.0]);
    for step in 0..3 {
        let out = ddp.forward(|net| {
            net.set_branch("extra", step == 0);
            net.forward(&x.clone().into())
        });
        out.unwrap();
        let grad = Matrix::new(1, 2, vec![1.0; 2]);
        ddp.backward(|net| net.backward(&grad)).unwrap();
    }
    group.shutdown().unwrap();
}

#[test]
fn buckets_and_graph_can_be_watched() {
    let output = |asked: &str| {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "training", "--nocapture"])
            .env(CHILD, "1")
            .env("PHALANX_LOG", asked)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&child.stderr).into_owned();
        assert!(child.status.success(), "{text}");
        text
    };
    let all = output("buckets,graph");
    assert!(all.contains("buckets: rebuilt in ready order"), "{all}");
    assert!(all.contains("gone=[\"extra"), "{all}");
    let some = output("graph");
    assert!(
        !some.contains("buckets:") && some.contains("graph:"),
        "{some}"
    );
    let none = output("");
    assert!(
        !none.contains("buckets:") && !none.contains("graph:"),
        "{none}"
    );
}
