//! Threads as ranks, through real sockets and files.

use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use super::*;
use crate::tcp::{TcpStore, TcpStoreOptions};

/// A port that was free a moment ago.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

fn options() -> RendezvousOptions {
    let limit = Duration::from_secs(30);
    RendezvousOptions {
        timeouts: Timeouts::new(limit, limit),
        ..Default::default()
    }
}

/// Every rank on a thread of its own.
fn ranks<T: Send>(world_size: usize, body: impl Fn(usize) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = (0..world_size)
            .map(|rank| scope.spawn(move || body(rank)))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Each rank shows that it shares the store with the others, then leaves.
fn sum_of_ranks(meeting: Rendezvous) -> i64 {
    let rank = i64::try_from(meeting.rank()).unwrap();
    let (store, world_size) = (&meeting.store, meeting.world_size());
    store.add("sum", rank).unwrap();
    store.barrier("added", world_size).unwrap();
    let sum = store.add("sum", 0).unwrap();
    meeting.leave().unwrap();
    sum
}

#[test]
fn the_rank_that_serves_leaves_last() {
    let url = format!("tcp://127.0.0.1:{}", free_port());
    for round in 0..50 {
        ranks(4, |rank| {
            let meeting = from_url(&url, Some(rank), Some(4), &options()).unwrap();
            let left = meeting.leave();
            assert!(left.is_ok(), "round {round}: {left:?}");
        });
    }
}

#[test]
fn a_rank_that_does_not_leave_is_told() {
    let url = format!("tcp://127.0.0.1:{}", free_port());
    let results = ranks(2, |rank| {
        let limit = Duration::from_secs(1);
        let options = RendezvousOptions {
            timeouts: Timeouts::new(limit, limit),
            ..Default::default()
        };
        let meeting = from_url(&url, Some(rank), Some(2), &options).unwrap();
        match rank {
            0 => meeting.leave(),
            _ => Ok(()),
        }
    });
    let text = results[0].as_ref().unwrap_err().to_string();
    assert_eq!(text, "1 of 2 ranks did not leave within 1 s");
}

#[test]
fn ranks_meet_through_tcp() {
    let url = format!("tcp://127.0.0.1:{}", free_port());
    let sums = ranks(4, |rank| {
        let meeting = from_url(&url, Some(rank), Some(4), &options()).unwrap();
        assert_eq!(meeting.serves_at().is_some(), rank == 0);
        assert_eq!(meeting.base.timeout(), Duration::from_secs(30));
        sum_of_ranks(meeting)
    });
    assert_eq!(sums, [6; 4]);
}

#[test]
fn localhost_and_a_bind_address_work() {
    for (host, bind) in [
        ("localhost", None),
        ("localhost", Some("0.0.0.0")),
        ("127.0.0.1", Some("127.0.0.1")),
    ] {
        let url = format!("tcp://{host}:{}", free_port());
        let options = RendezvousOptions {
            bind: bind.map(|bind| bind.parse().unwrap()),
            token: Some(JobToken::new("secret").unwrap()),
            ..options()
        };
        let sums = ranks(2, |rank| {
            sum_of_ranks(from_url(&url, Some(rank), Some(2), &options).unwrap())
        });
        assert_eq!(sums, [1; 2], "{host} {bind:?}");
    }
}

#[test]
fn workers_of_an_agent_are_all_clients_and_attempts_do_not_mix() {
    let server = TcpStoreServer::start(&["127.0.0.1:0".parse().unwrap()], None).unwrap();
    let port = server.local_addr().port().to_string();
    for attempt in ["0", "1", "1"] {
        let sums = ranks(2, |rank| {
            let env = LauncherEnv::from_lookup(&|name| {
                let value = match name {
                    "RANK" => rank.to_string(),
                    "WORLD_SIZE" => "2".to_owned(),
                    "MASTER_ADDR" => "127.0.0.1".to_owned(),
                    "MASTER_PORT" => port.clone(),
                    "TORCHELASTIC_RUN_ID" => "job".to_owned(),
                    "TORCHELASTIC_USE_AGENT_STORE" => "True".to_owned(),
                    "TORCHELASTIC_RESTART_COUNT" => attempt.to_owned(),
                    _ => return None,
                };
                Some(value)
            });
            let meeting = join(env.unwrap(), &options()).unwrap();
            assert_eq!(meeting.serves_at(), None);
            sum_of_ranks(meeting)
        });
        assert_eq!(sums, [1; 2], "attempt {attempt}");
    }
}

#[test]
fn ranks_meet_in_a_file_again_and_again() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("file://{}/job", dir.path().display());
    for _ in 0..3 {
        let sums = ranks(3, |rank| {
            sum_of_ranks(from_url(&url, Some(rank), Some(3), &options()).unwrap())
        });
        assert_eq!(sums, [3; 3]);
    }
    assert!(!dir.path().join("job").exists());
}

#[test]
fn a_world_of_one_needs_nobody() {
    let meeting = join(LauncherEnv::alone(), &options()).unwrap();
    assert_eq!((meeting.rank(), meeting.world_size()), (0, 1));
    assert_eq!(sum_of_ranks(meeting), 0);
}

/// Lets the last rank in only after ranks 0 and 1 have registered.
fn after_the_others(port: u16) {
    let store = TcpStore::connect(&TcpStoreOptions::new("127.0.0.1", port)).unwrap();
    let keys = [
        "phalanx/attempt_0/round_0/rank_0",
        "phalanx/attempt_0/round_0/rank_1",
    ];
    store.wait(&keys).unwrap();
}

#[test]
fn everyone_learns_who_is_missing_before_the_server_goes() {
    let port = free_port();
    let texts = ranks(3, |rank| {
        let mut options = options();
        if rank == 2 {
            after_the_others(port);
            let limit = Duration::from_secs(1);
            options.timeouts = Timeouts::new(limit, limit);
        }
        let url = format!("tcp://127.0.0.1:{port}");
        from_url(&url, Some(rank), Some(4), &options)
            .unwrap_err()
            .to_string()
    });
    let expected = "rank 3 did not join within 1 s (joined: 0,1,2); is it started with the same URL and \
         PHALANX_TOKEN?";
    assert_eq!(texts, [expected; 3]);
}

#[test]
fn everyone_learns_of_a_different_world_size() {
    let port = free_port();
    let texts = ranks(3, |rank| {
        let mut world_size = 3;
        if rank == 2 {
            after_the_others(port);
            world_size = 4;
        }
        let url = format!("tcp://127.0.0.1:{port}");
        from_url(&url, Some(rank), Some(world_size), &options())
            .unwrap_err()
            .to_string()
    });
    for text in texts {
        assert!(text.contains("disagree about the world size"), "{text}");
    }
}

#[test]
fn a_port_in_use_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let url = format!("tcp://127.0.0.1:{port}");
    let text = from_url(&url, Some(0), Some(2), &options())
        .unwrap_err()
        .to_string();
    assert!(
        text.contains(&format!("cannot serve the store on port {port}")),
        "{text}"
    );
}

#[test]
fn an_address_of_another_host_is_refused_with_the_way_out() {
    // A documentation address, which no host has.
    let text = from_url("tcp://192.0.2.200:9", Some(0), Some(2), &options());
    let text = text.unwrap_err().to_string();
    assert!(text.contains("192.0.2.200"), "{text}");
    assert!(text.contains("set PHALANX_STORE_BIND"), "{text}");
    let options = RendezvousOptions {
        bind: Some("192.0.2.201".parse().unwrap()),
        ..options()
    };
    let text = from_url("tcp://127.0.0.1:9", Some(0), Some(2), &options);
    let text = text.unwrap_err().to_string();
    assert!(text.contains("PHALANX_STORE_BIND=192.0.2.201"), "{text}");
}

#[test]
fn a_bad_bind_address_is_named() {
    let read = |text: &str| bind_address(&|name| (name == BIND_VAR).then(|| text.to_owned()));
    assert_eq!(read("").unwrap(), None);
    assert_eq!(read("10.0.0.1").unwrap(), Some("10.0.0.1".parse().unwrap()));
    let text = read("eth0").unwrap_err().to_string();
    assert!(text.contains("PHALANX_STORE_BIND=\"eth0\""), "{text}");
}
