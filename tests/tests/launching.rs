//! One program, the README's, under every way of starting it that this machine has.

use std::process::Command;
use std::time::Duration;

use phalanx_testkit::Proc;
use phalanx_tests::programs;

const WATCHDOG: Duration = Duration::from_secs(120);

/// Runs it to its end; all that it printed.
#[track_caller]
fn succeed(mut command: Command) -> String {
    for name in ["RANK", "WORLD_SIZE", "PHALANX_TOKEN", "PHALANX_BACKEND"] {
        command.env_remove(name);
    }
    let shown = format!("{command:?}");
    let mut proc = Proc::spawn(command).unwrap_or_else(|err| panic!("{shown}: {err}"));
    let status = proc.wait_for(WATCHDOG).unwrap();
    let text = proc.log().text();
    assert!(
        status.is_some_and(|status| status.success()),
        "{shown}\n{text}"
    );
    text
}

fn phalanx(args: &[&str]) -> Command {
    let mut command = Command::new(programs().join("phalanx"));
    command.args(args);
    command
}

fn allreduce() -> String {
    let path = programs().join("examples/allreduce");
    path.into_os_string()
        .into_string()
        .expect("a path in UTF-8")
}

#[test]
fn alone() {
    let text = succeed(Command::new(allreduce()));
    assert!(text.contains("rank 0 of 1: [0.0, 1.0]"), "{text}");
}

#[test]
fn under_phalanx_run() {
    let text = succeed(phalanx(&["run", "--nproc", "3", "--", &allreduce()]));
    for rank in 0..3 {
        let line = format!("[{rank}] rank {rank} of 3: [3.0, 3.0]");
        assert!(text.contains(&line), "{text}");
    }
}

#[test]
fn on_two_nodes() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = free.local_addr().unwrap().to_string();
    drop(free);
    let nodes = ["0", "1"].map(|rank| {
        let endpoint = endpoint.clone();
        std::thread::spawn(move || {
            let mut node = phalanx(&["run", "--nproc", "2", "--nnodes", "2", "--node-rank", rank]);
            node.args(["--rdzv-endpoint", &endpoint, "--no-token"]);
            node.arg(allreduce());
            succeed(node)
        })
    });
    let text: String = nodes.map(|node| node.join().unwrap()).concat();
    for rank in 0..4 {
        let line = format!("[{rank}] rank {rank} of 4: [6.0, 4.0]");
        assert!(text.contains(&line), "{text}");
    }
}

#[test]
fn under_mpirun() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        println!("not tested: there is no mpirun; on Debian: apt-get install openmpi-bin");
        return;
    }
    let mut by_us = phalanx(&["run", "--nproc", "2", "--launcher", "mpirun", &allreduce()]);
    let mut by_hand = Command::new("mpirun");
    by_hand.args(["-n", "2", &allreduce()]);
    for command in [&mut by_us, &mut by_hand] {
        // Two ranks on a machine that may have one processor, perhaps in a container.
        let asked = [
            "OMPI_ALLOW_RUN_AS_ROOT",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
            "OMPI_MCA_rmaps_base_oversubscribe",
        ];
        command.envs(asked.map(|name| (name, "1")));
    }
    for command in [by_us, by_hand] {
        let text = succeed(command);
        for rank in 0..2 {
            let line = format!("rank {rank} of 2: [1.0, 2.0]");
            assert!(text.contains(&line), "{text}");
        }
    }
}
