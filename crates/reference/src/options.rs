//! How to set up a group.

use std::net::IpAddr;
use std::time::Duration;

use phalanx_pg::{DEFAULT_TIMEOUT, Result};
use phalanx_store::{JobToken, TcpStore};

/// What can be chosen about a group. The same on all ranks, but for `bind`.
///
/// ```
/// use std::time::Duration;
/// use phalanx_reference::Options;
///
/// let options = Options {
///     timeout: Duration::from_secs(10),
///     ..Options::default()
/// };
/// # assert_eq!(options.name, "world");
/// ```
#[derive(Debug, Clone)]
pub struct Options {
    /// Name of the group, which keeps it apart from others in the same store.
    pub name: String,
    /// How long operations without a timeout of their own may take.
    pub timeout: Duration,
    /// How long ranks wait for each other when a group is formed; never longer than `timeout`.
    pub connect_timeout: Duration,
    /// The address to listen on, which the other ranks must be able to reach; `None` is the
    /// loopback address, for groups on one host. [`beside`](Options::beside) finds it.
    pub bind: Option<IpAddr>,
    /// Proved to each other by all ranks if given.
    pub token: Option<JobToken>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "world".into(),
            timeout: DEFAULT_TIMEOUT,
            connect_timeout: phalanx_store::DEFAULT_TIMEOUT,
            bind: None,
            token: None,
        }
    }
}

impl Options {
    /// Listens where the store can be reached from: right for ranks on several hosts.
    pub fn beside(store: &TcpStore) -> Result<Self> {
        Ok(Self {
            bind: Some(store.local_addr()?.ip()),
            ..Self::default()
        })
    }
}
