//! `phalanx store` as a process: its first line, its end, and what its end does to clients.

mod harness;

use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use harness::{Server, WATCHDOG};
use phalanx_store::{Store, StoreError};
use rustix::process::Signal;

#[test]
fn it_serves_until_it_is_interrupted_or_terminated() {
    for signal in [Signal::INT, Signal::TERM] {
        let mut server = Server::start();
        assert_ne!(server.addr.port(), 0);
        let store = server.store();
        store.set("k", b"v").unwrap();
        assert_eq!(store.get("k").unwrap(), b"v");
        server.signal(signal);
        let (code, rest) = server.end();
        assert_eq!(code, Some(0), "after {signal:?}: {}", server.log());
        assert_eq!(rest, "", "stdout is for the first line alone");
    }
}

#[test]
fn it_says_why_it_cannot_start() {
    let server = Server::start();
    let taken = server.addr.to_string();
    let cases = [
        (taken.as_str(), "another process uses this port"),
        ("127.0.0.1", "HOST:PORT"),
        ("127.0.0.1:port", "HOST:PORT"),
    ];
    for (bind, expected) in cases {
        let output = Command::new(env!("CARGO_BIN_EXE_phalanx"))
            .args(["store", "--bind", bind])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(output.stdout.is_empty());
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(expected) && text.contains(bind), "{text}");
    }
    server.assert_serves();
}

#[test]
fn a_killed_server_turns_every_blocked_call_into_an_error() {
    let mut server = Server::start();
    let idle = server.store();
    idle.set("k", b"v").unwrap();
    type Call = fn(&dyn Store) -> Result<(), StoreError>;
    let calls: [Call; 5] = [
        |s| s.get("never").map(drop),
        |s| s.wait(&["k", "never"]),
        |s| s.multi_get(&["never"]).map(drop),
        |s| s.queue_pop("queue").map(drop),
        |s| s.barrier("gate", 2),
    ];
    let (sender, ended) = mpsc::channel();
    for (i, call) in calls.into_iter().enumerate() {
        let store = server.store();
        // The watchdog below must be what ends a call that does not notice.
        store.set_timeout(10 * WATCHDOG);
        let sender = sender.clone();
        std::thread::spawn(move || {
            let result = call(&store);
            // A handle that lost its server stays that way, and says so at once.
            let later: Vec<_> = (0..30).map(|_| store.add("n", 1)).collect();
            sender.send((i, result, later)).unwrap();
        });
    }
    // Whoever has not blocked yet meets a dead server as well.
    std::thread::sleep(std::time::Duration::from_millis(100));
    server.signal(Signal::KILL);
    server.end();
    for _ in 0..calls.len() {
        let (i, result, later) = ended
            .recv_timeout(WATCHDOG)
            .expect("a blocked call did not notice that the server died");
        let err = result.expect_err("the server is dead");
        assert!(matches!(err, StoreError::Connection { .. }), "{i}: {err:?}");
        for result in later {
            let err = result.expect_err("the server is dead");
            assert!(matches!(err, StoreError::Connection { .. }), "{err:?}");
        }
    }
    // One that was idle learns it from its next call.
    let err = idle.num_keys().unwrap_err();
    assert!(matches!(err, StoreError::Connection { .. }), "{err:?}");
    assert!(err.to_string().contains(&server.addr.to_string()), "{err}");
}

#[test]
fn a_terminated_server_ends_blocked_calls_as_well() {
    let mut server = Server::start();
    let store = server.store();
    let waiter = server.store();
    let thread = std::thread::spawn(move || waiter.get("never"));
    store.num_keys().unwrap();
    server.signal(Signal::TERM);
    server.end();
    let err = thread.join().unwrap().unwrap_err();
    assert!(matches!(err, StoreError::Connection { .. }), "{err:?}");
}

#[test]
fn calls_on_a_server_that_hangs_end_and_say_so() {
    let server = Server::start();
    type Call = fn(&dyn Store) -> Result<(), StoreError>;
    let calls: [Call; 3] = [
        |store| store.get("never").map(drop),
        |store| store.add("counter", 1).map(drop),
        |store| store.barrier("two", 2),
    ];
    let stores = calls.map(|_| server.store());
    server.stop();
    std::thread::scope(|scope| {
        let ends = calls.iter().zip(&stores).map(|(call, store)| {
            store.set_timeout(Duration::from_millis(300));
            scope.spawn(move || call(store))
        });
        for end in ends.collect::<Vec<_>>() {
            let err = end.join().unwrap().unwrap_err().to_string();
            assert!(err.contains("has stopped answering"), "{err}");
        }
    });
    server.signal(Signal::CONT);
    server.store().set("k", b"v").unwrap();
}

#[test]
fn a_long_answer_arrives_whole_and_a_longer_one_is_never_made() {
    let server = Server::start();
    let (store, other) = (server.store(), server.store());
    let piece = vec![7; 8 << 20];
    for _ in 0..8 {
        store.append("long", &piece).unwrap();
    }
    let reader = std::thread::spawn(move || store.get("long").map(|value| (store, value)));
    for _ in 0..100 {
        assert_eq!(other.num_keys().unwrap(), 1);
    }
    let (store, value) = reader.join().unwrap().unwrap();
    assert_eq!(value.len(), 8 * piece.len());
    assert!(value.iter().all(|&byte| byte == 7));
    store.append("long", b"x").unwrap();
    assert!(matches!(
        store.num_keys(),
        Err(StoreError::Connection { .. })
    ));
    assert_eq!(other.num_keys().unwrap(), 1);
}
