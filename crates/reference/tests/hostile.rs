//! Strangers at the door while a group forms.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use common::{all, options};
use phalanx_pg::ProcessGroupExt;
use phalanx_reference::ReferenceGroup;
use phalanx_store::{HashStore, Store};

/// Where rank 0 listens, once it does.
fn door(store: &HashStore) -> SocketAddr {
    loop {
        let keys = store.list_keys().unwrap();
        if let Some(key) = keys.iter().find(|key| key.ends_with("card/0")) {
            // The address comes first.
            let card = store.get(key).unwrap();
            return postcard::take_from_bytes(&card).unwrap().0;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn call(door: SocketAddr, words: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(door).unwrap();
    // The host may hang up in the middle.
    let _ = stream.write_all(words);
    stream
}

/// Whether the host has hung up without a word.
fn is_cut(mut stream: TcpStream) -> bool {
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let mut heard = Vec::new();
    let ended = match stream.read_to_end(&mut heard) {
        Ok(_) => true,
        Err(err) => err.kind() == std::io::ErrorKind::ConnectionReset,
    };
    ended && heard.is_empty()
}

/// A hello in the right form, to rank 0 of a group that is not the one at the door.
fn hello_of_another_group() -> Vec<u8> {
    let mut hello = b"PHLXPGR\x02".to_vec();
    hello.extend([9; 32]);
    hello.extend(1u32.to_le_bytes());
    hello.extend(0u32.to_le_bytes());
    hello.extend(0u32.to_le_bytes());
    hello.push(0);
    hello.extend([8; 32]);
    hello
}

#[test]
fn strangers_neither_join_nor_hurt() {
    let store = Arc::new(HashStore::new());
    let (host_store, guest_store) = (Arc::clone(&store), Arc::clone(&store));
    let host =
        thread::spawn(move || ReferenceGroup::connect(host_store, 0, 2, &options(30_000)).unwrap());
    let door = door(&store);
    let silent: Vec<TcpStream> = (0..100).map(|_| call(door, b"")).collect();
    let half = call(door, b"PHLXPGR\x02 and then");
    let strangers = [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n".to_vec(),
        vec![0xff; 64 << 10],
        hello_of_another_group(),
    ]
    .map(|words| call(door, &words));
    drop(call(door, b""));
    let guest = ReferenceGroup::connect(guest_store, 1, 2, &options(30_000)).unwrap();
    let groups = [host.join().unwrap(), guest];
    all(
        Duration::from_secs(30),
        groups.map(|group| {
            move || {
                group.barrier().unwrap();
                group.shutdown().unwrap();
            }
        }),
    );
    assert!(strangers.into_iter().all(is_cut));
    // Nobody listens once the group has formed.
    assert!(TcpStream::connect(door).is_err());
    drop((silent, half));
}
