//! Bodies of the fuzz targets.
//!
//! Each takes arbitrary bytes and panics if the code under test breaks a promise. They are plain
//! functions, so that libFuzzer (`fuzz/`) and the property tests of this crate run the same code.

use phalanx_store::JobToken;
use phalanx_store::tcp::state::{ConnId, Outbox, PURPOSE, ServerState};
use phalanx_store::tcp::wire::{
    AUTH_LEN, Decoder, ListOp, MAGIC, Part, Reply, ReplyDecoder, Request, Shape, WireError,
};
use phalanx_store::token::Handshake;

/// The request parser: any cut of a stream gives the same parts and the same end, and what was
/// understood encodes to the bytes it came from.
pub fn request_parser(data: &[u8]) {
    let mut whole = Parts::default();
    let end = whole.feed(data);
    let mut cut = Parts::default();
    let mut cut_end = Ok(());
    for piece in pieces(data) {
        cut_end = cut.feed(piece);
        if cut_end.is_err() {
            break;
        }
    }
    assert_eq!(end, cut_end, "a cut changes how the stream ends");
    assert_eq!(whole.log, cut.log, "a cut changes what is read");
    assert!(
        data.starts_with(&whole.encoded),
        "what was read is not what was sent"
    );
}

/// What a [`Decoder`] made of a stream.
#[derive(Default)]
struct Parts {
    decoder: Decoder,
    rest: Vec<u8>,
    /// Every part, with marks that tell parts apart.
    log: Vec<u8>,
    /// All whole requests, encoded again.
    encoded: Vec<u8>,
    keys: Vec<Vec<u8>>,
    pairs: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Parts {
    fn feed(&mut self, bytes: &[u8]) -> Result<(), WireError> {
        let mut input = std::mem::take(&mut self.rest);
        input.extend_from_slice(bytes);
        let mut at = 0;
        while let Some((part, len)) = self.decoder.next(&input[at..])? {
            assert!(at + len <= input.len(), "more was read than there is");
            at += len;
            self.take(part);
        }
        self.rest = input.split_off(at);
        Ok(())
    }

    fn take(&mut self, part: Part<'_>) {
        match part {
            Part::Whole(request) => {
                request.encode(&mut self.encoded);
                self.log.push(b'w');
                request.encode(&mut self.log);
            }
            Part::ListStart(op) => {
                self.log.extend([b'[', op as u8]);
                self.keys.clear();
                self.pairs.clear();
            }
            Part::ListKey(op, key) => {
                self.log.extend([b'k', op as u8]);
                self.log.extend(key);
                self.keys.push(key.to_vec());
            }
            Part::ListPair(key, value) => {
                self.log.push(b'p');
                self.log.extend(key);
                self.log.extend(value);
                self.pairs.push((key.to_vec(), value.to_vec()));
            }
            Part::ListEnd(op) => {
                self.log.extend([b']', op as u8]);
                let request = match op {
                    ListOp::Check => Request::Check { keys: &self.keys },
                    ListOp::Wait => Request::Wait { keys: &self.keys },
                    ListOp::MultiGet => Request::MultiGet { keys: &self.keys },
                    ListOp::MultiSet => Request::MultiSet { pairs: &self.pairs },
                };
                request.encode(&mut self.encoded);
            }
        }
    }
}

/// Cuts that depend on the bytes alone: short and long ones, some empty.
fn pieces(data: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = data;
    let mut random = data.iter().fold(data.len() as u32 + 1, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    });
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let len = match random >> 30 {
            0 => 0,
            1 => 1,
            2 => (random >> 20) as usize % 16,
            _ => (random >> 16) as usize % 1024,
        };
        let (piece, tail) = rest.split_at(len.min(rest.len()));
        rest = tail;
        Some(piece)
    })
}

/// The reply parser: any cut gives the same answer after the same number of bytes, or the same
/// error. The first two bytes choose the form of the answer.
pub fn reply_parser(data: &[u8]) {
    let Some((&[form, count], data)) = data.split_first_chunk() else {
        return;
    };
    let shape = match form % 7 {
        0 => Shape::Status,
        1 => Shape::U32,
        2 => Shape::I64,
        3 => Shape::Values(usize::from(count % 8)),
        4 => Shape::Pop,
        5 => Shape::Keys,
        _ => Shape::Auth,
    };
    let whole = read_reply(shape, std::iter::once(data));
    let cut = read_reply(shape, pieces(data));
    match (&whole, &cut) {
        // A cut stream may stop being fed where the whole one had nothing more to say.
        (Ok((_, None)), Ok((_, None))) => {}
        _ => assert_eq!(whole, cut, "a cut changes the answer"),
    }
    if let Ok((len, Some(reply))) = whole {
        assert!(len <= data.len(), "more was read than there is");
        assert_fits(shape, &reply, len);
    }
}

fn read_reply<'a>(
    shape: Shape,
    pieces: impl Iterator<Item = &'a [u8]>,
) -> Result<(usize, Option<Reply>), WireError> {
    let mut decoder = ReplyDecoder::new(shape);
    let (mut rest, mut total) = (Vec::new(), 0);
    // An answer of no bytes is whole before any arrive.
    for piece in std::iter::once(&[][..]).chain(pieces) {
        rest.extend_from_slice(piece);
        let (used, reply) = decoder.feed(&rest)?;
        rest.drain(..used);
        total += used;
        if reply.is_some() {
            return Ok((total, reply));
        }
    }
    Ok((total, None))
}

/// An answer has the form asked for and is no larger than the bytes it was made of.
fn assert_fits(shape: Shape, reply: &Reply, len: usize) {
    let strings = |values: &[Vec<u8>]| values.iter().map(|v| 8 + v.len()).sum::<usize>();
    let expected = match (shape, reply) {
        (Shape::Status, Reply::Status(_)) => 1,
        (Shape::U32, Reply::U32(_)) => 4,
        (Shape::I64, Reply::I64(_)) => 8,
        (Shape::Values(n), Reply::Values(values)) if values.len() == n => strings(values),
        (Shape::Pop, Reply::Pop(value)) => 8 + strings(value.as_slice()),
        (Shape::Keys, Reply::Keys(keys)) => 8 + strings(keys),
        (Shape::Auth, Reply::Auth(_)) => AUTH_LEN,
        other => panic!("{other:?} do not belong together"),
    };
    assert_eq!(expected, len, "{reply:?}");
}

/// Connections of the server under test.
const CONNECTIONS: usize = 4;

/// The server's state with several connections: the bytes are a program of connecting, leaving,
/// proving the token, well-formed requests on few keys, and raw bytes.
///
/// Nobody is served before the handshake, only those who wait are woken, and nothing is left of
/// connections that are gone.
pub fn server_state(data: &[u8]) {
    let Some((&first, mut program)) = data.split_first() else {
        return;
    };
    let token = (first & 1 == 1).then(|| JobToken::new("token").expect("not empty"));
    let mut server = Server::new(token);
    while let Some((&step, rest)) = program.split_first() {
        program = rest;
        let conn = usize::from(step) % CONNECTIONS;
        match step / CONNECTIONS as u8 % 8 {
            0 => server.reconnect(conn),
            1 => server.shake_hands(conn),
            2 => {
                let len = take(&mut program).into();
                let (raw, rest) = program.split_at(program.len().min(len));
                program = rest;
                server.receive(conn, raw);
            }
            _ => {
                let request = well_formed(&mut program);
                server.receive(conn, &request);
            }
        }
    }
    (0..CONNECTIONS).for_each(|conn| server.reconnect(conn));
    assert_eq!(server.state.waiting(), 0, "registrations of gone clients");
}

/// The next byte of a program, zero at its end.
fn take(program: &mut &[u8]) -> u8 {
    match program.split_first() {
        Some((&byte, rest)) => {
            *program = rest;
            byte
        }
        None => 0,
    }
}

fn well_formed(program: &mut &[u8]) -> Vec<u8> {
    let keys: [&[u8]; 4] = [b"a", b"b", b"c", b""];
    let values: [&[u8]; 4] = [b"", b"1", b"-5", b"text"];
    let opcode = take(program) % 18;
    let arguments = take(program);
    let pick = |shift: u8| usize::from(arguments >> shift) % 4;
    let (key, value, other) = (keys[pick(0)], values[pick(2)], values[pick(4)]);
    let list: Vec<Vec<u8>> = (0..usize::from(arguments >> 6))
        .map(|i| keys[(pick(0) + i * pick(2)) % 4].to_vec())
        .collect();
    let number = i64::from(arguments >> 4) - 4;
    let request = match opcode {
        0 => Request::Set { key, value },
        1 => Request::CompareSet {
            key,
            expected: value,
            desired: other,
        },
        2 => Request::Get { key },
        3 => Request::Add { key, delta: number },
        4 => Request::Check { keys: &list },
        5 | 6 => Request::Wait { keys: &list },
        7 => Request::NumKeys,
        8 => Request::DeleteKey { key },
        9 => Request::Append { key, value },
        10 => Request::MultiGet { keys: &list },
        11 => Request::CancelWait,
        12 => Request::Ping { nonce: 7 },
        13 => Request::QueuePush { key, value },
        14 => Request::QueuePop { key },
        15 => Request::QueueLen { key },
        16 => Request::ListKeys,
        _ => Request::Barrier {
            key,
            world_size: number,
        },
    };
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    bytes
}

struct Server {
    state: ServerState,
    token: Option<JobToken>,
    clients: Vec<Client>,
}

#[derive(Default)]
struct Client {
    decoder: Decoder,
    input: Vec<u8>,
    /// May have a wait in progress.
    waits: bool,
}

impl Server {
    fn new(token: Option<JobToken>) -> Self {
        let mut state = ServerState::new(token.clone());
        (0..CONNECTIONS).for_each(|conn| state.connect(conn));
        Self {
            state,
            token,
            clients: (0..CONNECTIONS).map(|_| Client::default()).collect(),
        }
    }

    fn reconnect(&mut self, conn: ConnId) {
        let mut woken = Vec::new();
        self.state.disconnect(conn, &mut woken);
        self.clients[conn] = Client::default();
        self.wake(conn, &woken);
        self.state.connect(conn);
    }

    /// As a client that knows the token does; on a connection that is not new, whatever comes of
    /// it.
    fn shake_hands(&mut self, conn: ConnId) {
        let mut hello = Vec::new();
        Request::Validate { magic: MAGIC }.encode(&mut hello);
        let fresh = !self.state.is_open(conn) && self.clients[conn].input.is_empty();
        let answer = self.receive(conn, &hello);
        // Unless its bytes were taken for the rest of an earlier request.
        assert!(answer.is_empty() || !fresh, "VALIDATE has no answer");
        let Some(token) = self.token.clone() else {
            return;
        };
        let nonce = [3; AUTH_LEN];
        let mut hello = Vec::new();
        Request::Auth { message: &nonce }.encode(&mut hello);
        let challenge = self.receive(conn, &hello);
        if let (true, Ok(server)) = (fresh, <[u8; AUTH_LEN]>::try_from(&challenge[..])) {
            let handshake = Handshake::new(&token, PURPOSE, nonce, server);
            let mut proof = Vec::new();
            let message = &handshake.client_proof();
            Request::Auth { message }.encode(&mut proof);
            let proved = self.receive(conn, &proof);
            if self.state.is_open(conn) {
                assert_eq!(proved, handshake.server_proof());
            }
        }
    }

    /// Hands bytes to the server and returns what it answers to this connection.
    fn receive(&mut self, conn: ConnId, bytes: &[u8]) -> Vec<u8> {
        let mut input = std::mem::take(&mut self.clients[conn].input);
        input.extend_from_slice(bytes);
        let (mut at, mut answers) = (0, Vec::new());
        loop {
            match self.clients[conn].decoder.next(&input[at..]) {
                Ok(Some((part, len))) => {
                    at += len;
                    match self.handle(conn, part) {
                        Some(reply) => answers.extend(reply),
                        None => break self.reconnect(conn),
                    }
                }
                Ok(None) => break self.clients[conn].input = input.split_off(at),
                Err(_) => break self.reconnect(conn),
            }
        }
        answers
    }

    /// `None` if the server ends the connection.
    fn handle(&mut self, conn: ConnId, part: Part<'_>) -> Option<Vec<u8>> {
        let was_open = self.state.is_open(conn);
        let before = (!was_open).then(|| (self.state.table().clone(), self.state.waiting()));
        let (mut reply, mut woken) = (Vec::new(), Vec::new());
        let mut out = Outbox {
            reply: &mut reply,
            woken: &mut woken,
        };
        let result = self.state.handle(conn, part, &mut out);
        if let Some((table, waiting)) = before {
            let handshake = matches!(part, Part::Whole(Request::Auth { .. }));
            assert!(reply.is_empty() || handshake && reply.len() == AUTH_LEN);
            assert_eq!(*self.state.table(), table, "served before the handshake");
            assert_eq!(self.state.waiting(), waiting, "waits before the handshake");
        }
        match part {
            Part::ListStart(ListOp::Wait) | Part::Whole(Request::CancelWait) => {
                self.clients[conn].waits = false;
            }
            Part::ListEnd(ListOp::Wait) => self.clients[conn].waits = reply.is_empty(),
            Part::Whole(Request::Barrier { .. }) => self.clients[conn].waits = was_open,
            _ => {}
        }
        self.wake(conn, &woken);
        result.is_ok().then_some(reply)
    }

    fn wake(&mut self, by: ConnId, woken: &[ConnId]) {
        for &conn in woken {
            assert_ne!(conn, by, "its own wake-up belongs into the reply");
            let waited = std::mem::replace(&mut self.clients[conn].waits, false);
            assert!(waited, "woken without waiting");
        }
    }
}
