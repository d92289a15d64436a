//! Recorded conversations between PyTorch's client and servers, replayed against ours.

mod transcript;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use phalanx_store::tcp::state::{Outbox, ServerState};
use phalanx_store::tcp::wire::{Decoder, ListOp, Part, READY, Reply, ReplyDecoder, Request, Shape};
use phalanx_store::{PrefixStore, Store, StoreError, TcpStore, TcpStoreOptions};
use transcript::{Step, What, read};

const RECORDINGS: [&str; 2] = ["libuv.transcript", "legacy.transcript"];

/// Our server without sockets: bytes in, bytes out, per connection.
struct Server {
    state: ServerState,
    names: HashMap<String, usize>,
    decoders: Vec<Decoder>,
    /// Bytes sent and not yet looked at.
    sent: Vec<Vec<u8>>,
}

impl Server {
    fn new() -> Self {
        Self {
            state: ServerState::new(None),
            names: HashMap::new(),
            decoders: Vec::new(),
            sent: Vec::new(),
        }
    }

    fn open(&mut self, who: &str) {
        let conn = self.decoders.len();
        self.names.insert(who.to_owned(), conn);
        self.state.connect(conn);
        self.decoders.push(Decoder::default());
        self.sent.push(Vec::new());
    }

    fn conn(&self, who: &str) -> usize {
        self.names[who]
    }

    fn receive(&mut self, who: &str, mut bytes: &[u8]) {
        let conn = self.conn(who);
        let mut woken = Vec::new();
        while let Some((part, len)) = self.decoders[conn].next(bytes).unwrap() {
            let mut out = Outbox {
                reply: &mut self.sent[conn],
                woken: &mut woken,
            };
            self.state.handle(conn, part, &mut out).unwrap();
            bytes = &bytes[len..];
        }
        assert!(bytes.is_empty(), "bytes left over: {bytes:02x?}");
        woken.iter().for_each(|&conn| self.sent[conn].push(READY));
    }

    fn close(&mut self, who: &str) {
        let mut woken = Vec::new();
        self.state.disconnect(self.conn(who), &mut woken);
        assert!(woken.is_empty());
    }

    fn take_sent(&mut self, who: &str) -> Vec<u8> {
        std::mem::take(&mut self.sent[self.names[who]])
    }
}

#[test]
fn our_server_answers_as_pytorchs_servers_did() {
    for recording in RECORDINGS {
        let mut server = Server::new();
        server.open("other");
        server.receive("other", &[0, 0xce, 0xf7, 0x85, 0x3c]);
        for step in read(recording) {
            replay(&mut server, &step, recording);
        }
        server.close("other");
        server.close("conn2");
        assert_eq!(server.state.waiting(), 0);
    }
}

fn replay(server: &mut Server, step: &Step, recording: &str) {
    let place = format!("{recording}, {}", step.title);
    for event in &step.events {
        match &event.what {
            What::Open => server.open(&event.who),
            What::Close => server.close(&event.who),
            What::ToServer(bytes) => server.receive(&event.who, bytes),
            What::ToClient(expected) => {
                let sent = server.take_sent(&event.who);
                match step.title.contains("list_keys") {
                    true => assert_eq!(sorted_keys(&sent), sorted_keys(expected), "{place}"),
                    false => assert_eq!(&sent, expected, "{place}"),
                }
            }
        }
    }
    for (who, &conn) in &server.names {
        let sent = &server.sent[conn];
        let release = who == "other" && *sent == [READY];
        assert!(sent.is_empty() || release, "{place}: surplus {sent:02x?}");
    }
}

/// A list of keys comes in no particular order.
fn sorted_keys(bytes: &[u8]) -> Vec<Vec<u8>> {
    match ReplyDecoder::new(Shape::Keys).feed(bytes) {
        Ok((len, Some(Reply::Keys(mut keys)))) if len == bytes.len() => {
            keys.sort();
            keys
        }
        other => panic!("{other:?} is no list of keys"),
    }
}

#[test]
fn two_pytorch_ranks_meet_on_our_server() {
    let mut server = Server::new();
    let mut expected: HashMap<String, Vec<u8>> = HashMap::new();
    for step in read("process_group.transcript") {
        for event in &step.events {
            let who = &event.who;
            match &event.what {
                What::Open => server.open(who),
                What::Close => server.close(who),
                What::ToClient(_) => unreachable!("answers were not recorded"),
                What::ToServer(bytes) => {
                    // PyTorch asks one thing at a time: what came before has been answered.
                    let answers = expected.remove(who).unwrap_or_default();
                    assert_eq!(server.take_sent(who), answers, "before {}", step.title);
                    server.receive(who, bytes);
                    expected.insert(who.clone(), answer(who, bytes));
                }
            }
        }
    }
    assert_eq!(server.state.waiting(), 0);
    assert_eq!(server.state.table().num_keys(), 5);
}

/// What a rank needs to hear after a request in order to go on as it did.
fn answer(who: &str, request: &[u8]) -> Vec<u8> {
    let second = u8::from(who == "conn1");
    let number = |n: u8| [&[n][..], &[0; 7]].concat();
    match request[0] {
        // PING: the nonce. ADD init/: one rank has come after the other. WAIT: go on.
        13 => request[1..].to_vec(),
        4 => number(1 + second),
        6 => vec![READY],
        // GET: the blob of the rank at the end of the key.
        3 => {
            let owner = request.last().expect("a key") - b'0';
            [number(170), vec![0x70 + owner; 170]].concat()
        }
        _ => Vec::new(),
    }
}

/// The form of the last answer that these requests call for.
fn shape(mut requests: &[u8]) -> Option<Shape> {
    let mut decoder = Decoder::default();
    let mut keys = 0;
    let mut shape = None;
    while let Some((part, len)) = decoder.next(requests).unwrap() {
        requests = &requests[len..];
        shape = match part {
            Part::ListStart(_) => {
                keys = 0;
                None
            }
            Part::ListKey(..) => {
                keys += 1;
                None
            }
            Part::ListEnd(ListOp::MultiGet) => Some(Shape::Values(keys)),
            Part::ListEnd(ListOp::Check | ListOp::Wait) => Some(Shape::Status),
            Part::Whole(Request::Get { .. } | Request::CompareSet { .. }) => Some(Shape::Values(1)),
            Part::Whole(Request::Ping { .. }) => Some(Shape::U32),
            Part::Whole(Request::QueuePop { .. }) => Some(Shape::Pop),
            Part::Whole(Request::ListKeys) => Some(Shape::Keys),
            Part::Whole(Request::Barrier { .. } | Request::CancelWait) => Some(Shape::Status),
            Part::Whole(
                Request::Add { .. }
                | Request::NumKeys
                | Request::DeleteKey { .. }
                | Request::QueueLen { .. },
            ) => Some(Shape::I64),
            _ => None,
        };
    }
    shape
}

#[test]
fn our_reply_decoder_reads_every_recorded_answer() {
    let mut answers = 0;
    for recording in RECORDINGS {
        for step in read(recording) {
            let mut expected = None;
            for event in &step.events {
                match &event.what {
                    What::ToServer(bytes) if event.who != "other" => expected = shape(bytes),
                    What::ToClient(bytes) => {
                        let shape = expected.expect("an answer to something");
                        assert_reads(shape, bytes, &step.title);
                        answers += 1;
                    }
                    _ => {}
                }
            }
        }
    }
    assert!(answers > 80, "only {answers} answers in the recordings");
}

fn assert_reads(shape: Shape, bytes: &[u8], place: &str) {
    let (len, whole) = ReplyDecoder::new(shape).feed(bytes).unwrap();
    assert_eq!(len, bytes.len(), "{place}");
    let whole = whole.unwrap_or_else(|| panic!("{place}: the answer is not whole"));
    let mut decoder = ReplyDecoder::new(shape);
    let (mut start, mut reply) = (0, None);
    for end in 0..=bytes.len() {
        assert_eq!(reply, None, "{place}: whole before its last byte");
        let (used, found) = decoder.feed(&bytes[start..end]).unwrap();
        start += used;
        reply = found;
    }
    assert_eq!(reply, Some(whole), "{place}");
}

/// Plays the recorded server to one client: takes exactly the recorded bytes, sends the recorded
/// answers.
fn serve(mut stream: TcpStream, events: Vec<(String, What)>) {
    let mut nonce = [0; 4];
    for (title, what) in events {
        match what {
            What::ToServer(mut expected) => {
                let mut got = vec![0; expected.len()];
                stream
                    .read_exact(&mut got)
                    .unwrap_or_else(|err| panic!("{title}: instead of {expected:02x?}: {err}"));
                if expected.starts_with(&[0, 0xce, 0xf7, 0x85, 0x3c, 13]) {
                    nonce.copy_from_slice(&got[6..]);
                    expected[6..].copy_from_slice(&nonce);
                }
                assert_eq!(got, expected, "{title}");
            }
            What::ToClient(bytes) if title.contains("construct") && bytes.len() == 4 => {
                stream.write_all(&nonce).unwrap();
            }
            What::ToClient(bytes) => stream.write_all(&bytes).unwrap(),
            What::Open | What::Close => {}
        }
    }
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty(), "sent after the end: {rest:02x?}");
}

/// What the connection `who` did, with the call that it belongs to.
fn events_of(recording: &str, who: &str) -> Vec<(String, What)> {
    let steps = read(recording).into_iter();
    steps
        .flat_map(|step| {
            let title = step.title;
            let events = step.events.into_iter().filter(|event| event.who == who);
            events
                .map(|event| (title.clone(), event.what))
                .collect::<Vec<_>>()
        })
        .collect()
}

fn against_recording(
    recording: &str,
    who: &str,
    world_size: Option<usize>,
    calls: impl FnOnce(Arc<dyn Store>),
) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = TcpStoreOptions {
        timeout: Duration::from_secs(20),
        world_size,
        ..TcpStoreOptions::new("127.0.0.1", listener.local_addr().unwrap().port())
    };
    let events = events_of(recording, who);
    let server = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let limit = Some(Duration::from_secs(20));
        stream.set_read_timeout(limit).unwrap();
        serve(stream, events);
    });
    calls(Arc::new(TcpStore::connect(&options).unwrap()));
    server.join().expect("the client sent what PyTorch's sends");
}

#[test]
fn our_client_sends_what_pytorchs_client_sent() {
    against_recording("libuv.transcript", "conn0", None, |store| {
        values(&*store);
        waits(&*store);
        lists(&*store);
        queues(&*store);
        after_the_queues(&store);
    });
    against_recording("legacy.transcript", "conn0", None, |store| {
        values(&*store);
        waits(&*store);
        lists(&*store);
        assert!(!store.check(&["q"]).unwrap());
        assert_eq!(store.num_keys().unwrap(), 8);
        after_the_queues(&store);
    });
}

#[test]
fn our_client_registers_as_pytorchs_workers_do() {
    against_recording("libuv.transcript", "conn2", Some(3), drop);
}

const SHORT: Duration = Duration::from_millis(30);

fn values(store: &dyn Store) {
    store.set("k", b"v1").unwrap();
    store.set("empty", b"").unwrap();
    store.set("", b"x").unwrap();
    assert_eq!(store.get("k").unwrap(), b"v1");
    assert_eq!(store.get("empty").unwrap(), b"");
    assert_eq!(store.add("c", 5).unwrap(), 5);
    assert_eq!(store.add("c", -7).unwrap(), -2);
    assert_eq!(store.get("c").unwrap(), b"-2");
    let swap = |key, expected: &[u8], desired: &[u8]| store.compare_set(key, expected, desired);
    assert_eq!(swap("cs", b"", b"init").unwrap(), b"init");
    assert_eq!(swap("cs", b"bad", b"z").unwrap(), b"init");
    assert_eq!(swap("cs", b"init", b"next").unwrap(), b"next");
    assert_eq!(swap("missing", b"exp", b"z").unwrap(), b"exp");
    assert!(store.check(&["k"]).unwrap());
    assert!(!store.check(&["k", "nope"]).unwrap());
    assert!(store.check(&[]).unwrap());
    assert_eq!(store.num_keys().unwrap(), 5);
    assert!(store.delete_key("empty").unwrap());
    assert!(!store.delete_key("empty").unwrap());
}

fn waits(store: &dyn Store) {
    store.wait(&["k", "c"]).unwrap();
    store.wait(&[]).unwrap();
    store.wait(&["k", "late"]).unwrap();
    assert_timeout(store.wait_for(&["never"], SHORT), "never");
    assert_eq!(store.get("k").unwrap(), b"v1");
    assert_timeout(store.get_for("never", SHORT), "never");
}

fn lists(store: &dyn Store) {
    store.append("ap", b"ab").unwrap();
    store.append("ap", b"cd").unwrap();
    store.multi_set(&[("m1", b"one"), ("m2", b"two!")]).unwrap();
    let values = store.multi_get(&["m1", "m2", "ap"]).unwrap();
    assert_eq!(values, [&b"one"[..], b"two!", b"abcd"]);
    assert!(store.multi_get(&[]).unwrap().is_empty());
    store.multi_set(&[]).unwrap();
}

fn queues(store: &dyn Store) {
    assert_eq!(store.queue_len("q").unwrap(), 0);
    store.queue_push("q", b"a").unwrap();
    store.queue_push("q", b"bb").unwrap();
    assert_eq!(store.queue_len("q").unwrap(), 2);
    assert!(store.check(&["q"]).unwrap());
    assert_eq!(store.num_keys().unwrap(), 8);
    assert_eq!(store.queue_pop("q").unwrap(), b"a");
    assert_eq!(store.queue_try_pop("q").unwrap(), Some(b"bb".to_vec()));
    assert_eq!(store.queue_try_pop("q").unwrap(), None);
    assert_timeout(store.queue_pop_for("q", SHORT), "q");
}

fn after_the_queues(store: &Arc<dyn Store>) {
    assert!(!store.delete_key("q").unwrap());
    let mut keys = store.list_keys().unwrap();
    keys.sort();
    assert_eq!(keys, ["", "ap", "c", "cs", "k", "late", "m1", "m2"]);
    store.barrier("b1", 1).unwrap();
    assert_timeout(store.barrier_for("b2", 2, SHORT), "b2");
    assert_eq!(store.get("b2").unwrap(), b"1");
    store.barrier("b3", 2).unwrap();
    let inner = PrefixStore::new("inner", Arc::clone(store));
    let prefixed = PrefixStore::new("outer", Arc::new(inner));
    prefixed.set("k", b"v").unwrap();
    assert_eq!(prefixed.list_keys().unwrap(), ["k"]);
    assert_eq!(prefixed.num_keys().unwrap(), 12);
    prefixed.barrier("pb", 1).unwrap();
    store.set("big", &[b'x'; 5000]).unwrap();
}

#[track_caller]
fn assert_timeout<T: std::fmt::Debug>(result: Result<T, StoreError>, key: &str) {
    let err = result.unwrap_err();
    assert!(err.is_timeout() && err.to_string().contains(key), "{err}");
}
