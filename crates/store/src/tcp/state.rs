//! What a TCP store server knows and does: requests in, answers and wake-ups out.
//!
//! No sockets and no clock: the server's event loop feeds it, and tests and fuzzers drive it alone.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::wire::{ListOp, MAGIC, NOT_READY, Opcode, Part, READY, Request, WireError, put_bytes};
use crate::table::{AddError, Table};
use crate::token::{Handshake, JobToken, Nonce, random_nonce};

/// What the token [`Handshake`] of a store connection is for; whoever speaks the protocol without
/// [`TcpStore`](crate::TcpStore) needs it.
pub const PURPOSE: &str = "phalanx store 1";

/// Most key bytes one `WAIT` may leave behind on the server.
///
/// PyTorch's limits would allow a gigabyte; a wait for every rank of a large job needs a few MiB.
pub const MAX_WAIT_BYTES: usize = 16 << 20;

/// Names a connection; the event loop chooses the number and may reuse it after
/// [`ServerState::disconnect`].
pub type ConnId = usize;

/// Why the server ends a connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Bytes that are no request.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The first request was not `VALIDATE` with the right number: not a store client at all.
    #[error("not a store client (wrong first bytes)")]
    NotValidated,
    /// `VALIDATE` or a token where none belongs.
    #[error("handshake repeated or not expected (the server has no job token)")]
    UnexpectedHandshake,
    /// A request before the token was proved.
    #[error("no job token presented; is PHALANX_TOKEN set there?")]
    TokenMissing,
    /// The proof was wrong.
    #[error("wrong job token; PHALANX_TOKEN differs there")]
    TokenWrong,
    /// The system gave no random bytes for a challenge.
    #[error("no random bytes for a challenge")]
    NoRandom,
    /// `ADD` to something that is not a number.
    #[error("ADD to key {0}: {1}")]
    Add(String, AddError),
    /// `BARRIER` on a key that holds something else than a count.
    #[error("BARRIER on key {0}: {1}")]
    Barrier(String, AddError),
    /// A `WAIT` with too many key bytes.
    #[error("WAIT with more than {MAX_WAIT_BYTES} bytes of keys")]
    WaitTooLarge,
}

/// A store's data, its connections and who waits for what.
#[derive(Debug)]
pub struct ServerState {
    table: Table,
    token: Option<JobToken>,
    clients: Vec<Option<Client>>,
    waiters: HashMap<Arc<[u8]>, Waiters>,
    next_ticket: u64,
}

/// One connection.
#[derive(Debug)]
struct Client {
    phase: Phase,
    /// The `WAIT` or `BARRIER` in progress; a connection has one at most.
    wait: Option<Wait>,
    /// Result so far of the `CHECK` in progress.
    check: bool,
    /// The queue whose element this client was woken for and has not taken yet.
    handed: Option<Arc<[u8]>>,
}

/// How far a connection has come.
///
/// | state | next accepted request | then |
/// |---|---|---|
/// | `New` | `VALIDATE` | `Open`, or `Locked` if the server has a token |
/// | `Locked` | `AUTH` with the client's nonce | `Challenged` |
/// | `Challenged` | `AUTH` with the proof | `Open` |
/// | `Open` | everything else | `Open` |
#[derive(Debug, PartialEq, Eq)]
enum Phase {
    New,
    Locked,
    Challenged { client: Nonce, server: Nonce },
    Open,
}

/// A wait in progress.
#[derive(Debug, Default)]
struct Wait {
    /// Registrations not yet satisfied.
    pending: usize,
    /// The request has been read to its end, so the answer may be sent.
    armed: bool,
    /// Every registration made, satisfied or not.
    tickets: Vec<Ticket>,
    key_bytes: usize,
}

/// Those registered on one key, in the order in which they are to be served.
#[derive(Debug, Default)]
struct Waiters {
    /// Waiting for the key to exist, by ticket.
    existence: BTreeMap<u64, ConnId>,
    /// Waiting in its barrier, by the count that releases and the ticket.
    arrivals: BTreeMap<(i64, u64), ConnId>,
}

impl Waiters {
    fn is_empty(&self) -> bool {
        self.existence.is_empty() && self.arrivals.is_empty()
    }

    /// Takes the next client that `change` lets go on.
    fn next(&mut self, change: Change) -> Option<ConnId> {
        if let Some((_, conn)) = self.existence.pop_first() {
            return Some(conn);
        }
        let Change::Count(count) = change else {
            return None;
        };
        let first = self.arrivals.first_entry()?;
        (first.key().0 <= count).then(|| first.remove())
    }
}

/// One registration of a waiting client.
#[derive(Debug)]
struct Ticket {
    key: Arc<[u8]>,
    number: u64,
    /// For barriers: the count that releases. Otherwise the key only has to exist.
    target: Option<i64>,
}

/// What changed on a key, and so who may go on.
#[derive(Debug, Clone, Copy)]
enum Change {
    /// It has a value.
    Value,
    /// Its barrier count, and so it has a value.
    Count(i64),
    /// Its queue has an element, which satisfies one client.
    Element,
}

/// Where answers go: bytes for the connection that asked, and who else was woken.
#[derive(Debug)]
pub struct Outbox<'a> {
    /// Bytes for the connection whose request is handled.
    pub reply: &'a mut Vec<u8>,
    /// Other connections, each of which is owed one [`READY`] byte.
    pub woken: &'a mut Vec<ConnId>,
}

impl ServerState {
    /// An empty store, guarded by `token` if there is one.
    pub fn new(token: Option<JobToken>) -> Self {
        Self {
            table: Table::default(),
            token,
            clients: Vec::new(),
            waiters: HashMap::new(),
            next_ticket: 0,
        }
    }

    /// A connection begins.
    pub fn connect(&mut self, conn: ConnId) {
        if conn >= self.clients.len() {
            self.clients.resize_with(conn + 1, || None);
        }
        debug_assert!(self.clients[conn].is_none(), "connection number in use");
        let client = Client {
            phase: Phase::New,
            wait: None,
            check: true,
            handed: None,
        };
        self.clients[conn] = Some(client);
    }

    /// A connection ended, for whatever reason. Nothing of it stays; data it wrote does.
    pub fn disconnect(&mut self, conn: ConnId, woken: &mut Vec<ConnId>) {
        self.drop_wait(conn);
        let Some(client) = self.clients[conn].take() else {
            return;
        };
        if let Some(key) = client.handed {
            let mut unused = Vec::new();
            let mut out = Outbox {
                reply: &mut unused,
                woken,
            };
            self.offer_again(&key, conn, &mut out);
        }
    }

    /// Whether the connection has passed the handshake.
    pub fn is_open(&self, conn: ConnId) -> bool {
        self.clients
            .get(conn)
            .and_then(Option::as_ref)
            .is_some_and(|c| c.phase == Phase::Open)
    }

    /// Whether a request that begins with `opcode` may come now.
    ///
    /// Asked at the first byte, so that a stranger cannot make the server collect a long request.
    pub fn admits(&self, conn: ConnId, opcode: u8) -> Result<(), Fault> {
        let phase = &self.clients[conn]
            .as_ref()
            .expect("connection is announced")
            .phase;
        match phase {
            Phase::Open => Ok(()),
            Phase::New if opcode == Opcode::Validate as u8 => Ok(()),
            Phase::New => Err(Fault::NotValidated),
            _ if opcode == Opcode::Auth as u8 => Ok(()),
            _ => Err(Fault::TokenMissing),
        }
    }

    /// The data, for inspection.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Number of registrations of waiting connections, to show that none leaks.
    pub fn waiting(&self) -> usize {
        self.waiters
            .values()
            .map(|w| w.existence.len() + w.arrivals.len())
            .sum()
    }

    /// Acts on one part of a request. After an error the connection must be closed.
    pub fn handle(
        &mut self,
        conn: ConnId,
        part: Part<'_>,
        out: &mut Outbox<'_>,
    ) -> Result<(), Fault> {
        if self.client(conn).phase != Phase::Open {
            return self.shake_hands(conn, part, out);
        }
        if let Some(key) = self.client(conn).handed.take() {
            let takes = matches!(part, Part::Whole(Request::QueuePop { key: k }) if *k == *key);
            if !takes {
                self.offer_again(&key, conn, out);
            }
        }
        match part {
            Part::Whole(request) => self.request(conn, request, out),
            Part::ListStart(op) => {
                self.list_start(conn, op);
                Ok(())
            }
            Part::ListKey(op, key) => self.list_key(conn, op, key, out),
            Part::ListPair(key, value) => {
                self.set(conn, key, value, out);
                Ok(())
            }
            Part::ListEnd(op) => {
                self.list_end(conn, op, out);
                Ok(())
            }
        }
    }

    fn client(&mut self, conn: ConnId) -> &mut Client {
        self.clients[conn]
            .as_mut()
            .expect("connection is announced by connect()")
    }

    fn shake_hands(
        &mut self,
        conn: ConnId,
        part: Part<'_>,
        out: &mut Outbox<'_>,
    ) -> Result<(), Fault> {
        let guarded = self.token.is_some();
        let client = self.clients[conn]
            .as_mut()
            .expect("connection is announced by connect()");
        client.phase = match (&client.phase, part, &self.token) {
            (Phase::New, Part::Whole(Request::Validate { magic: MAGIC }), _) => match guarded {
                true => Phase::Locked,
                false => Phase::Open,
            },
            (Phase::New, ..) => return Err(Fault::NotValidated),
            (Phase::Locked, Part::Whole(Request::Auth { message }), _) => {
                let server = random_nonce().map_err(|_| Fault::NoRandom)?;
                out.reply.extend(server);
                Phase::Challenged {
                    client: *message,
                    server,
                }
            }
            (
                Phase::Challenged { client, server },
                Part::Whole(Request::Auth { message }),
                Some(token),
            ) => {
                let handshake = Handshake::new(token, PURPOSE, *client, *server);
                if !handshake.accepts_client(message) {
                    return Err(Fault::TokenWrong);
                }
                out.reply.extend(handshake.server_proof());
                Phase::Open
            }
            _ => return Err(Fault::TokenMissing),
        };
        Ok(())
    }

    fn request(
        &mut self,
        conn: ConnId,
        request: Request<'_>,
        out: &mut Outbox<'_>,
    ) -> Result<(), Fault> {
        match request {
            Request::Set { key, value } => self.set(conn, key, value, out),
            Request::Get { key } => put_bytes(out.reply, self.table.get(key).unwrap_or_default()),
            Request::Add { key, delta } => {
                let sum = self
                    .table
                    .add(key, delta)
                    .map_err(|err| Fault::Add(show(key), err))?;
                self.wake(conn, key, Change::Value, out);
                out.reply.extend(sum.to_le_bytes());
            }
            Request::CompareSet {
                key,
                expected,
                desired,
            } => {
                let value = self.table.compare_set(key, expected, desired);
                if self.table.get(key).is_some() {
                    self.wake(conn, key, Change::Value, out);
                }
                put_bytes(out.reply, &value);
            }
            Request::NumKeys => out
                .reply
                .extend((self.table.num_keys() as i64).to_le_bytes()),
            Request::DeleteKey { key } => {
                out.reply
                    .extend(i64::from(self.table.delete(key)).to_le_bytes());
            }
            Request::Append { key, value } => {
                self.table.append(key, value);
                self.wake(conn, key, Change::Value, out);
            }
            Request::CancelWait => {
                self.drop_wait(conn);
                out.reply.push(NOT_READY);
            }
            Request::Ping { nonce } => out.reply.extend(nonce.to_le_bytes()),
            Request::QueuePush { key, value } => {
                self.table.queue_push(key, value);
                self.wake(conn, key, Change::Element, out);
            }
            Request::QueuePop { key } => {
                out.reply
                    .extend((self.table.queue_len(key) as i64).to_le_bytes());
                if let Some(value) = self.table.queue_pop(key) {
                    put_bytes(out.reply, &value);
                }
            }
            Request::QueueLen { key } => {
                out.reply
                    .extend((self.table.queue_len(key) as i64).to_le_bytes());
            }
            Request::ListKeys => {
                out.reply
                    .extend((self.table.num_keys() as i64).to_le_bytes());
                self.table.keys().for_each(|key| put_bytes(out.reply, key));
            }
            Request::Barrier { key, world_size } => self.barrier(conn, key, world_size, out)?,
            Request::Validate { .. } | Request::Auth { .. } => {
                return Err(Fault::UnexpectedHandshake);
            }
            Request::Check { .. }
            | Request::Wait { .. }
            | Request::MultiGet { .. }
            | Request::MultiSet { .. } => unreachable!("lists are decoded element by element"),
        }
        Ok(())
    }

    fn set(&mut self, conn: ConnId, key: &[u8], value: &[u8], out: &mut Outbox<'_>) {
        self.table.set(key, value);
        self.wake(conn, key, Change::Value, out);
    }

    fn list_start(&mut self, conn: ConnId, op: ListOp) {
        match op {
            ListOp::Check => self.client(conn).check = true,
            ListOp::Wait => {
                self.drop_wait(conn);
                self.client(conn).wait = Some(Wait::default());
            }
            ListOp::MultiGet | ListOp::MultiSet => {}
        }
    }

    fn list_key(
        &mut self,
        conn: ConnId,
        op: ListOp,
        key: &[u8],
        out: &mut Outbox<'_>,
    ) -> Result<(), Fault> {
        match op {
            ListOp::Check => {
                let exists = self.table.exists(key);
                self.client(conn).check &= exists;
            }
            ListOp::MultiGet => put_bytes(out.reply, self.table.get(key).unwrap_or_default()),
            ListOp::Wait if self.table.exists(key) => {}
            ListOp::Wait => return self.register(conn, key, None),
            ListOp::MultiSet => unreachable!("MULTI_SET is decoded as pairs"),
        }
        Ok(())
    }

    fn list_end(&mut self, conn: ConnId, op: ListOp, out: &mut Outbox<'_>) {
        let client = self.client(conn);
        match op {
            ListOp::Check => out.reply.push(if client.check { READY } else { NOT_READY }),
            ListOp::Wait => {
                let wait = client.wait.as_mut().expect("a WAIT list has begun");
                wait.armed = true;
                if wait.pending == 0 {
                    client.wait = None;
                    out.reply.push(READY);
                }
            }
            ListOp::MultiGet | ListOp::MultiSet => {}
        }
    }

    /// Counts an arrival. Only arrivals release a barrier: writing to its key does not.
    fn barrier(
        &mut self,
        conn: ConnId,
        key: &[u8],
        world_size: i64,
        out: &mut Outbox<'_>,
    ) -> Result<(), Fault> {
        let count = self
            .table
            .add(key, 1)
            .map_err(|err| Fault::Barrier(show(key), err))?;
        self.wake(conn, key, Change::Count(count), out);
        if count >= world_size {
            out.reply.push(READY);
            return Ok(());
        }
        self.drop_wait(conn);
        self.client(conn).wait = Some(Wait {
            armed: true,
            ..Wait::default()
        });
        self.register(conn, key, Some(world_size))
    }

    fn register(&mut self, conn: ConnId, key: &[u8], target: Option<i64>) -> Result<(), Fault> {
        let key: Arc<[u8]> = match self.waiters.get_key_value(key) {
            Some((shared, _)) => Arc::clone(shared),
            None => key.into(),
        };
        let number = self.next_ticket;
        self.next_ticket += 1;
        let wait = self
            .client(conn)
            .wait
            .as_mut()
            .expect("a wait is in progress");
        wait.key_bytes += key.len();
        if wait.key_bytes > MAX_WAIT_BYTES {
            return Err(Fault::WaitTooLarge);
        }
        wait.pending += 1;
        wait.tickets.push(Ticket {
            key: Arc::clone(&key),
            number,
            target,
        });
        let waiters = self.waiters.entry(key).or_default();
        match target {
            None => waiters.existence.insert(number, conn),
            Some(target) => waiters.arrivals.insert((target, number), conn),
        };
        Ok(())
    }

    /// Tells those who wait for `key` about a change. `conn` made it, and may be among them.
    fn wake(&mut self, conn: ConnId, key: &[u8], change: Change, out: &mut Outbox<'_>) {
        if self.waiters.is_empty() {
            return;
        }
        let Some((key, mut waiters)) = self.waiters.remove_entry(key) else {
            return;
        };
        while let Some(waiter) = waiters.next(change) {
            let client = self.client(waiter);
            let wait = client.wait.as_mut().expect("a registered client waits");
            wait.pending -= 1;
            if wait.pending > 0 || !wait.armed {
                continue;
            }
            client.wait = None;
            match waiter == conn {
                true => out.reply.push(READY),
                false => out.woken.push(waiter),
            }
            if let Change::Element = change {
                self.client(waiter).handed = Some(Arc::clone(&key));
                break;
            }
        }
        if !waiters.is_empty() {
            self.waiters.insert(key, waiters);
        }
    }

    /// A client that was woken for a queue's element did not take it: the next one may.
    fn offer_again(&mut self, key: &[u8], conn: ConnId, out: &mut Outbox<'_>) {
        if self.table.queue_len(key) > 0 {
            self.wake(conn, key, Change::Element, out);
        }
    }

    /// Forgets what a connection waits for.
    fn drop_wait(&mut self, conn: ConnId) {
        let Some(client) = self.clients[conn].as_mut() else {
            return;
        };
        let Some(wait) = client.wait.take() else {
            return;
        };
        for ticket in wait.tickets {
            let Some(waiters) = self.waiters.get_mut(&ticket.key) else {
                continue;
            };
            match ticket.target {
                None => waiters.existence.remove(&ticket.number),
                Some(target) => waiters.arrivals.remove(&(target, ticket.number)),
            };
            if waiters.is_empty() {
                self.waiters.remove(&ticket.key);
            }
        }
    }
}

/// A key for a log line.
fn show(key: &[u8]) -> String {
    let shown = &key[..key.len().min(64)];
    format!("{:?}", String::from_utf8_lossy(shown))
}
