//! Clients that come and go, and ten thousand that stay.

mod harness;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};

use harness::{Server, VALIDATE, eventually, number, string};
use phalanx_store::Store;
use rustix::process::{Resource, getrlimit, setrlimit};

/// Tells the process of [`holds_idle_connections`] where to connect.
const TARGET_VAR: &str = "PHALANX_TEST_IDLE_TARGET";
const IDLE: usize = 10_000;
/// Descriptors that a process needs besides.
const RESERVE: u64 = 64;

#[test]
fn a_thousand_clients_come_and_go_and_leave_nothing() {
    let server = Server::start();
    let store = server.store();
    let (base, descriptors) = (server.rss_kib(), server.descriptors());
    for i in 0..1000 {
        let mut raw = server.dial();
        let waits = [vec![6], number(1), string(format!("/key {i}").as_bytes())].concat();
        match i % 5 {
            0 => {}
            1 => raw.send(&VALIDATE[..3]),
            2 => raw.send(&VALIDATE),
            3 => raw.send(&[VALIDATE.to_vec(), waits].concat()),
            _ => raw.send(&[VALIDATE.to_vec(), vec![1], number(2)].concat()),
        }
    }
    server.assert_serves();
    eventually("all descriptors are closed", || {
        server.descriptors() == descriptors
    });
    assert_eq!(store.add("n", 1).unwrap(), 1);
    let used = server.rss_kib().saturating_sub(base);
    println!("after 1000 clients: {used} KiB more");
    assert!(used < 16 << 10, "{used} KiB stayed");
}

#[test]
fn clients_that_leave_while_they_wait_are_forgotten() {
    let server = Server::start();
    let store = server.store();
    let descriptors = server.descriptors();
    let wait = |key: &[u8]| [vec![6], number(1), string(key)].concat();
    // Woken for an element and gone before taking it: it must be offered to the next.
    let mut first = server.greet();
    first.send(&wait(b"/queue"));
    first.assert_answered();
    let second = server.store();
    let popper = std::thread::spawn(move || second.queue_pop("queue"));
    let leavers: Vec<_> = (0..200)
        .map(|i| {
            let mut raw = server.greet();
            raw.send(&wait(format!("/key {i}").as_bytes()));
            raw.assert_answered();
            raw
        })
        .collect();
    drop(leavers);
    store.queue_push("queue", b"element").unwrap();
    assert_eq!(first.read(), [0], "the first waiter is told of the element");
    drop(first);
    assert_eq!(popper.join().unwrap().unwrap(), b"element");
    for i in 0..200 {
        store.set(&format!("key {i}"), b"").unwrap();
    }
    assert_eq!(store.num_keys().unwrap(), 200);
    eventually("all descriptors are closed", || {
        server.descriptors() == descriptors
    });
}

#[test]
fn ten_thousand_idle_clients_cost_little_and_delay_nobody() {
    let server = Server::start();
    let store = server.store();
    let (base, descriptors) = (server.rss_kib(), server.descriptors());
    let mut crowd = Command::new(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "--nocapture",
            "holds_idle_connections",
        ])
        .env(TARGET_VAR, server.addr.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // Kept open: the other process still has its test's result to print.
    let mut lines = BufReader::new(crowd.stdout.take().unwrap()).lines();
    let held: usize = lines
        .by_ref()
        .map_while(Result::ok)
        .find_map(|line| line.strip_prefix("holding ")?.parse().ok())
        .expect("the other process says how many it holds");
    let possible = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX) - RESERVE;
    println!("{held} idle connections (wanted {IDLE}, the limit allows {possible})");
    assert_eq!(held, IDLE.min(usize::try_from(possible).unwrap_or(IDLE)));
    eventually("the server holds them all", || {
        server.descriptors() >= descriptors + held
    });
    for i in 0..100 {
        assert_eq!(store.add("others", 1).unwrap(), i + 1);
        server.assert_serves();
    }
    let used = server.rss_kib().saturating_sub(base);
    println!("{used} KiB for {held} connections");
    assert!(used < 64 << 10, "{used} KiB");
    // The other process ends when its standard input does.
    drop(crowd.stdin.take());
    assert!(crowd.wait().unwrap().success());
    eventually("all descriptors are closed", || {
        server.descriptors() == descriptors
    });
    let kept = server.rss_kib().saturating_sub(base);
    println!("{kept} KiB afterwards");
    assert!(kept < 32 << 10, "{kept} KiB stayed");
    assert_eq!(store.add("others", 1).unwrap(), 101);
}

#[test]
#[ignore = "the child process of another test"]
fn holds_idle_connections() {
    let Ok(target) = std::env::var(TARGET_VAR) else {
        return;
    };
    let target: SocketAddr = target.parse().unwrap();
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    let possible = limit.maximum.unwrap_or(u64::MAX) - RESERVE;
    let wanted = IDLE.min(usize::try_from(possible).unwrap_or(IDLE));
    let mut held = Vec::new();
    for i in 0..wanted {
        let Ok(mut stream) = TcpStream::connect(target) else {
            break;
        };
        // Half of them have introduced themselves.
        if i % 2 == 0 {
            stream.write_all(&VALIDATE).unwrap();
            stream.write_all(&[13, 1, 2, 3, 4]).unwrap();
            stream.read_exact(&mut [0; 4]).unwrap();
        }
        held.push(stream);
    }
    // Below the harness's own line, for it does not end its line before the test has.
    println!("\nholding {}", held.len());
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}
