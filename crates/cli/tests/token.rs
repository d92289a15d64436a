//! The job token between real processes.

mod harness;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use harness::{Server, VALIDATE, WATCHDOG, eventually, string};
use phalanx_store::tcp::state::PURPOSE;
use phalanx_store::token::{Handshake, LEN};
use phalanx_store::{JobToken, Store, StoreError, TcpStore, TcpStoreOptions};

const UNKNOWN: &str =
    "this server does not know job tokens; unset PHALANX_TOKEN to use a PyTorch store";

/// The first half of the proof, sent with VALIDATE.
fn hello(nonce: [u8; LEN]) -> Vec<u8> {
    [&VALIDATE[..], &[0xa0], &nonce].concat()
}

#[track_caller]
fn refusal(options: &TcpStoreOptions) -> String {
    let err = TcpStore::connect(options).expect_err("this must be refused");
    assert!(matches!(err, StoreError::Token { .. }), "{err:?}");
    err.to_string()
}

#[test]
fn without_the_token_nothing_is_served() {
    let server = Server::start_with_token("secret");
    let set = [vec![1], string(b"/k"), string(b"v")].concat();
    let requests: [(&str, &[u8]); 6] = [
        ("PING", &[13, 1, 2, 3, 4]),
        ("SET", &set),
        ("GETNUMKEYS", &[7]),
        ("LIST_KEYS", &[17]),
        ("CANCEL_WAIT", &[12]),
        ("VALIDATE again", &VALIDATE),
    ];
    for (name, request) in requests {
        let mut raw = server.greet();
        raw.send(request);
        raw.assert_refused(name);
        // Nor between the two halves of the proof.
        let mut raw = server.dial();
        raw.send(&hello([1; LEN]));
        raw.read::<LEN>();
        raw.send(request);
        raw.assert_refused(name);
    }
    let member = TcpStore::connect(&server.options_with_token("secret")).unwrap();
    assert_eq!(member.num_keys().unwrap(), 0, "a stranger's SET was served");
    eventually("the log names the reason", || {
        server.log().contains("no job token presented")
    });
}

#[test]
fn a_client_without_the_token_is_told_what_to_look_at() {
    let server = Server::start_with_token("secret");
    let options = TcpStoreOptions {
        timeout: Duration::from_secs(10),
        ..server.options()
    };
    let err = TcpStore::connect(&options).unwrap_err();
    assert!(matches!(err, StoreError::Unreachable { .. }), "{err:?}");
    assert!(err.to_string().contains("PHALANX_TOKEN"), "{err}");
}

#[test]
fn a_wrong_token_is_refused_and_logged() {
    let server = Server::start_with_token("secret");
    for wrong in ["secreT", "secret ", "\u{1}", &"secret".repeat(100)] {
        let text = refusal(&server.options_with_token(wrong));
        assert!(
            text.contains("PHALANX_TOKEN must be the same there"),
            "{text}"
        );
        assert!(!text.contains(wrong), "the error shows the token: {text}");
    }
    eventually("the log names the reason", || {
        server.log().contains("wrong job token")
    });
    assert!(!server.log().contains("secre"), "the log shows the token");
}

#[test]
fn the_right_token_opens_everything() {
    let server = Server::start_with_token("secret");
    let store = TcpStore::connect(&server.options_with_token("secret")).unwrap();
    store.set("k", b"v").unwrap();
    let other = store.second_handle().unwrap();
    assert_eq!(other.get("k").unwrap(), b"v");
    // A refused ADD loses the connection; the next one proves the token again.
    assert!(other.add("k", 1).is_err());
    assert_eq!(other.add("n", 1).unwrap(), 1);
}

#[test]
fn a_proof_works_for_its_connection_only() {
    let server = Server::start_with_token("secret");
    let token = JobToken::new("secret").unwrap();
    let nonce = [9; LEN];
    let mut member = server.dial();
    member.send(&hello(nonce));
    let challenge = member.read();
    let handshake = Handshake::new(&token, PURPOSE, nonce, challenge);
    let proof = [&[0xa0][..], &handshake.client_proof()].concat();
    member.send(&proof);
    assert_eq!(member.read(), handshake.server_proof());
    member.assert_answered();
    // The same bytes again, as an eavesdropper would send them.
    let mut thief = server.dial();
    thief.send(&hello(nonce));
    assert_ne!(thief.read::<LEN>(), challenge, "challenges repeat");
    thief.send(&proof);
    thief.assert_refused("a replayed proof");
}

#[test]
fn a_server_without_tokens_is_recognised() {
    let server = Server::start();
    let text = refusal(&server.options_with_token("secret"));
    assert!(text.contains(UNKNOWN), "{text}");
    server.assert_serves();
}

/// What some other server does with one client.
fn impostor(behave: fn(TcpStream)) -> TcpStoreOptions {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            behave(stream);
        }
    });
    TcpStoreOptions {
        timeout: WATCHDOG,
        token: Some(JobToken::new("secret").unwrap()),
        ..TcpStoreOptions::new("127.0.0.1", port)
    }
}

#[test]
fn a_pytorch_server_that_stays_silent_is_recognised() {
    // As PyTorch's libuv server does with an opcode that it does not know yet wholly.
    let options = impostor(|mut stream| {
        let _ = stream.read_to_end(&mut Vec::new());
    });
    assert!(refusal(&options).contains(UNKNOWN));
}

#[test]
fn a_pytorch_server_that_closes_is_recognised() {
    let options = impostor(|mut stream| {
        let _ = stream.read(&mut [0; 5]);
    });
    assert!(refusal(&options).contains(UNKNOWN));
}

#[test]
fn a_server_that_cannot_prove_the_token_is_not_trusted() {
    let options = impostor(|mut stream| {
        stream.read_exact(&mut [0; 5 + 1 + LEN]).unwrap();
        stream.write_all(&[4; LEN]).unwrap();
        let mut proof = [0; 1 + LEN];
        stream.read_exact(&mut proof).unwrap();
        // The client's own proof sent back proves nothing.
        stream.write_all(&proof[1..]).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let text = refusal(&options);
    assert!(text.contains("could not prove"), "{text}");
}

#[test]
fn a_port_scan_is_shaken_off() {
    let server = Server::start_with_token("secret");
    let member = TcpStore::connect(&server.options_with_token("secret")).unwrap();
    let descriptors = server.descriptors();
    let mut silent: Vec<_> = (0..50).map(|_| server.dial()).collect();
    silent.extend((0..50).map(|_| server.greet()));
    for _ in 0..100 {
        server.dial();
    }
    assert_eq!(member.add("n", 1).unwrap(), 1);
    // Those who say nothing are closed as well, in the server's own time.
    for raw in &mut silent {
        raw.assert_refused("silence");
    }
    eventually("all descriptors are closed", || {
        server.descriptors() == descriptors
    });
    assert_eq!(member.add("n", 1).unwrap(), 2, "members are not disturbed");
}
