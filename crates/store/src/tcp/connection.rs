//! One connection of a TCP store client: dialling, the handshake, sending and receiving.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::{SockRef, TcpKeepalive};

use super::client::TcpStoreOptions;
use super::state::PURPOSE;
use super::wire::{MAGIC, NOT_READY, READY, Reply, ReplyDecoder, Request, Shape};
use crate::deadline::Deadline;
use crate::error::{Result, StoreError};
use crate::token::{Handshake, JobToken, random_nonce};

/// How long a server may take to acknowledge a cancelled wait before it counts as lost.
pub(super) const CANCEL_LIMIT: Duration = Duration::from_secs(5);
/// How long a server may stay silent after it was sent a token.
const TOKEN_LIMIT: Duration = Duration::from_secs(2);
/// After this many refused handshakes over at least [`REFUSAL_TIME`] the answer is final.
const REFUSALS: u32 = 5;
const REFUSAL_TIME: Duration = Duration::from_secs(2);
/// As many servers as close while a token is proved are none that end by chance.
const CLOSINGS: u32 = 3;
const NO_TOKENS: &str =
    "this server does not know job tokens; unset PHALANX_TOKEN to use a PyTorch store";
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
const READ_LEN: usize = 64 << 10;

/// A socket that has passed the handshake.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    peer: SocketAddr,
    output: Vec<u8>,
    /// Received and not yet decoded.
    input: Vec<u8>,
    /// Why it cannot be used any more.
    broken: Option<String>,
    /// The server ended it, which is also how it refuses a request.
    closed: bool,
}

/// Why an attempt to connect failed.
pub(super) enum Failure {
    /// Nobody listens, or the name is unknown: the server may come yet.
    NotThere(String),
    /// Somebody listens but did not shake hands.
    Refused(String),
    /// It closed the connection while the token was proved: it knows no tokens or another one, or
    /// it was just about to end.
    Closing(StoreError),
    /// Trying again will not help.
    Final(StoreError),
}

impl Connection {
    /// Dials until somebody answers as a store or the deadline passes.
    pub(super) fn open(options: &TcpStoreOptions, deadline: Deadline) -> Result<Self> {
        let mut pause = FIRST_PAUSE;
        let (mut attempts, mut refusals, mut closings) = (0, 0, 0);
        let mut last = String::new();
        loop {
            attempts += 1;
            let failure = match Self::open_once(options, deadline) {
                Ok(connection) => return Ok(connection),
                Err(Failure::Final(err)) => return Err(err),
                Err(Failure::Closing(err)) => {
                    closings += 1;
                    if closings >= CLOSINGS {
                        return Err(err);
                    }
                    err.to_string()
                }
                Err(Failure::NotThere(why)) => why,
                Err(Failure::Refused(why)) => {
                    refusals += 1;
                    why
                }
            };
            // An attempt cut short by the deadline says less than the one before it.
            if last.is_empty() || !deadline.passed() {
                last = failure;
            }
            let final_refusal = refusals >= REFUSALS && deadline.elapsed() >= REFUSAL_TIME;
            if deadline.passed() || final_refusal {
                return Err(unreachable_store(
                    options, deadline, attempts, refusals, last,
                ));
            }
            // Jitter keeps a thousand clients of one late server from coming back in step.
            let jittered = pause.mul_f64(0.5 + fastrand::f64());
            std::thread::sleep(jittered.min(deadline.left()));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// One attempt.
    pub(super) fn open_once(
        options: &TcpStoreOptions,
        deadline: Deadline,
    ) -> Result<Self, Failure> {
        let (stream, peer) = dial(options, deadline).map_err(Failure::NotThere)?;
        let mut connection = Self {
            stream,
            peer,
            output: vec![],
            input: vec![],
            broken: None,
            closed: false,
        };
        match connection.shake_hands(options.token.as_ref(), deadline) {
            Ok(()) => Ok(connection),
            Err(err @ StoreError::Token { .. }) if connection.closed => Err(Failure::Closing(err)),
            Err(err @ StoreError::Token { .. }) => Err(Failure::Final(err)),
            Err(err) => Err(Failure::Refused(err.to_string())),
        }
    }

    /// Whether the server closed the connection, as it does to refuse a request.
    pub(super) fn was_closed(&self) -> bool {
        self.closed
    }

    pub(super) fn peer(&self) -> SocketAddr {
        self.peer
    }

    pub(super) fn local_addr(&self) -> Result<SocketAddr> {
        self.stream
            .local_addr()
            .map_err(|err| self.lost("local_addr", err.to_string()))
    }

    fn shake_hands(&mut self, token: Option<&JobToken>, deadline: Deadline) -> Result<()> {
        // One write: PyTorch's libuv server drops clients whose first request comes in pieces.
        Request::Validate { magic: MAGIC }.encode(&mut self.output);
        if let Some(token) = token {
            self.prove(token, deadline)?;
        }
        let nonce = std::process::id();
        match self.call("connect", &Request::Ping { nonce }, Shape::U32, deadline)? {
            Reply::U32(echo) if echo == nonce => Ok(()),
            _ => Err(self.fail("connect", "it answered something else than a store would")),
        }
    }

    fn prove(&mut self, token: &JobToken, deadline: Deadline) -> Result<()> {
        let peer = self.peer.to_string();
        let refused = |reason: &str| StoreError::Token {
            peer: peer.clone(),
            reason: reason.into(),
        };
        let client = random_nonce()?;
        let hello = Request::Auth { message: &client };
        let server = match self.call("connect", &hello, Shape::Auth, deadline.min(TOKEN_LIMIT)) {
            Ok(Reply::Auth(server)) => server,
            _ if self.closed => return Err(refused(NO_TOKENS)),
            _ => {
                let silent = format!("it stayed silent: {NO_TOKENS}; or it is stalled");
                return Err(refused(&silent));
            }
        };
        let handshake = Handshake::new(token, PURPOSE, client, server);
        let proof = handshake.client_proof();
        match self.call(
            "connect",
            &Request::Auth { message: &proof },
            Shape::Auth,
            deadline,
        ) {
            Ok(Reply::Auth(proof)) if handshake.accepts_server(&proof) => Ok(()),
            Ok(_) => Err(refused(
                "the server could not prove that it knows the token",
            )),
            Err(_) => Err(refused(
                "the server refused it; PHALANX_TOKEN must be the same there",
            )),
        }
    }

    /// Sends a request.
    pub(super) fn send(
        &mut self,
        op: &'static str,
        request: &Request<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        tracing::trace!(target: "phalanx::op", "store.{op} {} to {}", request.opcode(), self.peer);
        if let Some(reason) = self.broken.clone() {
            return Err(self.lost(op, format!("the connection is broken since: {reason}")));
        }
        request.encode(&mut self.output);
        let mut sent = 0;
        while sent < self.output.len() {
            match self.stream.write(&self.output[sent..]) {
                Ok(n) => sent += n,
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => {
                    if !self.ready(PollFlags::OUT, deadline) {
                        return Err(self.fail(op, "the server takes no more data"));
                    }
                }
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(err) => {
                    self.closed = is_end(&err);
                    return Err(self.fail(op, &describe(&err)));
                }
            }
        }
        self.output.clear();
        self.output.shrink_to(READ_LEN);
        Ok(())
    }

    /// Sends a request that is answered at once, and reads the answer.
    ///
    /// Without one before the deadline the connection is lost, for a later answer would be taken
    /// for that of another request.
    pub(super) fn call(
        &mut self,
        op: &'static str,
        request: &Request<'_>,
        shape: Shape,
        deadline: Deadline,
    ) -> Result<Reply> {
        self.send(op, request, deadline)?;
        match self.receive(op, shape, deadline)? {
            Some(reply) => Ok(reply),
            None => Err(self.silent(op, deadline)),
        }
    }

    /// Sends a request that is answered when others have done something; false if the deadline
    /// came first, which leaves the connection as it was.
    pub(super) fn wait(
        &mut self,
        op: &'static str,
        request: &Request<'_>,
        deadline: Deadline,
    ) -> Result<bool> {
        self.send(op, request, deadline)?;
        if let Some(reply) = self.receive(op, Shape::Status, deadline)? {
            self.expect_status(op, &reply, READY)?;
            return Ok(true);
        }
        let grace = Deadline::after(CANCEL_LIMIT);
        self.send(op, &Request::CancelWait, grace)?;
        let Some(reply) = self.receive(op, Shape::Status, grace)? else {
            return Err(self.silent(op, deadline));
        };
        if reply == Reply::Status(NOT_READY) {
            return Ok(false);
        }
        // What was waited for came at the last moment; the cancellation is answered as well.
        self.expect_status(op, &reply, READY)?;
        match self.receive(op, Shape::Status, grace)? {
            Some(reply) => self.expect_status(op, &reply, NOT_READY).map(|()| true),
            None => Err(self.silent(op, deadline)),
        }
    }

    fn expect_status(&mut self, op: &'static str, reply: &Reply, expected: u8) -> Result<()> {
        match *reply == Reply::Status(expected) {
            true => Ok(()),
            false => Err(self.fail(op, &format!("unexpected answer {reply:?}"))),
        }
    }

    /// Reads an answer; `None` if it is not there at the deadline.
    fn receive(
        &mut self,
        op: &'static str,
        shape: Shape,
        deadline: Deadline,
    ) -> Result<Option<Reply>> {
        let mut decoder = ReplyDecoder::new(shape);
        loop {
            let (used, reply) = match decoder.feed(&self.input) {
                Ok(progress) => progress,
                Err(err) => return Err(self.fail(op, &err.to_string())),
            };
            self.input.drain(..used);
            if let Some(reply) = reply {
                return Ok(Some(reply));
            }
            if !self.ready(PollFlags::IN, deadline) {
                let partial = used > 0 || !self.input.is_empty();
                return match partial {
                    true => Err(self.fail(op, "the answer stopped in the middle")),
                    false => Ok(None),
                };
            }
            self.read_some(op)?;
        }
    }

    fn read_some(&mut self, op: &'static str) -> Result<()> {
        let old = self.input.len();
        self.input.resize(old + READ_LEN, 0);
        let result = self.stream.read(&mut self.input[old..]);
        self.input.truncate(old + *result.as_ref().unwrap_or(&0));
        match result {
            Ok(0) => {
                self.closed = true;
                let why = "the server closed the connection; it ended, or it refused the request";
                Err(self.fail(op, why))
            }
            Ok(_) => Ok(()),
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(err) if err.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(err) => {
                self.closed = is_end(&err);
                Err(self.fail(op, &describe(&err)))
            }
        }
    }

    /// Waits until the socket is ready (or broken, which reading or writing then shows).
    fn ready(&self, flags: PollFlags, deadline: Deadline) -> bool {
        loop {
            let left = deadline.left();
            let timeout = Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()) as _,
            };
            let mut fds = [PollFd::new(&self.stream, flags)];
            match poll(&mut fds, Some(&timeout)) {
                Ok(0) if deadline.passed() => return false,
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) | Err(_) => return true,
            }
        }
    }

    /// No answer where there should be one: the server hangs or cannot be reached any more.
    fn silent(&mut self, op: &'static str, deadline: Deadline) -> StoreError {
        let waited = deadline.elapsed().as_millis();
        self.fail(
            op,
            &format!("the server has stopped answering ({waited} ms after the call)"),
        )
    }

    /// Marks the connection as broken and says why.
    fn fail(&mut self, op: &'static str, reason: &str) -> StoreError {
        self.broken = Some(reason.to_owned());
        self.lost(op, reason.to_owned())
    }

    fn lost(&self, op: &'static str, reason: String) -> StoreError {
        StoreError::Connection {
            op,
            peer: self.peer.to_string(),
            reason,
        }
    }
}

/// Whether the other side has closed the connection.
fn is_end(err: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    matches!(err.kind(), ConnectionReset | BrokenPipe)
}

fn describe(err: &io::Error) -> String {
    match is_end(err) {
        true => format!("the server went away ({err})"),
        false => err.to_string(),
    }
}

/// How soon a peer whose host vanished is noticed: after two minutes of silence.
pub(super) fn keepalive() -> TcpKeepalive {
    TcpKeepalive::new()
        .with_time(Duration::from_secs(60))
        .with_interval(Duration::from_secs(15))
        .with_retries(4)
}

/// One attempt at every address of the host.
fn dial(options: &TcpStoreOptions, deadline: Deadline) -> Result<(TcpStream, SocketAddr), String> {
    let addrs = resolve(&options.host, options.port, deadline)?;
    let mut failures = Vec::new();
    for addr in addrs {
        // connect_timeout refuses zero.
        let limit = deadline.left().max(Duration::from_millis(1));
        let connected = TcpStream::connect_timeout(&addr, limit).and_then(|stream| {
            stream.set_nodelay(true)?;
            SockRef::from(&stream).set_tcp_keepalive(&keepalive())?;
            stream.set_nonblocking(true)?;
            Ok(stream)
        });
        match connected {
            Ok(stream) => return Ok((stream, addr)),
            Err(err) => failures.push(format!("{addr}: {err}")),
        }
    }
    Err(failures.join(", "))
}

/// The addresses of a host. A resolver that does not answer is left behind at the deadline.
pub(crate) fn resolve(
    host: &str,
    port: u16,
    deadline: Deadline,
) -> Result<Vec<SocketAddr>, String> {
    let bare = host
        .strip_prefix('[')
        .and_then(|h| h.strip_suffix(']'))
        .unwrap_or(host);
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let (sender, receiver) = mpsc::channel();
    let name = host.to_owned();
    std::thread::Builder::new()
        .name("phalanx-resolve".into())
        .spawn(move || {
            let found = (name.as_str(), port)
                .to_socket_addrs()
                .map(Iterator::collect::<Vec<_>>);
            // Nobody listens any more if the deadline has passed.
            let _ = sender.send(found);
        })
        .map_err(|err| format!("looking up {host:?}: {err}"))?;
    match receiver.recv_timeout(deadline.left()) {
        Ok(Ok(addrs)) if addrs.is_empty() => Err(format!("{host:?} has no address")),
        Ok(Ok(addrs)) => Ok(addrs),
        Ok(Err(err)) => Err(format!("looking up {host:?}: {err}")),
        Err(_) => Err(format!("looking up {host:?}: no answer from the resolver")),
    }
}

fn unreachable_store(
    options: &TcpStoreOptions,
    deadline: Deadline,
    attempts: u32,
    refusals: u32,
    last: String,
) -> StoreError {
    let hint = if refusals > 0 {
        "something listens there but does not behave like a store: is the port another \
         program's, or does the job have a token that is not set here (PHALANX_TOKEN)?"
    } else {
        "is the process that hosts the store (rank 0 or the launcher) running, with the same \
         MASTER_ADDR and MASTER_PORT?"
    };
    StoreError::Unreachable {
        target: match options.host.contains(':') {
            true => format!(
                "[{}]:{}",
                options.host.trim_matches(['[', ']']),
                options.port
            ),
            false => format!("{}:{}", options.host, options.port),
        },
        waited: deadline.elapsed(),
        attempts,
        last,
        hint: hint.into(),
    }
}
