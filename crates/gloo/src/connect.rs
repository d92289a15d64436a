//! How ranks find each other through a store, and on which network.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use phalanx_pg::{Error, Result};
use phalanx_store::{Deadline, Store, StoreError};

use crate::context::{Addresses, Device};

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

/// The keys of one group in the store, as gloo sees them.
pub(crate) struct Keys<'a> {
    pub(crate) store: &'a dyn Store,
    pub(crate) prefix: String,
    pub(crate) deadline: Deadline,
    /// Asked while waiting; what it answers ends the attempt.
    pub(crate) give_up: &'a dyn Fn() -> Option<Error>,
}

impl Keys<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }
}

/// The rank that a key of gloo's is for: `rank_3`, `3`, `3/1`.
fn rank_of(key: &str) -> Option<usize> {
    let key = key.trim_start_matches("rank_");
    key.split('/').next()?.parse().ok()
}

impl Addresses for Keys<'_> {
    fn set(&self, key: &str, value: &[u8]) -> std::result::Result<(), String> {
        let set = self.store.set(&self.key(key), value);
        set.map_err(|err| err.to_string())
    }

    fn get(&self, key: &str) -> std::result::Result<Vec<u8>, String> {
        self.wait(key)?;
        let got = self.store.get_for(&self.key(key), self.deadline.left());
        got.map_err(|err| err.to_string())
    }

    fn wait(&self, key: &str) -> std::result::Result<(), String> {
        let full = self.key(key);
        loop {
            if let Some(err) = (self.give_up)() {
                return Err(err.to_string());
            }
            if self.deadline.passed() {
                let who = match rank_of(key) {
                    Some(rank) => format!("rank {rank}"),
                    None => format!("the key {key:?}"),
                };
                return Err(format!(
                    "{who} did not join within {:.1} s; is it started, with the same store and \
                     members?",
                    self.deadline.elapsed().as_secs_f64()
                ));
            }
            match self
                .store
                .wait_for(&[&full], self.deadline.left().min(GLANCE))
            {
                Ok(()) => return Ok(()),
                Err(StoreError::Timeout { .. }) => {}
                Err(err) => return Err(err.to_string()),
            }
        }
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
