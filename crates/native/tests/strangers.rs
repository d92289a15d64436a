//! Connections that do not belong to the group.

mod common;

use std::fs::{read_dir, read_link, read_to_string};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::{DEADLINE, init, striped};
use phalanx_native::NativeGroup;
use phalanx_pg::{ErrorKind, ProcessGroupExt};
use phalanx_store::JobToken;
use phalanx_testkit::World;

/// The TCP ports that a process listens on.
fn listening(pid: &str) -> Vec<u16> {
    let fds = read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let links: Vec<String> = fds
        .filter_map(|fd| Some(read_link(fd.path()).ok()?.display().to_string()))
        .collect();
    let table = read_to_string("/proc/net/tcp").unwrap();
    let port = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (address, state, inode) = (words.get(1)?, words.get(3)?, words.get(9)?);
        let own = links.contains(&format!("socket:[{inode}]"));
        let port = u16::from_str_radix(address.split_once(':')?.1, 16).ok()?;
        (own && *state == "0A").then_some(port)
    };
    table.lines().filter_map(port).collect()
}

/// Waits until the process listens.
fn door_of(pid: &str) -> u16 {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(&port) = listening(pid).first() {
            return port;
        }
        assert!(Instant::now() < end, "{pid} never listens");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn visit(port: u16, words: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    // It may have hung up already.
    let _ = stream.write_all(words);
    stream
}

/// Whether nothing comes and the connection ends.
fn is_turned_away(mut stream: TcpStream) -> bool {
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let mut answer = Vec::new();
    // Closed with words unread is a reset.
    let _ = stream.read_to_end(&mut answer);
    answer.is_empty()
}

#[test]
fn a_group_forms_while_strangers_call() {
    let secret = JobToken::new("the secret of this job").unwrap();
    for token in [None, Some(secret)] {
        striped(3).run(|ctx| {
            let pid = std::process::id().to_string();
            ctx.store()
                .set(&format!("pid/{}", ctx.rank()), pid.as_bytes())
                .unwrap();
            let mut strangers = Vec::new();
            if ctx.rank() == 2 {
                // The others listen, and attend to nobody before this rank has said that it is
                // there: these are in front of it.
                for rank in 0..2 {
                    let pid = ctx.store().get(&format!("pid/{rank}")).unwrap();
                    let port = door_of(&String::from_utf8(pid).unwrap());
                    drop(visit(port, b""));
                    // A hello as it should be, for a group that is not this one.
                    let mut hello = b"PHLXPGR\x02".to_vec();
                    hello.extend([7; 32]);
                    hello.extend(2u32.to_le_bytes());
                    hello.extend((rank as u32).to_le_bytes());
                    hello.extend(0u32.to_le_bytes());
                    hello.push(token.is_some().into());
                    hello.extend([9; 32]);
                    let words: [&[u8]; 5] = [
                        b"",
                        b"PHLX",
                        b"GET / HTTP/1.1\r\n\r\n",
                        &[0xff; 4096],
                        &hello,
                    ];
                    strangers.extend(words.map(|words| visit(port, words)));
                }
            }
            let mut init = init(ctx);
            init.token = token.clone();
            let group = NativeGroup::connect_as_on(&init, &format!("host {}", ctx.rank())).unwrap();
            let all = group.allgather_slice(&[ctx.rank() as i32]).unwrap();
            assert_eq!(all, [0, 1, 2]);
            assert!(strangers.into_iter().all(is_turned_away));
            group.shutdown().unwrap();
        });
    }
}

#[test]
fn who_does_not_know_the_token_is_refused() {
    for wrong in [None, Some("another secret")] {
        World::new(2).deadline(DEADLINE).run(|ctx| {
            let right = JobToken::new("the secret of this job").unwrap();
            let wrong = wrong.map(|text| JobToken::new(text).unwrap());
            let mut init = init(ctx);
            init.timeout = Duration::from_secs(2);
            init.token = match ctx.rank() {
                0 => Some(right),
                _ => wrong,
            };
            // It calls rank 0, and both are none the wiser about the other.
            let err = NativeGroup::connect_as_on(&init, &format!("host {}", ctx.rank()));
            let err = err.expect_err("they do not share the secret");
            println!("{err}");
            assert_ne!(err.kind(), ErrorKind::PeerLost, "{err:?}");
            assert_eq!(err.peer(), Some(1 - ctx.rank()), "{err}");
        });
    }
}

#[test]
fn the_interface_can_be_named() {
    let world = |name: &str| World::new(2).deadline(DEADLINE).env("PHALANX_IFACE", name);
    world("lo").run(|ctx| {
        let host = ["a", "b"][ctx.rank()];
        let group = NativeGroup::connect_as_on(&init(ctx), host).unwrap();
        group.barrier().unwrap();
        group.shutdown().unwrap();
    });
    world("nosuch0").run(|ctx| {
        let err = NativeGroup::connect(&init(ctx)).unwrap_err().to_string();
        let words = "PHALANX_IFACE names \"nosuch0\", which has no address; there are ";
        let list = err.split_once(words).expect(&err).1;
        let mut names: Vec<&str> = list.split(", ").collect();
        assert!(names.contains(&"lo"), "{err}");
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count, "{err}");
    });
}
