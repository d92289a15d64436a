//! The client side of a TCP store.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::connection::{CANCEL_LIMIT, Connection};
use super::wire::{MAX_KEY_LEN, MAX_LIST_LEN, MAX_VALUE_LEN, READY, Reply, Request, Shape};
use crate::deadline::Deadline;
use crate::error::{Result, StoreError};
use crate::store::{DEFAULT_TIMEOUT, Store, barrier_timeout, wait_timeout};
use crate::token::JobToken;

/// The key under which workers register with a server that counts them. Not below `/`, so users
/// do not see it.
const WORKERS_KEY: &[u8] = b"init/";
/// Where a store is and how to speak to it.
#[derive(Debug, Clone)]
pub struct TcpStoreOptions {
    /// Host name or address of the server.
    pub host: String,
    /// Port of the server.
    pub port: u16,
    /// How long connecting may take, and the default timeout of the handle.
    pub timeout: Duration,
    /// If given, the client registers as one of that many workers, as PyTorch's does; a PyTorch
    /// process that hosts the store waits for them.
    pub world_size: Option<usize>,
    /// Proved to the server if given. PyTorch's servers know no tokens.
    pub token: Option<JobToken>,
}

impl TcpStoreOptions {
    /// The default timeout, no registration, no token.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self {
            host: host.into(),
            port,
            timeout: DEFAULT_TIMEOUT,
            world_size: None,
            token: None,
        }
    }
}

/// A connection to a store server: ours, or PyTorch's (libuv or legacy).
///
/// Requests are byte for byte PyTorch's. A handle whose connection broke stays broken and says
/// so in every call; [`second_handle`](Store::second_handle) makes a new connection. Calls run one
/// at a time; one that has to wait for another longer than its time limit fails with
/// [`StoreError::Timeout`].
///
/// Three things follow from the protocol: `set` and its like return before the server has the
/// value, a `get` that races a `delete_key` may return an empty value, and so does a `get` of a name
/// that only a queue has.
#[derive(Debug)]
pub struct TcpStore {
    options: TcpStoreOptions,
    timeout: Mutex<Duration>,
    connection: Mutex<Connection>,
}

impl TcpStore {
    /// Connects, retrying until the options' timeout while the server is not there yet.
    pub fn connect(options: &TcpStoreOptions) -> Result<Self> {
        let deadline = Deadline::after(options.timeout);
        let mut connection = Connection::open(options, deadline)?;
        if options.world_size.is_some() {
            let request = Request::Add {
                key: WORKERS_KEY,
                delta: 1,
            };
            connection.call("connect", &request, Shape::I64, deadline)?;
        }
        Ok(Self {
            options: options.clone(),
            timeout: Mutex::new(options.timeout),
            connection: Mutex::new(connection),
        })
    }

    /// The address of the server.
    pub fn peer_addr(&self) -> SocketAddr {
        self.connection.lock().peer()
    }

    /// The address of this end of the connection: one that reaches the server's host.
    pub fn local_addr(&self) -> Result<SocketAddr> {
        self.connection.lock().local_addr()
    }

    /// The connection, once calls of other threads are through.
    fn lock(&self, op: &'static str, deadline: Deadline) -> Result<MutexGuard<'_, Connection>> {
        self.connection
            .try_lock_until(deadline.instant())
            .ok_or_else(|| StoreError::Timeout {
                op,
                what: "another call on this handle (take a second_handle to block independently)"
                    .into(),
                waited: deadline.elapsed(),
            })
    }

    /// Sends a request that has no answer.
    fn tell(&self, op: &'static str, request: &Request<'_>) -> Result<()> {
        let deadline = Deadline::after(self.timeout());
        self.lock(op, deadline)?.send(op, request, deadline)
    }

    /// Sends a request that is answered at once.
    fn ask(&self, op: &'static str, request: &Request<'_>, shape: Shape) -> Result<Reply> {
        let deadline = Deadline::after(self.timeout());
        self.lock(op, deadline)?.call(op, request, shape, deadline)
    }

    fn ask_number(&self, op: &'static str, request: &Request<'_>) -> Result<i64> {
        match self.ask(op, request, Shape::I64)? {
            Reply::I64(number) => Ok(number),
            other => unreachable!("{other:?} is not the shape asked for"),
        }
    }

    /// Waits for `keys`, then asks.
    fn wait_and_ask(
        &self,
        op: &'static str,
        keys: &[Vec<u8>],
        request: &Request<'_>,
        shape: Shape,
        limit: Duration,
    ) -> Result<Option<Reply>> {
        let deadline = Deadline::after(limit);
        let mut connection = self.lock(op, deadline)?;
        if !connection.wait(op, &Request::Wait { keys }, deadline)? {
            return Ok(None);
        }
        // The wait may have used up the time; the answer to what exists now still has to arrive.
        let answer = Deadline::after(deadline.left().max(CANCEL_LIMIT));
        connection.call(op, request, shape, answer).map(Some)
    }

    /// After a lost connection in `add`: was it because the value is no number?
    ///
    /// The protocol has no error answers, so the server can only close. A new connection tells.
    fn explain_add(&self, key: &str, delta: i64) -> Option<StoreError> {
        let deadline = Deadline::after(CANCEL_LIMIT);
        let mut connection = Connection::open_once(&self.options, deadline).ok()?;
        let wire_key = [wire_key("add", key).ok()?];
        let present = Request::Check { keys: &wire_key };
        let Ok(Reply::Status(READY)) = connection.call("add", &present, Shape::Status, deadline)
        else {
            return None;
        };
        let get = Request::Get { key: &wire_key[0] };
        let Ok(Reply::Values(values)) = connection.call("add", &get, Shape::Values(1), deadline)
        else {
            return None;
        };
        let text = String::from_utf8_lossy(values.first()?).into_owned();
        let reason = match text.parse::<i64>() {
            Ok(old) if old.checked_add(delta).is_some() => return None,
            Ok(old) => format!("{old} + {delta} does not fit a 64-bit integer"),
            Err(_) => {
                let shown: String = text.chars().take(64).collect();
                format!("its value {shown:?} is not a decimal 64-bit integer")
            }
        };
        *self.connection.lock() = connection;
        Some(StoreError::NotAnInteger {
            key: key.to_owned(),
            reason,
        })
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let key = wire_key("set", key)?;
        self.tell(
            "set",
            &Request::Set {
                key: &key,
                value: wire_value("set", value)?,
            },
        )
    }

    fn get_for(&self, key: &str, limit: Duration) -> Result<Vec<u8>> {
        Ok(self.values("get", &[key], limit)?.pop().unwrap_or_default())
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        let wire_key = wire_key("add", key)?;
        match self.ask_number(
            "add",
            &Request::Add {
                key: &wire_key,
                delta,
            },
        ) {
            Err(lost @ StoreError::Connection { .. }) => {
                Err(self.explain_add(key, delta).unwrap_or(lost))
            }
            other => other,
        }
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let op = "compare_set";
        let key = wire_key(op, key)?;
        let (expected, desired) = (wire_value(op, expected)?, wire_value(op, desired)?);
        match self.ask(
            op,
            &Request::CompareSet {
                key: &key,
                expected,
                desired,
            },
            Shape::Values(1),
        )? {
            Reply::Values(mut values) => Ok(values.pop().unwrap_or_default()),
            other => unreachable!("{other:?} is not the shape asked for"),
        }
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let keys = wire_keys("check", keys)?;
        match self.ask("check", &Request::Check { keys: &keys }, Shape::Status)? {
            Reply::Status(status) => Ok(status == READY),
            other => unreachable!("{other:?} is not the shape asked for"),
        }
    }

    fn wait_for(&self, keys: &[&str], limit: Duration) -> Result<()> {
        let deadline = Deadline::after(limit);
        let wire_keys = wire_keys("wait", keys)?;
        let mut connection = self.lock("wait", deadline)?;
        match connection.wait("wait", &Request::Wait { keys: &wire_keys }, deadline)? {
            true => Ok(()),
            false => Err(wait_timeout("wait", keys, deadline.elapsed())),
        }
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        let key = wire_key("delete_key", key)?;
        Ok(self.ask_number("delete_key", &Request::DeleteKey { key: &key })? > 0)
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        let key = wire_key("append", key)?;
        self.tell(
            "append",
            &Request::Append {
                key: &key,
                value: wire_value("append", value)?,
            },
        )
    }

    fn multi_get_for(&self, keys: &[&str], limit: Duration) -> Result<Vec<Vec<u8>>> {
        self.values("multi_get", keys, limit)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let op = "multi_set";
        check_len(op, "number of keys", pairs.len(), MAX_LIST_LEN)?;
        let pairs = pairs
            .iter()
            .map(|(key, value)| Ok((wire_key(op, key)?, wire_value(op, value)?.to_vec())))
            .collect::<Result<Vec<_>>>()?;
        self.tell(op, &Request::MultiSet { pairs: &pairs })
    }

    fn num_keys(&self) -> Result<usize> {
        Ok(self
            .ask_number("num_keys", &Request::NumKeys)?
            .try_into()
            .unwrap_or(0))
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        let keys = match self.ask("list_keys", &Request::ListKeys, Shape::Keys)? {
            Reply::Keys(keys) => keys,
            other => unreachable!("{other:?} is not the shape asked for"),
        };
        let user_key = |key: Vec<u8>| String::from_utf8(key.strip_prefix(b"/")?.to_vec()).ok();
        Ok(keys.into_iter().filter_map(user_key).collect())
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        let op = "queue_push";
        let key = wire_key(op, key)?;
        self.tell(
            op,
            &Request::QueuePush {
                key: &key,
                value: wire_value(op, value)?,
            },
        )
    }

    fn queue_try_pop(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let key = wire_key("queue_pop", key)?;
        let pop = Request::QueuePop { key: &key };
        match self
            .ask("queue_pop", &pop, Shape::Pop)
            .map_err(perhaps_no_queues)?
        {
            Reply::Pop(value) => Ok(value),
            other => unreachable!("{other:?} is not the shape asked for"),
        }
    }

    fn queue_pop_for(&self, key: &str, limit: Duration) -> Result<Vec<u8>> {
        let op = "queue_pop";
        let deadline = Deadline::after(limit);
        let keys = [wire_key(op, key)?];
        let pop = Request::QueuePop { key: &keys[0] };
        loop {
            match self.wait_and_ask(op, &keys, &pop, Shape::Pop, deadline.left())? {
                Some(Reply::Pop(Some(value))) => return Ok(value),
                // Somebody who did not wait took the element first.
                Some(_) if !deadline.passed() => {}
                _ => return Err(wait_timeout(op, &[key], deadline.elapsed())),
            }
        }
    }

    fn queue_len(&self, key: &str) -> Result<usize> {
        let key = wire_key("queue_len", key)?;
        let request = Request::QueueLen { key: &key };
        let len = self
            .ask_number("queue_len", &request)
            .map_err(perhaps_no_queues)?;
        Ok(len.try_into().unwrap_or(0))
    }

    fn barrier_for(&self, key: &str, world_size: usize, limit: Duration) -> Result<()> {
        let deadline = Deadline::after(limit);
        let wire_key = wire_key("barrier", key)?;
        let target = i64::try_from(world_size)
            .map_err(|_| StoreError::Invalid(format!("no world has {world_size} ranks")))?;
        let request = Request::Barrier {
            key: &wire_key,
            world_size: target,
        };
        match self
            .lock("barrier", deadline)?
            .wait("barrier", &request, deadline)?
        {
            true => Ok(()),
            false => Err(barrier_timeout(key, world_size, deadline.elapsed())),
        }
    }

    fn timeout(&self) -> Duration {
        *self.timeout.lock()
    }

    fn set_timeout(&self, limit: Duration) {
        *self.timeout.lock() = limit;
    }

    fn second_handle(&self) -> Result<Arc<dyn Store>> {
        let timeout = self.timeout();
        let options = TcpStoreOptions {
            world_size: None,
            timeout,
            ..self.options.clone()
        };
        Ok(Arc::new(Self::connect(&options)?))
    }
}

impl TcpStore {
    fn values(&self, op: &'static str, keys: &[&str], limit: Duration) -> Result<Vec<Vec<u8>>> {
        let wire_keys = wire_keys(op, keys)?;
        let request = match op {
            "get" => Request::Get { key: &wire_keys[0] },
            _ => Request::MultiGet { keys: &wire_keys },
        };
        let started = Deadline::after(limit);
        match self.wait_and_ask(op, &wire_keys, &request, Shape::Values(keys.len()), limit)? {
            Some(Reply::Values(values)) => Ok(values),
            Some(other) => unreachable!("{other:?} is not the shape asked for"),
            None => Err(wait_timeout(op, keys, started.elapsed())),
        }
    }
}

/// The protocol has no error answers: a server without queues closes the connection.
fn perhaps_no_queues(err: StoreError) -> StoreError {
    match err {
        StoreError::Connection { op, peer, reason } => {
            let reason = format!("{reason} (PyTorch's legacy server has no queues)");
            StoreError::Connection { op, peer, reason }
        }
        other => other,
    }
}

fn check_len(op: &'static str, what: &'static str, got: usize, limit: usize) -> Result<()> {
    match got <= limit {
        true => Ok(()),
        false => Err(StoreError::TooLarge {
            op,
            what,
            got,
            limit,
        }),
    }
}

/// The key as it is sent: below `/`, apart from the server's own keys.
fn wire_key(op: &'static str, key: &str) -> Result<Vec<u8>> {
    check_len(op, "key length", key.len() + 1, MAX_KEY_LEN)?;
    Ok([b"/", key.as_bytes()].concat())
}

fn wire_keys(op: &'static str, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
    check_len(op, "number of keys", keys.len(), MAX_LIST_LEN)?;
    keys.iter().map(|key| wire_key(op, key)).collect()
}

fn wire_value<'a>(op: &'static str, value: &'a [u8]) -> Result<&'a [u8]> {
    check_len(op, "value length", value.len(), MAX_VALUE_LEN)?;
    Ok(value)
}
