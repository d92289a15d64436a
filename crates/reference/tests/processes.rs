//! Ranks that are processes, one of which is killed.
#![cfg(unix)]

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use phalanx_pg::{ErrorKind, ProcessGroupExt, ReduceOp};
use phalanx_reference::{Options, ReferenceGroup};
use phalanx_store::{TcpStore, TcpStoreOptions, TcpStoreServer};

const SIZE: usize = 4;
const RANK_VAR: &str = "PHALANX_TEST_RANK";
const PORT_VAR: &str = "PHALANX_TEST_PORT";

/// What each process does; as a test it does nothing.
#[test]
fn rank() {
    let Ok(rank) = std::env::var(RANK_VAR) else {
        return;
    };
    let rank: usize = rank.parse().unwrap();
    let port = std::env::var(PORT_VAR).unwrap().parse().unwrap();
    let store = TcpStore::connect(&TcpStoreOptions::new("127.0.0.1", port)).unwrap();
    let options = Options {
        timeout: Duration::from_secs(60),
        ..Options::beside(&store).unwrap()
    };
    let group = ReferenceGroup::connect(Arc::new(store), rank, SIZE, &options).unwrap();
    let mut ones = [1i32];
    group.allreduce_in_place(&mut ones, ReduceOp::Sum).unwrap();
    println!("sum {}", ones[0]);
    if rank == 2 {
        std::thread::sleep(Duration::from_secs(60)); // until killed
    }
    let err = group.barrier().unwrap_err();
    assert_eq!(
        (err.kind(), err.peer()),
        (ErrorKind::PeerLost, Some(2)),
        "{err}"
    );
    assert_eq!(err.place().seq, Some(1));
}

fn start(rank: usize, port: u16) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "rank", "--nocapture"])
        .env(RANK_VAR, rank.to_string())
        .env(PORT_VAR, port.to_string())
        .stdout(Stdio::piped());
    command.spawn().unwrap()
}

#[test]
fn survivors_of_a_killed_process_learn_which_rank_it_was() {
    let server = TcpStoreServer::start(&["127.0.0.1:0".parse().unwrap()], None).unwrap();
    let port = server.local_addr().port();
    let mut ranks: Vec<Child> = (0..SIZE).map(|rank| start(rank, port)).collect();
    let outputs: Vec<_> = ranks
        .iter_mut()
        .map(|child| BufReader::new(child.stdout.take().unwrap()))
        .collect();
    let outputs = outputs.into_iter().map(|mut output| {
        let summed = output
            .by_ref()
            .lines()
            .any(|line| line.unwrap().ends_with("sum 4"));
        assert!(summed, "a rank ended before the sum");
        output
    });
    // Kept open, or the processes could not write.
    let outputs: Vec<_> = outputs.collect();
    ranks[2].kill().unwrap();
    for (rank, mut child) in ranks.into_iter().enumerate() {
        let status = child.wait().unwrap();
        assert_eq!(status.success(), rank != 2, "rank {rank}: {status}");
    }
    drop(outputs);
}
