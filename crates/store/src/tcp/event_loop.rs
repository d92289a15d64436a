//! The event loop of a TCP store server: sockets on one side, [`ServerState`] on the other.
//!
//! One thread serves all clients. It never blocks on one of them, never looks up a name, and
//! holds at most one element of a request per connection. Sockets are edge-triggered: a connection
//! is in the run queue while it may have bytes to read, and each turn reads once, so that a client
//! with much to say delays nobody for long.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::event::Event;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};

use super::session::{Next, READ_LEN, Session};
use super::state::{ConnId, Fault, ServerState};
use super::wire::READY;
use crate::error::Result;
use crate::token::JobToken;

pub(super) const WAKER: Token = Token(usize::MAX);
/// Listener `i` is `Token(LISTENERS + i)`; connections count from zero.
pub(super) const LISTENERS: usize = usize::MAX - 64;

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

pub(super) struct EventLoop {
    poll: Poll,
    listeners: Vec<TcpListener>,
    state: ServerState,
    guarded: bool,
    connections: Vec<Option<Session>>,
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
    pub(super) fn new(poll: Poll, listeners: Vec<TcpListener>, token: Option<JobToken>) -> Self {
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

    pub(super) fn run(mut self) {
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
        connection.writable |= event.is_writable();
        let unsent = connection.unsent() > 0;
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
        let connection = Session::new(socket, peer, serial);
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
            return Ok(connection.next());
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
        let held = connection.input.len() + connection.unsent();
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
        let blocked = connection.unsent() > 0 && !connection.writable;
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
                Ok(()) if connection.unsent() == 0 => {}
                Ok(()) => {
                    self.watch(conn);
                    self.enqueue(conn);
                }
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
