//! Promises of the protocol code for any input: cuts do not matter, what is sent is what is read,
//! and the server's state does what a naive model of it does.

mod model;
mod requests;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use model::Model;
use phalanx_store::TcpStoreServer;
use phalanx_store::tcp::state::{Fault, Outbox, ServerState};
use phalanx_store::tcp::wire::{
    Decoder, MAX_REPLY_LEN, Part, READY, Reply, ReplyDecoder, Shape, WireError, put_bytes,
};
use proptest::prelude::*;
use proptest::sample::Index;
use requests::{Bytes, Owned, request, validate};

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// One connection to a fresh server state.
struct Single {
    state: ServerState,
    decoder: Decoder,
    input: Bytes,
    answers: Bytes,
}

impl Single {
    fn new() -> Self {
        let mut state = ServerState::new(None);
        state.connect(0);
        Self {
            state,
            decoder: Decoder::default(),
            input: Vec::new(),
            answers: Vec::new(),
        }
    }

    fn receive(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        self.input.extend_from_slice(bytes);
        let mut at = 0;
        while let Some((part, len)) = self.decoder.next(&self.input[at..])? {
            at += len;
            let mut woken = Vec::new();
            let mut out = Outbox {
                reply: &mut self.answers,
                woken: &mut woken,
            };
            self.state.handle(0, part, &mut out)?;
            assert!(woken.is_empty(), "there is nobody else");
        }
        self.input.drain(..at);
        Ok(())
    }
}

/// The requests' bytes in pieces that end at the given places.
fn cut(stream: &[u8], places: &[Index]) -> Vec<Bytes> {
    let mut ends: Vec<usize> = places.iter().map(|i| i.index(stream.len() + 1)).collect();
    ends.push(stream.len());
    ends.sort_unstable();
    let mut start = 0;
    ends.iter()
        .map(|&end| stream[std::mem::replace(&mut start, end)..end].to_vec())
        .collect()
}

/// Requests whose answers do not depend on the order of a hash map.
fn pipelined() -> impl Strategy<Value = Vec<Owned>> {
    let request = request().prop_filter("has an order", |r| *r != Owned::ListKeys);
    prop::collection::vec(request, 1..30)
}

fn stream(requests: &[Owned]) -> Bytes {
    let encoded = requests.iter().map(Owned::encode);
    std::iter::once(validate())
        .chain(encoded)
        .flatten()
        .collect()
}

proptest! {
    #![proptest_config(config(500))]

    #[test]
    fn cuts_do_not_change_the_answers(
        requests in pipelined(),
        places in prop::collection::vec(any::<Index>(), 0..60),
    ) {
        let stream = stream(&requests);
        let mut whole = Single::new();
        let end = whole.receive(&stream);
        let mut pieces = Single::new();
        let cut_end = cut(&stream, &places).iter().try_for_each(|piece| pieces.receive(piece));
        prop_assert_eq!(&end, &cut_end);
        prop_assert_eq!(&whole.answers, &pieces.answers);
        prop_assert_eq!(whole.state.table(), pieces.state.table());
        let mut bytewise = Single::new();
        let cut_end = stream.chunks(1).try_for_each(|byte| bytewise.receive(byte));
        prop_assert_eq!(&end, &cut_end);
        prop_assert_eq!(&whole.answers, &bytewise.answers);
    }

    #[test]
    fn what_is_encoded_is_what_is_decoded(requests in prop::collection::vec(request(), 0..20)) {
        let stream: Bytes = requests.iter().flat_map(Owned::encode).collect();
        let mut decoder = Decoder::default();
        let (mut at, mut read) = (0, Vec::new());
        let mut list: Vec<(Bytes, Bytes)> = Vec::new();
        while let Some((part, len)) = decoder.next(&stream[at..]).unwrap() {
            at += len;
            match part {
                Part::ListStart(_) => list.clear(),
                Part::ListKey(_, key) => list.push((key.to_vec(), Vec::new())),
                Part::ListPair(key, value) => list.push((key.to_vec(), value.to_vec())),
                Part::ListEnd(op) => read.push(model::list_request(op, std::mem::take(&mut list))),
                Part::Whole(request) => read.push(model::whole_request(request)),
            }
        }
        prop_assert_eq!(at, stream.len());
        prop_assert_eq!(read, requests);
    }

    #[test]
    fn answers_are_read_as_they_were_written(
        values in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..10),
        number in any::<i64>(),
        places in prop::collection::vec(any::<Index>(), 0..10),
    ) {
        let strings: Bytes = values.iter().fold(Vec::new(), |mut out, value| {
            put_bytes(&mut out, value);
            out
        });
        let counted = |n: usize, bytes: &[u8]| [&(n as i64).to_le_bytes()[..], bytes].concat();
        let first: Option<Bytes> = values.first().cloned();
        let mut popped = counted(values.len(), &[]);
        first.iter().for_each(|value| put_bytes(&mut popped, value));
        let answers = [
            (Shape::Values(values.len()), Reply::Values(values.clone()), strings.clone()),
            (Shape::Keys, Reply::Keys(values.clone()), counted(values.len(), &strings)),
            (Shape::Pop, Reply::Pop(first), popped),
            (Shape::I64, Reply::I64(number), number.to_le_bytes().to_vec()),
            (Shape::U32, Reply::U32(number as u32), (number as u32).to_le_bytes().to_vec()),
            (Shape::Status, Reply::Status(number as u8), vec![number as u8]),
        ];
        for (shape, reply, bytes) in answers {
            // What follows belongs to the next answer.
            let bytes = [bytes, vec![0xee; 3]].concat();
            let mut decoder = ReplyDecoder::new(shape);
            let (mut input, mut found) = (Vec::new(), None);
            for piece in cut(&bytes, &places) {
                input.extend(piece);
                if found.is_none() {
                    let (used, answer) = decoder.feed(&input).unwrap();
                    input.drain(..used);
                    found = answer;
                }
            }
            prop_assert_eq!(found, Some(reply));
            prop_assert_eq!(input, vec![0xee; 3]);
        }
    }
}

proptest! {
    #![proptest_config(config(40))]

    #[test]
    fn cuts_on_a_real_socket_do_not_change_the_answers(
        requests in pipelined(),
        places in prop::collection::vec(any::<Index>(), 0..40),
    ) {
        // Up to the first refused request: what a closing server still delivers is not certain.
        let mut single = Single::new();
        single.receive(&validate()).unwrap();
        let refused = requests.iter().position(|r| {
            let before = single.answers.len();
            let refused = single.receive(&r.encode()).is_err();
            if refused {
                single.answers.truncate(before);
            }
            refused
        });
        let stream = stream(&requests[..refused.unwrap_or(requests.len())]);
        let server = TcpStoreServer::start(&["127.0.0.1:0".parse().unwrap()], None).unwrap();
        let mut socket = TcpStream::connect(server.local_addr()).unwrap();
        socket.set_nodelay(true).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        for piece in cut(&stream, &places) {
            socket.write_all(&piece).unwrap();
        }
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answers = Vec::new();
        socket.read_to_end(&mut answers).unwrap();
        prop_assert_eq!(answers, single.answers);
    }
}

/// What one of several connections does next.
#[derive(Debug, Clone)]
enum Action {
    /// Sends a request. With a place, only the bytes before it arrive now, the rest with the next.
    Send(Owned, Option<Index>),
    /// Leaves; somebody else comes and has the same number.
    Leave,
}

const CONNECTIONS: usize = 4;

fn actions() -> impl Strategy<Value = Vec<(usize, Action)>> {
    let place = prop::option::weighted(0.25, any::<Index>());
    let action = prop_oneof![
        20 => (request(), place).prop_map(|(request, place)| Action::Send(request, place)),
        1 => Just(Action::Leave),
    ];
    prop::collection::vec((0..CONNECTIONS, action), 1..80)
}

/// The real state and the model, fed with the same parts of requests.
struct Both {
    state: ServerState,
    model: Model,
    decoders: Vec<Decoder>,
    inputs: Vec<Bytes>,
    /// Answers of the real state, not yet compared.
    sent: Vec<Bytes>,
}

impl Both {
    fn new() -> Self {
        let mut both = Self {
            state: ServerState::new(None),
            model: Model::new(CONNECTIONS),
            decoders: Vec::new(),
            inputs: vec![Vec::new(); CONNECTIONS],
            sent: vec![Vec::new(); CONNECTIONS],
        };
        for conn in 0..CONNECTIONS {
            both.decoders.push(Decoder::default());
            both.connect(conn);
        }
        both
    }

    fn connect(&mut self, conn: usize) {
        self.state.connect(conn);
        self.decoders[conn] = Decoder::default();
        self.inputs[conn] = validate();
        self.deliver(conn, validate().len());
    }

    fn leave(&mut self, conn: usize) {
        let mut woken = Vec::new();
        self.state.disconnect(conn, &mut woken);
        self.sent[conn].clear();
        woken.iter().for_each(|&other| self.sent[other].push(READY));
        self.model.leave(conn);
    }

    /// Hands over the first `len` bytes that the connection has sent.
    fn deliver(&mut self, conn: usize, len: usize) {
        let mut input = std::mem::take(&mut self.inputs[conn]);
        let mut at = 0;
        loop {
            let next = self.decoders[conn]
                .next(&input[at..len])
                .expect("well-formed");
            let Some((part, used)) = next else { break };
            at += used;
            let mut woken = Vec::new();
            let mut out = Outbox {
                reply: &mut self.sent[conn],
                woken: &mut woken,
            };
            let result = self.state.handle(conn, part, &mut out);
            woken.iter().for_each(|&other| self.sent[other].push(READY));
            let accepted = self.model.handle(conn, part);
            assert_eq!(result.is_ok(), accepted, "{part:?} gives {result:?}");
            if !accepted {
                self.leave(conn);
                return self.connect(conn);
            }
        }
        self.inputs[conn] = input.split_off(at);
    }

    fn assert_same(&mut self) {
        for conn in 0..CONNECTIONS {
            let sent = std::mem::take(&mut self.sent[conn]);
            let expected = std::mem::take(&mut self.model.sent[conn]);
            assert_eq!(sent, expected, "answers to connection {conn}");
        }
        assert_eq!(self.state.waiting(), self.model.waiting());
        assert_eq!(*self.state.table(), self.model.table());
    }
}

proptest! {
    #![proptest_config(config(1000))]

    #[test]
    fn the_server_state_does_what_a_naive_model_does(actions in actions()) {
        let mut both = Both::new();
        for (conn, action) in actions {
            match action {
                // Listed in another order by every hash map.
                Action::Send(Owned::ListKeys, _) => {}
                Action::Send(request, place) => {
                    both.inputs[conn].extend(request.encode());
                    let total = both.inputs[conn].len();
                    let len = place.map_or(total, |place| place.index(total + 1));
                    both.deliver(conn, len);
                }
                Action::Leave => {
                    both.leave(conn);
                    both.connect(conn);
                }
            }
            both.assert_same();
        }
        (0..CONNECTIONS).for_each(|conn| both.leave(conn));
        both.assert_same();
        assert_eq!(both.state.waiting(), 0, "registrations of clients that left");
    }
}

#[test]
fn the_keys_listed_are_the_keys_there() {
    let mut single = Single::new();
    let keys = ["b", "a", "", "c"].map(|key| key.as_bytes().to_vec());
    let sets: Vec<Owned> = keys
        .iter()
        .map(|k| Owned::Set(k.clone(), vec![1]))
        .collect();
    single.receive(&stream(&sets)).unwrap();
    single
        .receive(&Owned::DeleteKey(b"c".to_vec()).encode())
        .unwrap();
    single.answers.clear();
    single.receive(&Owned::ListKeys.encode()).unwrap();
    let (_, reply) = ReplyDecoder::new(Shape::Keys)
        .feed(&single.answers)
        .unwrap();
    let Some(Reply::Keys(mut listed)) = reply else {
        panic!("{reply:?}")
    };
    listed.sort();
    assert_eq!(listed, [&b""[..], b"a", b"b"]);
}

#[test]
fn an_answer_of_endlessly_many_keys_is_refused_at_its_head() {
    for count in [MAX_REPLY_LEN as i64, i64::MAX] {
        let err = ReplyDecoder::new(Shape::Keys)
            .feed(&count.to_le_bytes())
            .unwrap_err();
        assert!(matches!(err, WireError::TooLong { .. }), "{err}");
    }
    let err = ReplyDecoder::new(Shape::Keys)
        .feed(&(-1_i64).to_le_bytes())
        .unwrap_err();
    assert!(matches!(err, WireError::BadReply(_)), "{err}");
}
