//! `phalanx run` once per node: here several on one host, or in network namespaces.

mod launch;

use std::net::TcpListener;
use std::process::Command;

use launch::{WATCHDOG, assert_gone, eventually, pids, run, shell_ranks, start, wait_for_line};
use phalanx_testkit::{Proc, Signal};

/// An endpoint on loopback that nobody uses.
fn endpoint() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

/// The agent of one node.
fn node(rank: usize, nnodes: usize, endpoint: &str, more: &[&str], script: &str) -> Command {
    let (rank, nnodes) = (rank.to_string(), nnodes.to_string());
    let args = [
        "--nproc",
        "2",
        "--nnodes",
        &nnodes,
        "--node-rank",
        &rank,
        "--rdzv-endpoint",
        endpoint,
        "--node-timeout",
        "3",
        "--join-timeout",
        "30",
        "--grace",
        "1",
    ];
    let mut command = shell_ranks(&[&args, more].concat(), script);
    command.env("PHALANX_TOKEN", "one secret for all nodes");
    command
}

fn start_all(nnodes: usize, more: &[&str], script: &str) -> Vec<Proc> {
    let endpoint = endpoint();
    let nodes = (0..nnodes).map(|rank| start(node(rank, nnodes, &endpoint, more, script)));
    nodes.collect()
}

#[test]
fn ranks_are_numbered_over_all_nodes() {
    let script = "echo $RANK/$WORLD_SIZE node $GROUP_RANK/$GROUP_WORLD_SIZE local $LOCAL_RANK";
    for (rank, proc) in start_all(3, &[], script).into_iter().enumerate() {
        let end = launch::end(proc);
        assert_eq!(end.code, Some(0), "{end:?}");
        for local in 0..2 {
            let global = 2 * rank + local;
            end.assert_contains(&format!(
                "[{global}] {global}/6 node {rank}/3 local {local}\n"
            ));
        }
    }
}

#[test]
fn a_failure_on_one_node_ends_or_restarts_all() {
    let script = "[ $RANK = 3 ] && [ $TORCHELASTIC_RESTART_COUNT = 0 ] && { echo oh >&2; exit 6; }; \
                  [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; sleep 1000";
    for proc in start_all(2, &["--max-restarts", "1"], script) {
        let end = launch::end(proc);
        assert_eq!(end.code, Some(0), "{end:?}");
        end.assert_contains("rank 3 failed first: exit code 6");
        end.assert_contains("[3] oh\n");
        end.assert_contains("restart 1 of at most 1");
    }
    for proc in start_all(2, &[], script) {
        let end = launch::end(proc);
        assert_eq!(end.code, Some(6), "the same everywhere: {end:?}");
        end.assert_contains("rank 3 failed first: exit code 6");
    }
}

#[test]
fn an_interrupt_on_one_node_ends_all() {
    let nodes = start_all(2, &[], "echo ready; sleep 1000");
    nodes.iter().for_each(|proc| wait_for_line(proc, "ready"));
    nodes[1].signal(Signal::INT).unwrap();
    for proc in nodes {
        let end = launch::end(proc);
        assert_eq!(end.code, Some(130), "{end:?}");
    }
}

/// Ranks that say who they are and then sleep for ever.
fn sleepers(dir: &std::path::Path) -> String {
    format!(
        "echo $$ > {}/$RANK-$TORCHELASTIC_RESTART_COUNT; echo ready; exec sleep 1000",
        dir.display()
    )
}

#[test]
fn a_lost_node_ends_the_others() {
    for lost in [1, 0] {
        let dir = tempfile::tempdir().unwrap();
        let mut nodes = start_all(3, &[], &sleepers(dir.path()));
        eventually("all ranks run", || pids(dir.path()).len() == 6);
        let mut victim = nodes.remove(lost);
        victim.signal(Signal::KILL).unwrap();
        victim.wait_for(WATCHDOG).unwrap();
        for proc in nodes {
            let end = launch::end(proc);
            assert_eq!(end.code, Some(1), "{end:?}");
            end.assert_contains(&format!("node {lost} "));
            end.assert_contains("lost");
        }
        assert_gone(&pids(dir.path()));
    }
}

#[test]
fn a_node_that_hangs_is_lost_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let nodes = start_all(2, &[], &sleepers(dir.path()));
    eventually("all ranks run", || pids(dir.path()).len() == 4);
    nodes[1].signal(Signal::STOP).unwrap();
    let mut nodes = nodes.into_iter();
    let end = launch::end(nodes.next().unwrap());
    assert_eq!(end.code, Some(1), "{end:?}");
    end.assert_contains("node 1 ");
    let stopped = nodes.next().unwrap();
    stopped.signal(Signal::CONT).unwrap();
    let end = launch::end(stopped);
    assert_eq!(end.code, Some(1), "{end:?}");
    assert_gone(&pids(dir.path()));
}

#[test]
fn a_lost_node_is_replaced_if_restarts_are_left() {
    let dir = tempfile::tempdir().unwrap();
    let endpoint = endpoint();
    let more = ["--max-restarts", "1"];
    let script = format!(
        "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && {{ echo again; exit 0; }}; {}",
        sleepers(dir.path())
    );
    let agent = |rank| start(node(rank, 2, &endpoint, &more, &script));
    let first = agent(0);
    let mut victim = agent(1);
    eventually("all ranks run", || pids(dir.path()).len() == 4);
    victim.signal(Signal::KILL).unwrap();
    victim.wait_for(WATCHDOG).unwrap();
    wait_for_line(&first, "waiting for node 1");
    for proc in [agent(1), first] {
        let end = launch::end(proc);
        assert_eq!(end.code, Some(0), "{end:?}");
        end.assert_contains("again");
    }
    assert_gone(&pids(dir.path()));
}

#[test]
fn nodes_that_do_not_fit_together_are_told_why() {
    let endpoint = endpoint();
    let alone = start(node(0, 2, &endpoint, &["--join-timeout", "6"], "true"));
    let other_id = run(node(1, 2, &endpoint, &["--rdzv-id", "other"], "true"));
    assert_eq!(other_id.code, Some(1), "{other_id:?}");
    other_id.assert_contains("this node was started with other");
    let more_nodes = run(node(2, 3, &endpoint, &[], "true"));
    assert_eq!(more_nodes.code, Some(1), "{more_nodes:?}");
    more_nodes.assert_contains("which was started with --nnodes 2");
    let mut stranger = node(1, 2, &endpoint, &["--join-timeout", "4"], "true");
    stranger.env("PHALANX_TOKEN", "another secret");
    let stranger = run(stranger);
    assert_eq!(stranger.code, Some(1), "{stranger:?}");
    stranger.assert_contains("token");
    let end = launch::end(alone);
    assert_eq!(end.code, Some(1), "{end:?}");
    end.assert_contains("node 1 did not join within 6 s");
}

/// Two network namespaces with a wire between them, removed when dropped.
struct Wire(u32);

impl Wire {
    /// `None` if this user may not make one.
    fn new() -> Option<Self> {
        let wire = Self(std::process::id());
        let id = wire.0;
        let (a, b) = (wire.name(0), wire.name(1));
        let commands = [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("link add pha{id} netns {a} type veth peer name phb{id} netns {b}"),
            format!("-n {a} addr add 10.231.7.1/24 dev pha{id}"),
            format!("-n {b} addr add 10.231.7.2/24 dev phb{id}"),
            format!("-n {a} link set pha{id} up"),
            format!("-n {b} link set phb{id} up"),
            format!("-n {a} link set lo up"),
            format!("-n {b} link set lo up"),
        ];
        commands.iter().all(|args| ip(args)).then_some(wire)
    }

    fn name(&self, node: usize) -> String {
        format!("phalanx-{}-{node}", self.0)
    }

    fn cut(&self) {
        assert!(ip(&format!(
            "-n {} link set phb{} down",
            self.name(1),
            self.0
        )));
    }

    /// The same command on one of the two hosts.
    fn on(&self, node: usize, command: &Command) -> Command {
        let mut inside = Command::new("ip");
        inside.args(["netns", "exec", &self.name(node)]);
        inside.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        for node in 0..2 {
            ip(&format!("netns delete {}", self.name(node)));
        }
    }
}

fn ip(args: &str) -> bool {
    let output = Command::new("ip").args(args.split(' ')).output();
    output.is_ok_and(|output| output.status.success())
}

#[test]
fn nodes_on_two_networks_meet_and_notice_a_cut() {
    let Some(wire) = Wire::new() else {
        println!("not tested: making network namespaces takes root and the program ip");
        return;
    };
    let endpoint = "10.231.7.1:29400";
    let start_both = |script: &str| {
        [0, 1].map(|rank| start(wire.on(rank, &node(rank, 2, endpoint, &[], script))))
    };
    for proc in start_both("echo rank $RANK at $MASTER_ADDR") {
        let end = launch::end(proc);
        assert_eq!(end.code, Some(0), "{end:?}");
        end.assert_contains("at 10.231.7.1");
    }
    let dir = tempfile::tempdir().unwrap();
    let nodes = start_both(&sleepers(dir.path()));
    eventually("all ranks run", || pids(dir.path()).len() == 4);
    wire.cut();
    for proc in nodes {
        let end = launch::end(proc);
        assert_eq!(end.code, Some(1), "{end:?}");
        end.assert_contains("lost");
    }
    assert_gone(&pids(dir.path()));
}
