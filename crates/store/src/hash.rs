//! A store inside one process.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::deadline::Deadline;
use crate::error::{Result, StoreError};
use crate::store::{DEFAULT_TIMEOUT, Store, wait_timeout};
use crate::table::Table;

/// A store for the threads of one process: worlds of one, tests, threads as ranks.
///
/// ```
/// use phalanx_store::{HashStore, Store};
///
/// let store = HashStore::new();
/// store.set("greeting", b"hello")?;
/// assert_eq!(store.get("greeting")?, b"hello");
/// assert_eq!(store.add("arrived", 2)?, 2);
/// # Ok::<(), phalanx_store::StoreError>(())
/// ```
#[derive(Debug)]
pub struct HashStore {
    shared: Arc<Shared>,
    timeout: Mutex<Duration>,
}

#[derive(Debug, Default)]
struct Shared {
    table: Mutex<Table>,
    changed: Condvar,
}

impl Default for HashStore {
    fn default() -> Self {
        Self::new()
    }
}

impl HashStore {
    /// An empty store.
    pub fn new() -> Self {
        Self {
            shared: Arc::default(),
            timeout: Mutex::new(DEFAULT_TIMEOUT),
        }
    }

    /// Changes the data, then wakes everyone who waits.
    fn update<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        let result = change(&mut self.shared.table.lock());
        self.shared.changed.notify_all();
        result
    }

    /// Waits until `ready` yields something.
    fn wait_until<T>(
        &self,
        limit: Duration,
        mut ready: impl FnMut(&mut Table) -> Option<T>,
        timeout: impl FnOnce(Duration) -> StoreError,
    ) -> Result<T> {
        let deadline = Deadline::after(limit);
        let mut table = self.shared.table.lock();
        loop {
            if let Some(value) = ready(&mut table) {
                return Ok(value);
            }
            if deadline.passed() {
                return Err(timeout(deadline.elapsed()));
            }
            self.shared
                .changed
                .wait_until(&mut table, deadline.instant());
        }
    }
}

impl Store for HashStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.update(|table| table.set(key.as_bytes(), value));
        Ok(())
    }

    fn get_for(&self, key: &str, limit: Duration) -> Result<Vec<u8>> {
        let ready = |table: &mut Table| table.get(key.as_bytes()).map(<[u8]>::to_vec);
        self.wait_until(limit, ready, |waited| wait_timeout("get", &[key], waited))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.update(|table| table.add(key.as_bytes(), delta))
            .map_err(|err| StoreError::NotAnInteger {
                key: key.to_owned(),
                reason: err.to_string(),
            })
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        Ok(self.update(|table| table.compare_set(key.as_bytes(), expected, desired)))
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let table = self.shared.table.lock();
        Ok(keys.iter().all(|key| table.exists(key.as_bytes())))
    }

    fn wait_for(&self, keys: &[&str], limit: Duration) -> Result<()> {
        let mut missing = keys.to_vec();
        let ready = |table: &mut Table| {
            missing.retain(|key| !table.exists(key.as_bytes()));
            missing.is_empty().then_some(())
        };
        let result = self.wait_until(limit, ready, |waited| wait_timeout("wait", keys, waited));
        result.map_err(|err| match err {
            StoreError::Timeout { waited, .. } => wait_timeout("wait", &missing, waited),
            other => other,
        })
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        Ok(self.update(|table| table.delete(key.as_bytes())))
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.update(|table| table.append(key.as_bytes(), value));
        Ok(())
    }

    fn multi_get_for(&self, keys: &[&str], limit: Duration) -> Result<Vec<Vec<u8>>> {
        let ready = |table: &mut Table| {
            keys.iter()
                .map(|key| table.get(key.as_bytes()).map(<[u8]>::to_vec))
                .collect()
        };
        self.wait_until(limit, ready, |waited| {
            wait_timeout("multi_get", keys, waited)
        })
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        self.update(|table| {
            pairs
                .iter()
                .for_each(|(key, value)| table.set(key.as_bytes(), value))
        });
        Ok(())
    }

    fn num_keys(&self) -> Result<usize> {
        Ok(self.shared.table.lock().num_keys())
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        let table = self.shared.table.lock();
        Ok(table
            .keys()
            .filter_map(|key| String::from_utf8(key.to_vec()).ok())
            .collect())
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.update(|table| table.queue_push(key.as_bytes(), value));
        Ok(())
    }

    fn queue_try_pop(&self, key: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.shared.table.lock().queue_pop(key.as_bytes()))
    }

    fn queue_pop_for(&self, key: &str, limit: Duration) -> Result<Vec<u8>> {
        let ready = |table: &mut Table| table.queue_pop(key.as_bytes());
        self.wait_until(limit, ready, |waited| {
            wait_timeout("queue_pop", &[key], waited)
        })
    }

    fn queue_len(&self, key: &str) -> Result<usize> {
        Ok(self.shared.table.lock().queue_len(key.as_bytes()))
    }

    fn timeout(&self) -> Duration {
        *self.timeout.lock()
    }

    fn set_timeout(&self, limit: Duration) {
        *self.timeout.lock() = limit;
    }

    fn second_handle(&self) -> Result<Arc<dyn Store>> {
        let timeout = Mutex::new(self.timeout());
        Ok(Arc::new(Self {
            shared: Arc::clone(&self.shared),
            timeout,
        }))
    }
}
