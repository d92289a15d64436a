//! The [`Store`] trait: the smallest thing processes need to find each other.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::error::{Result, StoreError, describe_keys};

/// Default time a blocking call waits: five minutes, as in PyTorch.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// A key-value store that processes of one job share to meet and to exchange small facts.
///
/// The operations and their meaning are those of `torch.distributed.Store`. Where PyTorch's
/// implementations differ from each other or lose a wake-up, all implementations here do the same
/// thing, which the method says.
///
/// # Threads
///
/// A handle may be used from many threads. On connections (TCP) calls of one handle run one after
/// the other, so a thread that is going to block takes its own [`second_handle`].
///
/// # Timeouts
///
/// Methods ending in `_for` take a time limit; their short forms use [`timeout`]. A limit of zero
/// looks once and does not wait. Running out of time is [`StoreError::Timeout`] and leaves the
/// handle usable.
///
/// [`second_handle`]: Store::second_handle
/// [`timeout`]: Store::timeout
pub trait Store: Send + Sync + fmt::Debug {
    /// Stores `value` under `key`, replacing what was there, and wakes everyone waiting for it.
    ///
    /// Over TCP this is not acknowledged (as in PyTorch): a lost connection shows in a later call.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits until `key` exists and returns its value. An empty value is a value.
    fn get_for(&self, key: &str, limit: Duration) -> Result<Vec<u8>>;

    /// Adds `delta` to the decimal integer stored under `key` (missing counts as 0) and returns
    /// the sum.
    ///
    /// A value that is not an integer, and a sum that does not fit `i64`, are
    /// [`StoreError::NotAnInteger`] and change nothing; the handle stays usable. (PyTorch's
    /// server drops the client, accepts trailing junk such as `12abc`, and wraps around.)
    fn add(&self, key: &str, delta: i64) -> Result<i64>;

    /// Replaces the value by `desired` if it equals `expected`; returns the value that results.
    ///
    /// A missing key is created if `expected` is empty; otherwise nothing is written and
    /// `expected` is returned. Waiters wake exactly when the key exists afterwards (PyTorch's two
    /// servers wake always and never).
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;

    /// Whether all keys exist now. A queue that is not empty counts as existing.
    fn check(&self, keys: &[&str]) -> Result<bool>;

    /// Waits until all keys exist (each at some moment during the wait).
    fn wait_for(&self, keys: &[&str], limit: Duration) -> Result<()>;

    /// Removes a key; true if it existed. Queues are not touched.
    fn delete_key(&self, key: &str) -> Result<bool>;

    /// Appends to the value under `key`, creating it if need be.
    fn append(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits for all keys under one time limit and returns their values in the order asked.
    fn multi_get_for(&self, keys: &[&str], limit: Duration) -> Result<Vec<Vec<u8>>>;

    /// Sets several keys. Takes pairs, so keys and values cannot differ in number.
    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()>;

    /// Number of keys in the whole store, queues not counted.
    ///
    /// A TCP store counts the key under which workers register with the server if a world size was
    /// given; a [`PrefixStore`](crate::PrefixStore) does not filter. Both as in PyTorch.
    fn num_keys(&self) -> Result<usize>;

    /// The user-visible keys, in no particular order.
    ///
    /// Keys that are not UTF-8 (other languages can write them) are left out.
    fn list_keys(&self) -> Result<Vec<String>>;

    /// Appends an element to the queue `key`. Queues and keys of the same name are independent.
    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Takes the oldest element of a queue if there is one.
    fn queue_try_pop(&self, key: &str) -> Result<Option<Vec<u8>>>;

    /// Takes the oldest element of a queue, waiting for one.
    ///
    /// An element goes to exactly one caller, and none is lost when a woken caller dies.
    fn queue_pop_for(&self, key: &str, limit: Duration) -> Result<Vec<u8>>;

    /// Number of elements in a queue; 0 if there is none.
    fn queue_len(&self, key: &str) -> Result<usize>;

    /// Blocks until `world_size` callers have arrived under `key`.
    ///
    /// A key serves one barrier: later arrivals pass at once. An arrival is not taken back when
    /// its caller times out. What the count is stored under differs between stores (over TCP the
    /// key itself, elsewhere keys below it, both as in PyTorch), so use the key for nothing else.
    fn barrier_for(&self, key: &str, world_size: usize, limit: Duration) -> Result<()> {
        barrier_by_counting(self, key, world_size, limit)
    }

    /// The limit that calls without one of their own use.
    fn timeout(&self) -> Duration;

    /// Changes [`timeout`](Store::timeout) for this handle.
    fn set_timeout(&self, limit: Duration);

    /// Another handle on the same data that blocks independently of this one.
    fn second_handle(&self) -> Result<Arc<dyn Store>>;

    /// [`get_for`](Store::get_for) with the handle's timeout.
    fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.get_for(key, self.timeout())
    }

    /// [`wait_for`](Store::wait_for) with the handle's timeout.
    fn wait(&self, keys: &[&str]) -> Result<()> {
        self.wait_for(keys, self.timeout())
    }

    /// [`multi_get_for`](Store::multi_get_for) with the handle's timeout.
    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        self.multi_get_for(keys, self.timeout())
    }

    /// [`queue_pop_for`](Store::queue_pop_for) with the handle's timeout.
    fn queue_pop(&self, key: &str) -> Result<Vec<u8>> {
        self.queue_pop_for(key, self.timeout())
    }

    /// [`barrier_for`](Store::barrier_for) with the handle's timeout.
    fn barrier(&self, key: &str, world_size: usize) -> Result<()> {
        self.barrier_for(key, world_size, self.timeout())
    }
}

/// The barrier that needs nothing but `add`, `set` and `wait`.
///
/// The keys are PyTorch's, so Rust and Python processes may meet in it, also below prefixes.
pub(crate) fn barrier_by_counting<S: Store + ?Sized>(
    store: &S,
    key: &str,
    world_size: usize,
    limit: Duration,
) -> Result<()> {
    let deadline = Deadline::after(limit);
    let last = format!("{key}/last_member");
    let arrived = store.add(&format!("{key}/num_members"), 1)?;
    if usize::try_from(arrived).is_ok_and(|n| n >= world_size) {
        store.set(&last, b"1")?;
    }
    store
        .wait_for(&[&last], deadline.left())
        .map_err(|err| match err {
            StoreError::Timeout { .. } => barrier_timeout(key, world_size, deadline.elapsed()),
            other => other,
        })
}

pub(crate) fn barrier_timeout(key: &str, world_size: usize, waited: Duration) -> StoreError {
    let what = format!("{world_size} arrivals at the barrier {key:?}");
    StoreError::Timeout {
        op: "barrier",
        what,
        waited,
    }
}

pub(crate) fn wait_timeout<K: AsRef<str>>(
    op: &'static str,
    keys: &[K],
    waited: Duration,
) -> StoreError {
    StoreError::Timeout {
        op,
        what: describe_keys(keys),
        waited,
    }
}
