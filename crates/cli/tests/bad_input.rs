//! What a store server does with clients that are not what they should be.

mod harness;

use std::io::{ErrorKind, Read, Write};
use std::time::Duration;

use harness::{Raw, Server, VALIDATE, eventually, number, string};
use phalanx_store::Store;

const MIB: usize = 1 << 20;
const MAX_KEY: usize = 8192;
const MAX_VALUE: usize = 8 * MIB;
const MAX_LIST: usize = 131_072;

/// Bytes in KiB, as RSS is counted.
const fn kib(bytes: usize) -> usize {
    bytes >> 10
}

#[test]
fn oversize_lengths_and_counts_are_refused_at_their_header() {
    let server = Server::start();
    let mut cases: Vec<(String, Vec<u8>)> = Vec::new();
    for len in [MAX_KEY + 1, 1 << 31, 1 << 40, 1 << 63, usize::MAX] {
        for opcode in [1, 2, 3, 4, 8, 9, 14, 15, 16, 18] {
            let name = format!("opcode {opcode} with a key of {len}");
            cases.push((name, [vec![opcode], number(len)].concat()));
        }
        for opcode in [5, 6, 10, 11] {
            let name = format!("opcode {opcode} with a first key of {len}");
            cases.push((name, [vec![opcode], number(2), number(len)].concat()));
        }
    }
    for len in [MAX_VALUE + 1, 1 << 31, 1 << 63, usize::MAX] {
        for opcode in [1, 2, 9, 14] {
            let name = format!("opcode {opcode} with a value of {len}");
            cases.push((name, [vec![opcode], string(b"/k"), number(len)].concat()));
        }
        let desired = [vec![2], string(b"/k"), string(b"old"), number(len)].concat();
        cases.push((format!("COMPARE_SET to a value of {len}"), desired));
        let pair = [vec![11], number(1), string(b"/k"), number(len)].concat();
        cases.push((format!("MULTI_SET with a value of {len}"), pair));
    }
    for count in [MAX_LIST + 1, 1 << 61, usize::MAX] {
        for opcode in [5, 6, 10, 11] {
            let name = format!("opcode {opcode} with {count} keys");
            cases.push((name, [vec![opcode], number(count)].concat()));
        }
    }
    for (name, bytes) in &cases {
        let mut raw = server.greet();
        raw.send(bytes);
        raw.assert_refused(name);
    }
    server.assert_serves();
    assert_eq!(
        server.store().num_keys().unwrap(),
        0,
        "something was stored"
    );
}

#[test]
fn the_largest_key_value_and_count_are_served() {
    let server = Server::start();
    let mut raw = server.greet();
    let (key, value) = (vec![b'k'; MAX_KEY], vec![b'v'; MAX_VALUE]);
    raw.send(&[vec![1], string(&key), string(&value)].concat());
    raw.send(&[vec![3], string(&key)].concat());
    assert_eq!(raw.read::<8>().to_vec(), number(MAX_VALUE));
    let mut got = vec![0; MAX_VALUE];
    raw.0.read_exact(&mut got).unwrap();
    assert!(got == value, "the value changed");
    let keys = string(&key[..2]).repeat(MAX_LIST);
    raw.send(&[vec![5], number(MAX_LIST), keys].concat());
    assert_eq!(raw.read(), [1], "CHECK of that many keys says: not all");
}

#[test]
fn whoever_is_no_store_client_is_refused() {
    let server = Server::start();
    let old_add = [&[3][..], &string(b"init/"), &[1, 0, 0, 0, 0, 0, 0, 0]].concat();
    let old_set = [&[0][..], &string(b"/k"), &string(b"v")].concat();
    let strangers: [(&str, &[u8]); 9] = [
        ("HTTP", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        ("HTTP POST", b"POST /store HTTP/1.0\r\n\r\n"),
        ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        ("SSH", b"SSH-2.0-OpenSSH_9.9\r\n"),
        ("a wrong magic number", &[0, 0xce, 0xf7, 0x85, 0x3d]),
        (
            "a magic number in network order",
            &[0, 0x3c, 0x85, 0xf7, 0xce],
        ),
        ("PING without VALIDATE", &[13, 1, 2, 3, 4]),
        ("torch 1.13 joining", &old_add),
        ("torch 1.13 setting", &old_set),
    ];
    for (name, bytes) in strangers {
        let mut raw = server.dial();
        raw.send(bytes);
        raw.assert_refused(name);
    }
    for opcode in (19..=0xff).filter(|opcode| *opcode != 0xa0) {
        let mut raw = server.greet();
        raw.send(&[opcode]);
        raw.assert_refused(&format!("opcode {opcode}"));
    }
    let mut raw = server.greet();
    raw.send(&VALIDATE);
    raw.assert_refused("a second VALIDATE");
    server.assert_serves();
    eventually("the log names the reason", || {
        server.log().contains("not a store client")
    });
}

#[test]
fn a_large_request_of_a_stranger_is_not_waited_for() {
    let server = Server::start();
    let mut raw = server.dial();
    raw.send(&[vec![1], string(b"/k"), number(MAX_VALUE), vec![0; 100]].concat());
    raw.assert_refused("a SET without VALIDATE");
}

#[test]
fn answers_that_came_before_bad_bytes_are_delivered() {
    let server = Server::start();
    let mut raw = server.dial();
    raw.send(&[&VALIDATE[..], &[13, 1, 2, 3, 4], &[0xff]].concat());
    assert_eq!(raw.read(), [1, 2, 3, 4]);
    raw.assert_refused("opcode 255");
}

#[test]
fn a_client_that_trickles_delays_nobody() {
    let server = Server::start();
    let (store, mut other) = (server.store(), server.greet());
    let mut trickler = server.dial();
    let request = [&VALIDATE[..], &[4], &string(b"/n"), &5_i64.to_le_bytes()].concat();
    for (i, byte) in request.iter().enumerate() {
        trickler.send(&[*byte]);
        // Twice a real pause; otherwise what others do meanwhile takes the place of time.
        if i == 3 || i == 8 {
            std::thread::sleep(Duration::from_secs(1));
        }
        other.assert_answered();
        server.assert_serves();
        assert_eq!(store.add("others", 1).unwrap(), i as i64 + 1);
    }
    assert_eq!(trickler.read(), 5_i64.to_le_bytes());
}

#[test]
fn a_client_that_never_reads_costs_little_and_delays_nobody() {
    const ANSWERS: usize = 256;
    let server = Server::start();
    let store = server.store();
    store.set("large", &vec![7; MIB]).unwrap();
    store.num_keys().unwrap();
    let base = server.rss_kib();
    let mut reader = server.greet();
    reader.send(&[vec![3], string(b"/large")].concat().repeat(ANSWERS));
    // And one who asks as long as anybody listens.
    let mut flooder = server.greet();
    flooder.0.set_nonblocking(true).unwrap();
    let flood = [vec![3], string(b"/large")].concat().repeat(1000);
    let mut refused = 0;
    while refused < 20 {
        match flooder.0.write(&flood) {
            Ok(_) => refused = 0,
            Err(err) if err.kind() == ErrorKind::WouldBlock => {
                refused += 1;
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(err) => panic!("{err}"),
        }
        server.assert_serves();
    }
    for i in 0..50 {
        assert_eq!(store.add("others", 1).unwrap(), i + 1);
    }
    let used = server.rss_kib().saturating_sub(base);
    println!("two clients that do not read: {used} KiB");
    assert!(used < kib(32 * MIB), "{used} KiB for answers nobody reads");
    // Once it reads it gets everything it asked for.
    let mut answer = vec![0; 8 + MIB];
    for _ in 0..ANSWERS {
        reader.0.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..8], number(MIB));
        assert!(answer[8..].iter().all(|byte| *byte == 7));
    }
    reader.assert_answered();
}

#[test]
fn half_sent_values_do_not_exhaust_the_memory() {
    const CLIENTS: usize = 200;
    let server = Server::start();
    let store = server.store();
    let base = server.rss_kib();
    let head = [vec![1], string(b"/k"), number(MAX_VALUE)].concat();
    let body = vec![0xab; MAX_VALUE - 1];
    let mut clients: Vec<Raw> = Vec::new();
    let (mut accepted, mut most) = (0, 0);
    for _ in 0..CLIENTS {
        let mut raw = server.greet();
        // The server may close a client in the middle of this; that is what the test is about.
        let sent = raw.0.write_all(&head).and_then(|()| raw.0.write_all(&body));
        accepted += usize::from(sent.is_ok());
        clients.push(raw);
        most = most.max(server.rss_kib());
        server.assert_serves();
    }
    assert_eq!(store.add("others", 1).unwrap(), 1);
    most = most.max(server.rss_kib());
    println!("{accepted} of {CLIENTS} sent it all; RSS {base} KiB, then {most} KiB");
    assert!(most < base + kib(768 * MIB), "{most} KiB");
    drop(clients);
    eventually("the memory comes back", || {
        server.rss_kib() < base + kib(64 * MIB)
    });
    assert_eq!(
        store.list_keys().unwrap(),
        ["others"],
        "half a value was stored"
    );
}
