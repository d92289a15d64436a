//! The process group suite across network namespaces: hosts as the backend finds them, not as it
//! is told.
//!
//! Needs root, so it is not among the tests that `cargo test` runs by itself: `cargo xtask test`
//! runs it where it can, and says so where it cannot.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use phalanx_conformance::group::{Level, cases, run_rank};
use phalanx_native::NativeGroup;
use phalanx_pg::registry::GroupInit;
use phalanx_store::FileStore;
use phalanx_testkit::{World, is_rank};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A network namespace that lives as long as a process in it, which ends with this one.
struct Namespace(Child);

impl Namespace {
    fn new() -> Self {
        let mut holder = Command::new("unshare")
            .args(["--net", "sh", "-c", "echo ready && exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("util-linux");
        let stdout = holder.stdout.take().expect("a pipe");
        let namespace = Self(holder);
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).expect("a pipe");
        assert_eq!(line, "ready\n", "root may make network namespaces");
        namespace
    }

    fn path(&self) -> String {
        format!("/proc/{}/ns/net", self.0.id())
    }

    fn ip(&self, arguments: &str) {
        let status = Command::new("nsenter")
            .arg(format!("--net={}", self.path()))
            .arg("ip")
            .args(arguments.split(' '))
            .stdin(Stdio::null())
            .status();
        assert!(status.expect("iproute2").success(), "ip {arguments}");
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn address(host: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 87, 0, host as u8 + 1)
}

/// Two of them with a line between.
fn pair() -> [Namespace; 2] {
    let pair = [Namespace::new(), Namespace::new()];
    let other = pair[1].0.id();
    pair[0].ip(&format!("link add eth0 type veth peer eth0 netns {other}"));
    for (host, namespace) in pair.iter().enumerate() {
        namespace.ip("link set lo up");
        namespace.ip(&format!("address add {}/24 dev eth0", address(host)));
        namespace.ip("link set eth0 up");
    }
    pair
}

#[test]
fn the_suite_passes_across_network_namespaces() {
    let hosts = (!is_rank()).then(pair);
    let path = |host: usize| {
        hosts
            .as_ref()
            .map_or(String::new(), |hosts| hosts[host].path())
    };
    World::new(4)
        .deadline(Duration::from_secs(240))
        .env("NAMESPACE_0", path(0))
        .env("NAMESPACE_1", path(1))
        .run(|ctx| {
            let host = ctx.rank() / 2;
            let namespace = File::open(ctx.var(&format!("NAMESPACE_{host}"))).unwrap();
            let kind = Some(LinkNameSpaceType::Network);
            // Of this thread, and of those that it starts.
            move_into_link_name_space(namespace.as_fd(), kind).unwrap();
            // The world's own store is on the other side of the wall.
            let store = FileStore::open(ctx.dir().join("store"), None).unwrap();
            let mut init = GroupInit::new(Arc::new(store), ctx.rank(), ctx.size());
            init.timeout = Duration::from_secs(60);
            init.bind = Some(address(host).into());
            let group = NativeGroup::connect(&init).unwrap();
            let report = run_rank(&group, Level::Sample);
            group.shutdown().unwrap();
            println!("{report}");
            assert_eq!(report.skipped, []);
            assert_eq!(report.passed.len(), cases().len());
        });
}
