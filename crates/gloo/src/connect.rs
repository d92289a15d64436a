//! How ranks find each other through a store, and on which network.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use phalanx_pg::{Error, ErrorKind, Result};
use phalanx_store::{Deadline, Store, StoreError};

use crate::context::{Addresses, Device};
use crate::error::GlooError;

/// Names the network interface; PyTorch's variable.
const IFACE_VAR: &str = "GLOO_SOCKET_IFNAME";
/// Names gloo's transport; PyTorch's variable.
const TRANSPORT_VAR: &str = "GLOO_DEVICE_TRANSPORT";

/// The transports that this build can use.
const TRANSPORTS: [&str; 1] = ["TCP"];

/// How long a rank waits for an address before it looks whether that still makes sense.
const GLANCE: Duration = Duration::from_millis(100);

/// The device on the interface that the user names, or at the address that reaches the store.
pub(crate) fn device(reaches_store: Option<IpAddr>) -> Result<Arc<Device>> {
    let var = |name| std::env::var(name).ok().filter(|text| !text.is_empty());
    if let Some(wanted) = var(TRANSPORT_VAR)
        && !TRANSPORTS.contains(&wanted.to_ascii_uppercase().as_str())
    {
        return Err(Error::unsupported(format!(
            "{TRANSPORT_VAR}={wanted:?} is not here; this build has {}",
            TRANSPORTS.join(", ")
        )));
    }
    let device = match var(IFACE_VAR) {
        Some(names) if names.contains(',') => {
            return Err(Error::unsupported(format!(
                "{IFACE_VAR}={names:?} names several interfaces; one is used, name one"
            )));
        }
        Some(name) => Device::tcp(None, Some(&name)).map_err(|err| {
            let why = err.into_error();
            Error::invalid(format!("{IFACE_VAR}={name:?}: {}", why.message()))
        })?,
        None => {
            let address = reaches_store.unwrap_or(Ipv4Addr::LOCALHOST.into());
            let device = Device::tcp(Some(&address.to_string()), None);
            device.map_err(|err| err.into_error())?
        }
    };
    Ok(Arc::new(device))
}

/// The keys of one group in the store, where its members meet before gloo sees them.
pub(crate) struct Keys<'a> {
    store: &'a dyn Store,
    prefix: String,
    deadline: Deadline,
    /// Asked while waiting; what it answers ends the attempt.
    give_up: &'a dyn Fn() -> Option<Error>,
    gloo: Mutex<Gloo>,
}

/// How far gloo has come with the keys.
#[derive(Default)]
struct Gloo {
    /// The rank whose key it has asked for last, and then connects with.
    peer: Option<usize>,
    /// Why it did not get a key: our errors do not go through it.
    failed: Option<Error>,
}

impl<'a> Keys<'a> {
    pub(crate) fn new(
        store: &'a dyn Store,
        prefix: &str,
        limit: Duration,
        give_up: &'a dyn Fn() -> Option<Error>,
    ) -> Self {
        Self {
            store,
            prefix: prefix.to_owned(),
            deadline: Deadline::after(limit),
            give_up,
            gloo: Mutex::default(),
        }
    }

    /// What is left of the limit.
    pub(crate) fn left(&self) -> Duration {
        self.deadline.left()
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }

    fn here(&self, rank: usize) -> String {
        self.key(&format!("here/{rank}"))
    }

    fn gone(&self, rank: usize) -> String {
        self.key(&format!("gone/{rank}"))
    }

    /// Waits until all members are here. Gloo, which connects with one after the other, does not
    /// begin before: it would wait for each of them, and say of none which it was.
    pub(crate) fn meet(&self, rank: usize, size: usize) -> Result<()> {
        self.store.set(&self.here(rank), b"")?;
        let keys: Vec<String> = (0..size).map(|rank| self.here(rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        self.until_set(&keys, || {
            let is_set = |key: &str| self.store.check(&[key]).unwrap_or(false);
            let mut missing: Vec<usize> = (0..size).filter(|&rank| !is_set(keys[rank])).collect();
            // Some may only have given up a moment before this one, for want of the others.
            if missing.iter().any(|&rank| !is_set(&self.gone(rank))) {
                missing.retain(|&rank| !is_set(&self.gone(rank)));
            }
            missing
        })
    }

    /// Gives up: those who come later need not look for this rank.
    pub(crate) fn take_back(&self, rank: usize) {
        let said = self.store.set(&self.gone(rank), b"");
        if let Err(err) = said.and_then(|()| self.store.delete_key(&self.here(rank))) {
            tracing::debug!(target: "phalanx::gloo", "rank {rank} still seems to be here: {err}");
        }
    }

    /// Why gloo has failed to connect.
    pub(crate) fn explain(&self, err: GlooError) -> Error {
        let mut gloo = self.gloo.lock();
        let err = gloo.failed.take().unwrap_or_else(|| err.into_error());
        match gloo.peer {
            Some(peer) => err.from_peer(peer),
            None => err,
        }
    }

    fn until_set(&self, keys: &[&str], missing: impl Fn() -> Vec<usize>) -> Result<()> {
        loop {
            if let Some(err) = (self.give_up)() {
                return Err(err);
            }
            let limit = self.deadline.left().min(GLANCE);
            match self.store.wait_for(keys, limit) {
                Ok(()) => return Ok(()),
                Err(StoreError::Timeout { .. }) if !self.deadline.passed() => {}
                Err(StoreError::Timeout { .. }) => return Err(self.absent(&missing())),
                Err(err) => return Err(err.into()),
            }
        }
    }

    fn absent(&self, missing: &[usize]) -> Error {
        let did = format!(
            "did not join within {:.1} s; do all run, with the same store and members?",
            self.deadline.elapsed().as_secs_f64()
        );
        Error::of_ranks(ErrorKind::Timeout, missing, &did)
    }

    /// For gloo, which is told a text.
    fn ask<T>(&self, key: &str, answer: impl FnOnce() -> Result<T>) -> Answer<T> {
        self.gloo.lock().peer = rank_of(key);
        answer().map_err(|err| {
            let text = err.to_string();
            self.gloo.lock().failed = Some(err);
            text
        })
    }
}

type Answer<T> = std::result::Result<T, String>;

/// The rank that a key of gloo's is for: `rank_3`, `3`, `3/1`.
fn rank_of(key: &str) -> Option<usize> {
    let key = key.trim_start_matches("rank_");
    key.split('/').next()?.parse().ok()
}

impl Addresses for Keys<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Answer<()> {
        let set = self.store.set(&self.key(key), value);
        set.map_err(|err| err.to_string())
    }

    fn get(&self, key: &str) -> Answer<Vec<u8>> {
        self.wait(key)?;
        self.ask(key, || {
            let got = self.store.get_for(&self.key(key), self.deadline.left());
            got.map_err(Error::from)
        })
    }

    fn wait(&self, key: &str) -> Answer<()> {
        let missing = || rank_of(key).into_iter().collect();
        self.ask(key, || self.until_set(&[&self.key(key)], missing))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_that_a_key_is_for_is_known() {
        for (key, rank) in [("rank_3", Some(3)), ("12", Some(12)), ("4/1", Some(4))] {
            assert_eq!(rank_of(key), rank);
        }
        assert_eq!(rank_of("words"), None);
    }
}
