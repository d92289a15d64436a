//! The event loop of a TCP store server: sockets on one side, [`ServerState`] on the other.
//!
//! One thread serves all clients. It never blocks on one of them, never looks up a name, and
//! holds at most one element of a request per connection. Sockets are edge-triggered: a connection
//! is in the run queue while it may have bytes to read, and each turn reads once, so that a client
//! with much to say delays nobody for long.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mio::event::Event;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};
use socket2::{Domain, Protocol, Socket, Type};

use super::connection::keepalive;
use super::state::{ConnId, Fault, Outbox, ServerState};
use super::wire::{Decoder, READY};
use crate::error::{Result, StoreError};
use crate::token::JobToken;

const WAKER: Token = Token(usize::MAX);
/// Listener `i` is `Token(LISTENERS + i)`; connections count from zero.
const LISTENERS: usize = usize::MAX - 64;
const MAX_LISTENERS: usize = 32;

/// One read; also the most a connection may do before the others have their turn.
const READ_LEN: usize = 64 << 10;
/// Answers a connection may owe before its further requests have to wait.
const MAX_UNSENT: usize = 1 << 20;
/// Bytes received in part or not yet sent, over all connections; the one that exceeds it is closed.
const MAX_BUFFERED: usize = 512 << 20;
/// New connections taken at once while nobody else wants anything.
const ACCEPTS_WHEN_IDLE: usize = 8;
/// How long to wait after the system ran out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How long the loop does not sleep after a new connection. Clients come in crowds and speak at
/// once; waking the server for each step costs them more than this costs the server.
const STAY_AWAKE: Duration = Duration::from_micros(50);
/// How long a client of a guarded server has to prove the token.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);

/// Serves a store to PyTorch's and our clients until dropped.
///
/// ```
/// use phalanx_store::{Store, TcpStore, TcpStoreOptions, TcpStoreServer};
///
/// let server = TcpStoreServer::start(&["127.0.0.1:0".parse().unwrap()], None)?;
/// let port = server.local_addr().port();
/// let store = TcpStore::connect(&TcpStoreOptions::new("127.0.0.1", port))?;
/// store.set("k", b"v")?;
/// assert_eq!(store.get("k")?, b"v");
/// # Ok::<(), phalanx_store::StoreError>(())
/// ```
#[derive(Debug)]
pub struct TcpStoreServer {
    addrs: Vec<SocketAddr>,
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

impl TcpStoreServer {
    /// Binds all the given addresses and serves them from one thread.
    ///
    /// Port 0 takes a free one; further addresses with port 0 take the same. With a token, only
    /// clients that prove it are served.
    pub fn start(addrs: &[SocketAddr], token: Option<JobToken>) -> Result<Self> {
        let mut listeners = bind_all(addrs)?;
        let addrs = listeners
            .iter()
            .map(TcpListener::local_addr)
            .collect::<io::Result<Vec<_>>>()
            .map_err(|err| StoreError::io("reading the store's own address", err))?;
        let setup = |err| StoreError::io("setting up the store's event loop", err);
        let poll = Poll::new().map_err(setup)?;
        for (i, listener) in listeners.iter_mut().enumerate() {
            let token = Token(LISTENERS + i);
            poll.registry()
                .register(listener, token, Interest::READABLE)
                .map_err(setup)?;
        }
        let waker = Arc::new(Waker::new(poll.registry(), WAKER).map_err(setup)?);
        let event_loop = EventLoop::new(poll, listeners, token);
        let thread = std::thread::Builder::new()
            .name("phalanx-store".into())
            .spawn(move || event_loop.run())
            .map_err(setup)?;
        Ok(Self {
            addrs,
            waker,
            thread: Some(thread),
        })
    }

    /// The first address it listens on, with the port it got.
    pub fn local_addr(&self) -> SocketAddr {
        self.addrs[0]
    }

    /// All addresses it listens on.
    pub fn local_addrs(&self) -> &[SocketAddr] {
        &self.addrs
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        if self.waker.wake().is_ok()
            && let Some(thread) = self.thread.take()
        {
            // A panic of the loop has been reported by the panic hook already.
            let _ = thread.join();
        }
    }
}

fn bind_all(addrs: &[SocketAddr]) -> Result<Vec<TcpListener>> {
    if addrs.is_empty() || addrs.len() > MAX_LISTENERS {
        let problem = format!("a store listens on 1 to {MAX_LISTENERS} addresses");
        return Err(StoreError::Invalid(problem));
    }
    let mut listeners: Vec<TcpListener> = Vec::new();
    let mut port = 0;
    for addr in addrs {
        let mut addr = *addr;
        if addr.port() == 0 {
            addr.set_port(port);
        }
        let bound = bind(addr).and_then(|l| l.local_addr().map(|local| (l, local)));
        let (listener, local) = bound.map_err(|err| bind_error(addr, err))?;
        port = local.port();
        listeners.push(listener);
    }
    Ok(listeners)
}

fn bind(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    // Accepted sockets inherit both: answers leave at once, and clients on hosts that vanished do
    // not stay for ever.
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(&keepalive())?;
    if addr.is_ipv6() {
        // `[::]` serves IPv4 clients as well, as PyTorch's server does.
        socket.set_only_v6(false)?;
    }
    socket.bind(&addr.into())?;
    // The system cuts this to its own limit (net.core.somaxconn).
    socket.listen(i32::from(u16::MAX))?;
    socket.set_nonblocking(true)?;
    Ok(TcpListener::from_std(socket.into()))
}

fn bind_error(addr: SocketAddr, err: io::Error) -> StoreError {
    let hint = match err.kind() {
        io::ErrorKind::AddrInUse => "; another process uses this port, choose another or port 0",
        io::ErrorKind::AddrNotAvailable => "; this address is not one of this machine's",
        _ => "",
    };
    StoreError::Io {
        what: format!("listening on {addr}"),
        reason: format!("{err}{hint}"),
        kind: err.kind(),
    }
}

/// One client.
struct Connection {
    socket: TcpStream,
    peer: SocketAddr,
    /// Distinguishes connections that had the same number one after the other.
    serial: u64,
    decoder: Decoder,
    /// The handshake is over.
    open: bool,
    /// Bytes of a request that is not whole yet, or that has to wait for answers to leave.
    input: Vec<u8>,
    /// Answers that the socket did not take yet.
    output: Vec<u8>,
    /// There may be bytes to read.
    readable: bool,
    /// Requests are left in `input` because answers could not leave.
    stalled: bool,
    /// Wants to know when the socket takes more.
    blocked: bool,
    /// In the run queue.
    queued: bool,
    /// The client will send no more.
    ended: bool,
    /// What it counts towards [`MAX_BUFFERED`].
    accounted: usize,
}

struct EventLoop {
    poll: Poll,
    listeners: Vec<TcpListener>,
    state: ServerState,
    guarded: bool,
    connections: Vec<Option<Connection>>,
    free: Vec<ConnId>,
    next_serial: u64,
    run_queue: VecDeque<ConnId>,
    /// Clients woken by others, to be sent their byte.
    woken: Vec<ConnId>,
    /// Some listener may have more connections.
    acceptable: bool,
    /// The listener to look at first.
    next_listener: usize,
    accept_again: Option<Instant>,
    /// Until then the loop looks for events without sleeping.
    awake_until: Option<Instant>,
    /// The last attempt failed, and this was said.
    accept_failing: bool,
    /// Connections of a guarded server that have not proved the token, oldest first.
    handshakes: VecDeque<(Instant, ConnId, u64)>,
    buffered: usize,
    scratch: Vec<u8>,
}

impl EventLoop {
    fn new(poll: Poll, listeners: Vec<TcpListener>, token: Option<JobToken>) -> Self {
        Self {
            poll,
            listeners,
            guarded: token.is_some(),
            state: ServerState::new(token),
            connections: Vec::new(),
            free: Vec::new(),
            next_serial: 0,
            run_queue: VecDeque::new(),
            woken: Vec::new(),
            acceptable: true,
            next_listener: 0,
            accept_again: None,
            awake_until: None,
            accept_failing: false,
            handshakes: VecDeque::new(),
            buffered: 0,
            scratch: vec![0; READ_LEN],
        }
    }

    fn run(mut self) {
        let mut events = Events::with_capacity(256);
        loop {
            match self.poll.poll(&mut events, self.patience()) {
                Err(err) if err.kind() == io::ErrorKind::Interrupted => continue,
                Err(err) => {
                    tracing::error!("the store's event loop ends: {err}");
                    return;
                }
                Ok(()) => {}
            }
            for event in &events {
                match event.token() {
                    WAKER => return,
                    Token(number) if number >= LISTENERS => self.acceptable = true,
                    Token(conn) => self.note(conn, event),
                }
            }
            self.expire();
            self.accept();
            for _ in 0..self.run_queue.len() {
                let Some(conn) = self.run_queue.pop_front() else {
                    break;
                };
                self.turn(conn);
            }
        }
    }

    /// How long to sleep when nothing happens.
    fn patience(&self) -> Option<Duration> {
        if !self.run_queue.is_empty() || (self.acceptable && self.accept_again.is_none()) {
            return Some(Duration::ZERO);
        }
        if self.awake_until.is_some_and(|until| until > Instant::now()) {
            return Some(Duration::ZERO);
        }
        let handshake = self.handshakes.front().map(|(limit, ..)| *limit);
        let first = [self.accept_again, handshake].into_iter().flatten().min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    fn note(&mut self, conn: ConnId, event: &Event) {
        let Some(Some(connection)) = self.connections.get_mut(conn) else {
            return;
        };
        if event.is_readable() || event.is_read_closed() || event.is_error() {
            connection.readable = true;
        }
        // The end of the stream comes with no edge of its own if it arrived with data.
        if event.is_read_closed() {
            connection.ended = true;
        }
        let unsent = !connection.output.is_empty();
        if connection.readable || (event.is_writable() && unsent) {
            self.enqueue(conn);
        }
    }

    fn enqueue(&mut self, conn: ConnId) {
        if let Some(connection) = &mut self.connections[conn]
            && !std::mem::replace(&mut connection.queued, true)
        {
            self.run_queue.push_back(conn);
        }
    }

    /// Takes new connections, few at a time: those who are in wait for no queue of newcomers.
    fn accept(&mut self) {
        if self.accept_again.is_some_and(|at| at > Instant::now()) {
            return;
        }
        self.accept_again = None;
        let busy = !self.run_queue.is_empty();
        for _ in 0..if busy { 1 } else { ACCEPTS_WHEN_IDLE } {
            if !self.acceptable || self.accept_again.is_some() {
                return;
            }
            self.accept_one();
        }
    }

    fn accept_one(&mut self) {
        for _ in 0..self.listeners.len() {
            match self.listeners[self.next_listener].accept() {
                Ok((socket, peer)) => {
                    self.accept_failing = false;
                    self.open(socket, peer);
                }
                // The client gave up before its turn came.
                Err(err) if err.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => {
                    self.next_listener = (self.next_listener + 1) % self.listeners.len();
                    continue;
                }
                Err(err) => {
                    if !std::mem::replace(&mut self.accept_failing, true) {
                        tracing::warn!("the store cannot take new connections: {err}");
                    }
                    self.accept_again = Some(Instant::now() + ACCEPT_PAUSE);
                }
            }
            return;
        }
        self.acceptable = false;
    }

    fn open(&mut self, mut socket: TcpStream, peer: SocketAddr) {
        let conn = self.free.pop().unwrap_or(self.connections.len());
        let registry = self.poll.registry();
        let ready = registry.register(&mut socket, Token(conn), Interest::READABLE);
        if let Err(err) = ready {
            tracing::warn!(%peer, "the store refuses a connection: {err}");
            if conn < self.connections.len() {
                self.free.push(conn);
            }
            return;
        }
        let serial = self.next_serial;
        self.next_serial += 1;
        let connection = Connection {
            socket,
            peer,
            serial,
            decoder: Decoder::default(),
            open: false,
            input: Vec::new(),
            output: Vec::new(),
            readable: false,
            stalled: false,
            blocked: false,
            queued: false,
            ended: false,
            accounted: 0,
        };
        match self.connections.get_mut(conn) {
            Some(slot) => *slot = Some(connection),
            None => self.connections.push(Some(connection)),
        }
        self.state.connect(conn);
        self.awake_until = Some(Instant::now() + STAY_AWAKE);
        if self.guarded {
            self.handshakes
                .push_back((Instant::now() + HANDSHAKE_LIMIT, conn, serial));
        }
    }

    /// Closes connections that did not prove the token in time.
    fn expire(&mut self) {
        while let Some(&(limit, conn, serial)) = self.handshakes.front() {
            let current = self.connections[conn]
                .as_ref()
                .filter(|c| c.serial == serial);
            let waiting = current.is_some() && !self.state.is_open(conn);
            if waiting && limit > Instant::now() {
                return;
            }
            self.handshakes.pop_front();
            if waiting {
                self.close(conn, Some(&Fault::TokenMissing));
            }
        }
        self.notify();
    }

    /// Lets one connection read once and answer.
    fn turn(&mut self, conn: ConnId) {
        let Some(connection) = &mut self.connections[conn] else {
            return;
        };
        connection.queued = false;
        match self.serve(conn) {
            Ok(Next::Wait) => self.watch(conn),
            Ok(Next::Again) => {
                self.watch(conn);
                self.enqueue(conn);
            }
            Ok(Next::Close) => self.close(conn, None),
            Err(fault) => self.close(conn, Some(&fault)),
        }
        self.notify();
    }

    fn serve(&mut self, conn: ConnId) -> Result<Next, Fault> {
        let Self {
            connections,
            state,
            woken,
            scratch,
            ..
        } = self;
        let connection = connections[conn].as_mut().expect("the caller has looked");
        if connection.send().is_err() {
            return Ok(Next::Close);
        }
        if connection.is_congested() {
            return Ok(Next::Wait);
        }
        let mut received: &[u8] = &[];
        if connection.readable && !connection.stalled {
            match connection.receive(scratch) {
                Ok(n) => received = &scratch[..n],
                Err(_) => return Ok(Next::Close),
            }
        }
        connection.process(conn, received, state, woken)?;
        if connection.send().is_err() {
            return Ok(Next::Close);
        }
        let held = connection.input.len() + connection.output.len();
        self.buffered = self.buffered + held - connection.accounted;
        connection.accounted = held;
        if self.buffered > MAX_BUFFERED {
            let peer = connection.peer;
            tracing::warn!(%peer, "the store holds too many unfinished requests, closing one");
            return Ok(Next::Close);
        }
        Ok(connection.next())
    }

    /// Asks for an event when a socket that took no more takes more; most never do.
    fn watch(&mut self, conn: ConnId) {
        let Some(connection) = &mut self.connections[conn] else {
            return;
        };
        let blocked = !connection.output.is_empty();
        if blocked == connection.blocked {
            return;
        }
        let interest = match blocked {
            true => Interest::READABLE | Interest::WRITABLE,
            false => Interest::READABLE,
        };
        let registry = self.poll.registry();
        match registry.reregister(&mut connection.socket, Token(conn), interest) {
            Ok(()) => connection.blocked = blocked,
            Err(err) => {
                tracing::warn!(peer = %connection.peer, "the store loses a client: {err}");
                self.close(conn, None);
            }
        }
    }

    /// Sends their byte to clients that were woken.
    fn notify(&mut self) {
        while let Some(conn) = self.woken.pop() {
            let Some(connection) = &mut self.connections[conn] else {
                continue;
            };
            connection.output.push(READY);
            match connection.send() {
                Ok(()) => self.watch(conn),
                Err(_) => self.close(conn, None),
            }
        }
    }

    /// Ends a connection; the caller calls [`notify`](Self::notify) afterwards.
    fn close(&mut self, conn: ConnId, fault: Option<&Fault>) {
        let Some(mut connection) = self.connections[conn].take() else {
            return;
        };
        let peer = connection.peer;
        match fault {
            Some(fault) => tracing::warn!(%peer, "the store closes a connection: {fault}"),
            None => tracing::debug!(%peer, "a store client left"),
        }
        // Answers to what came before the fault are still owed; one attempt is all they get.
        let _ = connection.send();
        let _ = self.poll.registry().deregister(&mut connection.socket);
        self.buffered -= connection.accounted;
        self.state.disconnect(conn, &mut self.woken);
        self.free.push(conn);
        self.accept_again = None;
    }
}

/// What a connection needs next.
enum Next {
    /// An event.
    Wait,
    /// Another turn.
    Again,
    /// To be closed: the client has left and has everything it asked for.
    Close,
}

impl Connection {
    /// Reads once. Zero bytes if there are none now, or no more ever (then `ended` is set).
    fn receive(&mut self, scratch: &mut [u8]) -> io::Result<usize> {
        match self.socket.read(scratch) {
            Ok(0) => {
                self.ended = true;
                self.readable = false;
                Ok(0)
            }
            Ok(n) => {
                // A short read has emptied the socket; the next byte brings an event. Only the
                // end of the stream may have been announced already.
                self.readable = n == scratch.len() || self.ended;
                Ok(n)
            }
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => {
                self.readable = false;
                Ok(0)
            }
            Err(err) if err.kind() == io::ErrorKind::Interrupted => Ok(0),
            Err(err) => Err(err),
        }
    }

    /// Sends what the socket takes.
    fn send(&mut self) -> io::Result<()> {
        if self.output.is_empty() {
            return Ok(());
        }
        let mut sent = 0;
        let result = loop {
            if sent == self.output.len() {
                break Ok(());
            }
            match self.socket.write(&self.output[sent..]) {
                Ok(n) => sent += n,
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => break Ok(()),
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(err) => break Err(err),
            }
        };
        drop_front(&mut self.output, sent);
        result
    }

    /// Acts on the requests that have arrived whole, while their answers can leave.
    fn process(
        &mut self,
        conn: ConnId,
        received: &[u8],
        state: &mut ServerState,
        woken: &mut Vec<ConnId>,
    ) -> Result<(), Fault> {
        let fresh = self.input.is_empty();
        if !fresh {
            self.input.extend_from_slice(received);
        }
        let input = if fresh { received } else { &self.input };
        let mut used = 0;
        self.stalled = loop {
            if self.output.len() >= MAX_UNSENT {
                break true;
            }
            let rest = &input[used..];
            if let Some(&opcode) = rest.first()
                && !self.open
            {
                state.admits(conn, opcode)?;
                self.open = state.is_open(conn);
            }
            let Some((part, len)) = self.decoder.next(rest)? else {
                break false;
            };
            used += len;
            state.handle(
                conn,
                part,
                &mut Outbox {
                    reply: &mut self.output,
                    woken,
                },
            )?;
        };
        match fresh {
            true => self.input.extend_from_slice(&received[used..]),
            false => drop_front(&mut self.input, used),
        }
        Ok(())
    }

    fn is_congested(&self) -> bool {
        self.output.len() >= MAX_UNSENT
    }

    fn next(&self) -> Next {
        if self.is_congested() {
            Next::Wait
        } else if self.stalled || self.readable {
            Next::Again
        } else if self.ended && self.output.is_empty() {
            Next::Close
        } else {
            Next::Wait
        }
    }
}

/// Removes bytes from the front; an emptied buffer gives its memory back if it had grown.
fn drop_front(buffer: &mut Vec<u8>, count: usize) {
    if count < buffer.len() {
        buffer.drain(..count);
    } else if buffer.capacity() > READ_LEN {
        *buffer = Vec::new();
    } else {
        buffer.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepted_sockets_inherit_what_the_listener_has() {
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let _client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let accepted = std::iter::repeat_with(|| listener.accept()).find_map(|result| result.ok());
        let (accepted, _) = accepted.unwrap();
        assert!(accepted.nodelay().unwrap());
        assert!(socket2::SockRef::from(&accepted).keepalive().unwrap());
    }
}
