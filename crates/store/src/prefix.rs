//! A name space inside another store.

use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::store::Store;

/// Puts `prefix/` before every key of another store, so that several users share it.
///
/// Prefixes nest: a `PrefixStore` named `p` over one named `q` uses keys `q/p/...`, as in PyTorch.
///
/// ```
/// use std::sync::Arc;
/// use phalanx_store::{HashStore, PrefixStore, Store};
///
/// let base: Arc<dyn Store> = Arc::new(HashStore::new());
/// let q = PrefixStore::new("q", Arc::clone(&base));
/// let p = PrefixStore::new("p", Arc::new(q));
/// p.set("a", b"1")?;
/// assert_eq!(base.get("q/p/a")?, b"1");
/// assert_eq!(p.list_keys()?, ["a"]);
/// # Ok::<(), phalanx_store::StoreError>(())
/// ```
#[derive(Debug, Clone)]
pub struct PrefixStore {
    /// Ends in `/`.
    prefix: String,
    inner: Arc<dyn Store>,
}

impl PrefixStore {
    /// A view of `inner` below `prefix`.
    pub fn new(prefix: impl AsRef<str>, inner: Arc<dyn Store>) -> Self {
        Self {
            prefix: format!("{}/", prefix.as_ref()),
            inner,
        }
    }

    /// The store below, whose keys carry the prefix.
    pub fn inner(&self) -> &Arc<dyn Store> {
        &self.inner
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// Calls `with` with the prefixed forms of `keys`.
    fn keys<T>(&self, keys: &[&str], with: impl FnOnce(&[&str]) -> T) -> T {
        let keys: Vec<String> = keys.iter().map(|key| self.key(key)).collect();
        with(&keys.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

impl Store for PrefixStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.set(&self.key(key), value)
    }

    fn get_for(&self, key: &str, limit: Duration) -> Result<Vec<u8>> {
        self.inner.get_for(&self.key(key), limit)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.inner.add(&self.key(key), delta)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.inner.compare_set(&self.key(key), expected, desired)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.keys(keys, |keys| self.inner.check(keys))
    }

    fn wait_for(&self, keys: &[&str], limit: Duration) -> Result<()> {
        self.keys(keys, |keys| self.inner.wait_for(keys, limit))
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        self.inner.delete_key(&self.key(key))
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.append(&self.key(key), value)
    }

    fn multi_get_for(&self, keys: &[&str], limit: Duration) -> Result<Vec<Vec<u8>>> {
        self.keys(keys, |keys| self.inner.multi_get_for(keys, limit))
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let pairs: Vec<_> = pairs
            .iter()
            .map(|(key, value)| (self.key(key), *value))
            .collect();
        self.inner.multi_set(
            &pairs
                .iter()
                .map(|(k, v)| (k.as_str(), *v))
                .collect::<Vec<_>>(),
        )
    }

    fn num_keys(&self) -> Result<usize> {
        self.inner.num_keys()
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        let keys = self.inner.list_keys()?;
        Ok(keys
            .iter()
            .filter_map(|key| key.strip_prefix(&self.prefix))
            .map(str::to_owned)
            .collect())
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.queue_push(&self.key(key), value)
    }

    fn queue_try_pop(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.inner.queue_try_pop(&self.key(key))
    }

    fn queue_pop_for(&self, key: &str, limit: Duration) -> Result<Vec<u8>> {
        self.inner.queue_pop_for(&self.key(key), limit)
    }

    fn queue_len(&self, key: &str) -> Result<usize> {
        self.inner.queue_len(&self.key(key))
    }

    // `barrier_for` stays the counting one: PyTorch's PrefixStore counts too, and both must meet.

    fn timeout(&self) -> Duration {
        self.inner.timeout()
    }

    fn set_timeout(&self, limit: Duration) {
        self.inner.set_timeout(limit);
    }

    fn second_handle(&self) -> Result<Arc<dyn Store>> {
        let inner = self.inner.second_handle()?;
        Ok(Arc::new(Self {
            prefix: self.prefix.clone(),
            inner,
        }))
    }
}
