//! A store in a file that the processes of a job share, Rust and Python alike.

mod disk;
mod log;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use self::disk::{Disk, Lock, is_gone, lock_timeout};
use self::log::{Change, Replica, TooLarge};
use crate::deadline::Deadline;
use crate::error::{Result, StoreError};
use crate::store::{DEFAULT_TIMEOUT, Store, wait_timeout};
use crate::table::Table;

const FIRST_POLL_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_POLL_PAUSE: Duration = Duration::from_millis(10);
/// A call that may not wait for a key still waits this long for a lock: others hold it for the
/// length of one write, which is no reason to fail.
const LOCK_GRACE: Duration = Duration::from_millis(100);
/// Longest wait for the lock when a handle is dropped.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);
/// Largest sum of records that one call may write.
const MAX_UPDATE_LEN: usize = 1 << 30;

/// A store in a file: for processes of one user on one host, or on hosts that share a file system
/// on which `flock` works.
///
/// The file is PyTorch's: `torch.distributed.FileStore` on the same path sees the same keys, at
/// the same time. Whatever a call has acknowledged survives the death of any process, though not
/// that of the machine. Every update appends to the file and nothing ever shrinks it, so this is
/// a place to meet, not a database.
///
/// The path should be new for every job: a file left behind by a job that was killed still has its
/// keys. The last user removes the file if everyone gives the world size.
///
/// # Differences from PyTorch
///
/// - `delete_key` says whether the key existed (there: always true); `num_keys` and `list_keys`
///   leave out the bookkeeping keys; time limits below a second are kept; queues work, between
///   Rust processes; `append` of the very bytes that the key holds is not lost.
/// - The file is created for its owner alone (mode 0600, there 0644). A symbolic link, another
///   user's file, or one with a second name is refused (there: followed and used).
/// - Waiting for the file's lock ends with the time limit (there: never).
/// - A record that a dying writer left half written is ignored and repaired. A PyTorch process
///   that meets it first hangs with the lock in its hands; the calls here then time out, naming
///   the lock.
/// - A [`second_handle`](Store::second_handle) does not count as a member of the world (there: a
///   clone does, so that a file may be removed before everyone has opened it).
/// - A file that is replaced or emptied while it is in use is an error (there: old and new data
///   are mixed).
///
/// ```
/// use phalanx_store::{FileStore, Store};
///
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("meet");
/// let store = FileStore::open(&path, Some(1))?;
/// store.set("greeting", b"hello")?;
/// assert_eq!(store.get("greeting")?, b"hello");
/// drop(store);
/// assert!(!path.exists());
/// # Ok::<(), phalanx_store::StoreError>(())
/// ```
pub struct FileStore {
    shared: Arc<Shared>,
    timeout: Mutex<Duration>,
}

/// What the handles of one process share; dropping it closes the file for this process.
#[derive(Debug)]
struct Shared {
    disk: Disk,
    replica: Mutex<Replica>,
    world_size: Option<usize>,
}

impl fmt::Debug for FileStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileStore")
            .field("path", &self.path())
            .field("world_size", &self.shared.world_size)
            .field("timeout", &self.timeout())
            .finish_non_exhaustive()
    }
}

impl FileStore {
    /// Opens or creates the store at `path`.
    ///
    /// With a `world_size` the file is removed when that many members have closed it and none has
    /// it open; without one it stays.
    pub fn open(path: impl AsRef<Path>, world_size: Option<usize>) -> Result<Self> {
        Self::open_for(path, world_size, DEFAULT_TIMEOUT)
    }

    /// [`open`](FileStore::open) with a time limit, which becomes the handle's timeout.
    pub fn open_for(
        path: impl AsRef<Path>,
        world_size: Option<usize>,
        limit: Duration,
    ) -> Result<Self> {
        let deadline = lock_deadline(limit);
        Ok(Self {
            shared: Arc::new(Shared::open(path.as_ref(), world_size, &deadline)?),
            timeout: Mutex::new(limit),
        })
    }

    /// Where the store is.
    pub fn path(&self) -> &Path {
        self.shared.disk.path()
    }

    /// Looks at the data as it is now.
    fn look<T>(
        &self,
        op: &'static str,
        deadline: &Deadline,
        view: impl FnOnce(&Table) -> T,
    ) -> Result<T> {
        let mut replica = self.shared.replica(op, deadline)?;
        let file = self.shared.disk.reopen()?;
        // No lock for seeing that nothing happened: the file is longer than what was read exactly
        // when there is something to read.
        if file.size()? != replica.offset {
            let file = file.lock(Lock::Shared, op, deadline)?;
            file.catch_up(&mut replica)?;
        }
        Ok(view(&replica.table))
    }

    /// Looks at the data under the handle's timeout.
    fn look_now<T>(&self, op: &'static str, view: impl FnOnce(&Table) -> T) -> Result<T> {
        self.look(op, &lock_deadline(self.timeout()), view)
    }

    /// Runs `change` on the newest data and writes the records it asks for.
    fn update<T>(
        &self,
        op: &'static str,
        limit: Duration,
        change: impl FnOnce(&Table, &mut Records) -> Result<T>,
    ) -> Result<T> {
        let deadline = lock_deadline(limit);
        let mut replica = self.shared.replica(op, &deadline)?;
        let file = self.shared.disk.reopen()?;
        let file = file.lock(Lock::Exclusive, op, &deadline)?;
        file.catch_up(&mut replica)?;
        let mut records = Records::new(op);
        let result = change(&replica.table, &mut records)?;
        if !records.bytes.is_empty() {
            file.append(&mut replica, &records.bytes)?;
        }
        Ok(result)
    }

    /// Runs a rule of [`Table`] on a copy of one key and records what came of it.
    fn update_key<T>(
        &self,
        op: &'static str,
        key: &str,
        rule: impl FnOnce(&mut Table) -> Result<T>,
    ) -> Result<T> {
        let key = key.as_bytes();
        self.update(op, self.timeout(), |table, records| {
            let mut copy = Table::default();
            if let Some(value) = table.get(key) {
                copy.set(key, value);
            }
            let result = rule(&mut copy)?;
            match copy.get(key) {
                Some(value) if table.get(key) != Some(value) => {
                    records.add(Change::Set { key, value })?;
                }
                _ => {}
            }
            Ok(result)
        })
    }

    /// Repeats `attempt` until it yields something or time is up.
    fn poll<T>(
        &self,
        limit: Duration,
        mut attempt: impl FnMut(&Deadline) -> Result<Option<T>>,
    ) -> Result<Result<T, Duration>> {
        let deadline = Deadline::after(limit);
        let mut pause = FIRST_POLL_PAUSE;
        loop {
            if let Some(value) = attempt(&lock_deadline(deadline.left()))? {
                return Ok(Ok(value));
            }
            if deadline.passed() {
                return Ok(Err(deadline.elapsed()));
            }
            std::thread::sleep(pause.min(deadline.left()));
            pause = (pause * 3 / 2).min(LONGEST_POLL_PAUSE);
        }
    }

    fn pop(&self, op: &'static str, key: &str, limit: Duration) -> Result<Option<Vec<u8>>> {
        let queue = key.as_bytes();
        self.update(op, limit, |table, records| {
            let oldest = table.queue_front(queue).map(<[u8]>::to_vec);
            if oldest.is_some() {
                records.add(Change::Pop { queue })?;
            }
            Ok(oldest)
        })
    }
}

impl Shared {
    fn open(path: &Path, world_size: Option<usize>, deadline: &Deadline) -> Result<Self> {
        loop {
            let disk = Disk::create(path)?;
            let replica = match sign_on(&disk, deadline) {
                Ok(replica) => Mutex::new(replica),
                // After we opened it the last user of an older job took the file away.
                Err(err) if is_gone(&err) && !deadline.passed() => continue,
                Err(err) => return Err(err),
            };
            return Ok(Self {
                disk,
                replica,
                world_size,
            });
        }
    }

    fn replica(&self, op: &'static str, deadline: &Deadline) -> Result<MutexGuard<'_, Replica>> {
        self.replica
            .try_lock_until(deadline.instant())
            .ok_or_else(|| lock_timeout(op, self.disk.path(), deadline))
    }

    /// Signs off and, as the last one, removes the file. One lock for both, so that a newcomer
    /// finds either a file with us in it or none.
    fn close(&self) -> Result<()> {
        let deadline = Deadline::after(CLOSE_LIMIT);
        let mut replica = self.replica("close", &deadline)?;
        let file = self.disk.reopen()?;
        let file = file.lock(Lock::Exclusive, "close", &deadline)?;
        file.catch_up(&mut replica)?;
        let closed = replica.closed.saturating_add(1);
        let opened = replica.opened.saturating_sub(1);
        let mut records = Records::new("close");
        records.add(Change::Closed { handles: closed })?;
        records.add(Change::Opened { handles: opened })?;
        file.append(&mut replica, &records.bytes)?;
        let all_came = self
            .world_size
            .is_some_and(|world| usize::try_from(closed).is_ok_and(|closed| closed >= world));
        match all_came && opened <= 0 {
            true => file.remove(),
            false => Ok(()),
        }
    }
}

fn sign_on(disk: &Disk, deadline: &Deadline) -> Result<Replica> {
    let file = disk.reopen()?.lock(Lock::Exclusive, "open", deadline)?;
    let mut replica = Replica::default();
    file.catch_up(&mut replica)?;
    let mut records = Records::new("open");
    let handles = replica.opened.saturating_add(1);
    records.add(Change::Opened { handles })?;
    file.append(&mut replica, &records.bytes)?;
    Ok(replica)
}

impl Drop for Shared {
    fn drop(&mut self) {
        match self.close() {
            Ok(()) => {}
            // Someone cleaned up already, with the directory for example.
            Err(err) if is_gone(&err) => {}
            Err(err) => tracing::warn!(%err, "could not sign off from a store file"),
        }
    }
}

/// The records of one update.
struct Records {
    op: &'static str,
    bytes: Vec<u8>,
}

impl Records {
    fn new(op: &'static str) -> Self {
        let bytes = Vec::new();
        Self { op, bytes }
    }

    fn add(&mut self, change: Change<'_>) -> Result<()> {
        let fits = match log::encode(change, &mut self.bytes) {
            Ok(()) if self.bytes.len() > MAX_UPDATE_LEN => Err(TooLarge {
                what: "update",
                got: self.bytes.len(),
                limit: MAX_UPDATE_LEN,
            }),
            other => other,
        };
        fits.map_err(|TooLarge { what, got, limit }| StoreError::TooLarge {
            op: self.op,
            what,
            got,
            limit,
        })
    }
}

fn lock_deadline(limit: Duration) -> Deadline {
    Deadline::after(limit.max(LOCK_GRACE))
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.update("set", self.timeout(), |_, records| {
            let key = key.as_bytes();
            records.add(Change::Set { key, value })
        })
    }

    fn get_for(&self, key: &str, limit: Duration) -> Result<Vec<u8>> {
        self.poll(limit, |deadline| {
            self.look("get", deadline, |table| {
                table.get(key.as_bytes()).map(<[u8]>::to_vec)
            })
        })?
        .map_err(|waited| wait_timeout("get", &[key], waited))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.update_key("add", key, |table| {
            let sum = table.add(key.as_bytes(), delta);
            sum.map_err(|err| StoreError::NotAnInteger {
                key: key.to_owned(),
                reason: err.to_string(),
            })
        })
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.update_key("compare_set", key, |table| {
            Ok(table.compare_set(key.as_bytes(), expected, desired))
        })
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.look_now("check", |table| {
            keys.iter().all(|key| table.exists(key.as_bytes()))
        })
    }

    fn wait_for(&self, keys: &[&str], limit: Duration) -> Result<()> {
        let mut missing = keys.to_vec();
        self.poll(limit, |deadline| {
            self.look("wait", deadline, |table| {
                missing.retain(|key| !table.exists(key.as_bytes()));
            })?;
            Ok(missing.is_empty().then_some(()))
        })?
        .map_err(|waited| wait_timeout("wait", &missing, waited))
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        let key = key.as_bytes();
        self.update("delete_key", self.timeout(), |table, records| {
            let existed = table.get(key).is_some();
            if existed {
                records.add(Change::Delete { key })?;
            }
            Ok(existed)
        })
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.update_key("append", key, |table| {
            table.append(key.as_bytes(), value);
            Ok(())
        })
    }

    fn multi_get_for(&self, keys: &[&str], limit: Duration) -> Result<Vec<Vec<u8>>> {
        self.poll(limit, |deadline| {
            self.look("multi_get", deadline, |table| {
                let value = |key: &&str| table.get(key.as_bytes()).map(<[u8]>::to_vec);
                keys.iter().map(value).collect()
            })
        })?
        .map_err(|waited| wait_timeout("multi_get", keys, waited))
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        self.update("multi_set", self.timeout(), |_, records| {
            pairs.iter().try_for_each(|(key, value)| {
                let key = key.as_bytes();
                records.add(Change::Set { key, value })
            })
        })
    }

    fn num_keys(&self) -> Result<usize> {
        self.look_now("num_keys", Table::num_keys)
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        self.look_now("list_keys", |table| {
            let text = |key: &[u8]| String::from_utf8(key.to_vec()).ok();
            table.keys().filter_map(text).collect()
        })
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.update("queue_push", self.timeout(), |_, records| {
            let queue = key.as_bytes();
            records.add(Change::Push { queue, value })
        })
    }

    fn queue_try_pop(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.pop("queue_pop", key, self.timeout())
    }

    fn queue_pop_for(&self, key: &str, limit: Duration) -> Result<Vec<u8>> {
        self.poll(limit, |deadline| {
            let len = |table: &Table| table.queue_len(key.as_bytes());
            match self.look("queue_pop", deadline, len)? {
                0 => Ok(None),
                _ => self.pop("queue_pop", key, deadline.left()),
            }
        })?
        .map_err(|waited| wait_timeout("queue_pop", &[key], waited))
    }

    fn queue_len(&self, key: &str) -> Result<usize> {
        self.look_now("queue_len", |table| table.queue_len(key.as_bytes()))
    }

    fn timeout(&self) -> Duration {
        *self.timeout.lock()
    }

    fn set_timeout(&self, limit: Duration) {
        *self.timeout.lock() = limit;
    }

    fn second_handle(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(Self {
            shared: Arc::clone(&self.shared),
            timeout: Mutex::new(self.timeout()),
        }))
    }
}
