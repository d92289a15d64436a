//! Backends by name.
//!
//! A backend is registered once under a name and found by that name ever after, so that a program
//! chooses its backend by configuration: `native`, or one per kind of memory as in
//! `cpu:native,cuda:nccl`. Custom backends register in the same way as those of this project.
//!
//! ```
//! use std::sync::Arc;
//! use phalanx_pg::registry::{self, GroupInit};
//! use phalanx_pg::FakeGroup;
//! use phalanx_store::HashStore;
//!
//! registry::register("pretend", |init: &GroupInit| {
//!     Ok(Arc::new(FakeGroup::new(init.rank, init.world_size)))
//! })?;
//! let init = GroupInit::new(Arc::new(HashStore::new()), 2, 8);
//! let group = registry::create("Pretend", &init)?;
//! assert_eq!((group.rank(), group.size()), (2, 8));
//! # Ok::<(), phalanx_pg::Error>(())
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use phalanx_store::{JobToken, PrefixStore, Store};

use crate::by_device::ByDevice;
use crate::error::{Error, Result};
use crate::group::{DEFAULT_TIMEOUT, ProcessGroup};

/// What a backend needs to know to connect to its peers.
///
/// `Send` and `Sync`, as its store is.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GroupInit {
    /// Where the ranks meet; this group's keys only.
    pub store: Arc<dyn Store>,
    /// Own rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// How long connecting, and later an operation, may take.
    pub timeout: Duration,
    /// The job's secret, if connections have to prove it.
    pub token: Option<JobToken>,
    /// This host's address that the other ranks can reach; `None` if all are on one host.
    pub bind: Option<IpAddr>,
    /// Name of the group.
    pub name: String,
}

impl GroupInit {
    /// The world, without a token and with the default timeout; change the fields as needed.
    pub fn new(store: Arc<dyn Store>, rank: usize, world_size: usize) -> Self {
        Self {
            store,
            rank,
            world_size,
            timeout: DEFAULT_TIMEOUT,
            token: None,
            bind: None,
            name: "world".into(),
        }
    }
}

/// Connects the ranks: a collective call.
pub type Factory = Arc<dyn Fn(&GroupInit) -> Result<Arc<dyn ProcessGroup>> + Send + Sync>;

/// Backends by name, in any case.
///
/// Programs use the one of the process, by [`register`] and [`create`]; this type is for those
/// who want one of their own.
///
/// # Threads
///
/// May be used from many threads; a factory runs outside the lock.
#[derive(Default)]
pub struct Registry {
    factories: RwLock<BTreeMap<String, Factory>>,
}

static PROCESS: Registry = Registry::new();

/// Makes a backend known to the process.
pub fn register<F>(name: &str, factory: F) -> Result<()>
where
    F: Fn(&GroupInit) -> Result<Arc<dyn ProcessGroup>> + Send + Sync + 'static,
{
    PROCESS.register(name, factory)
}

/// Makes the group that `selection` asks for: a backend's name, or `device:backend` pairs.
pub fn create(selection: &str, init: &GroupInit) -> Result<Arc<dyn ProcessGroup>> {
    PROCESS.create(selection, init)
}

/// The names of the backends that the process knows, sorted.
pub fn names() -> Vec<String> {
    PROCESS.names()
}

impl Registry {
    /// Without backends.
    pub const fn new() -> Self {
        Self {
            factories: RwLock::new(BTreeMap::new()),
        }
    }

    /// Makes a backend known. A name that is taken is an error.
    pub fn register<F>(&self, name: &str, factory: F) -> Result<()>
    where
        F: Fn(&GroupInit) -> Result<Arc<dyn ProcessGroup>> + Send + Sync + 'static,
    {
        let name = backend_name(name)?;
        let mut factories = self.factories.write();
        if factories.contains_key(&name) {
            let what = format!("a backend {name:?} is already registered");
            return Err(Error::invalid(what));
        }
        factories.insert(name, Arc::new(factory));
        Ok(())
    }

    /// The names of the backends, sorted.
    pub fn names(&self) -> Vec<String> {
        self.factories.read().keys().cloned().collect()
    }

    /// Makes the group that `selection` asks for.
    pub fn create(&self, selection: &str, init: &GroupInit) -> Result<Arc<dyn ProcessGroup>> {
        if init.rank >= init.world_size {
            return Err(Error::invalid(format!(
                "rank {} is not in a world of {}",
                init.rank, init.world_size
            )));
        }
        match selection.parse()? {
            Selection::One(name) => self.find(&name)?(init),
            Selection::ByDevice { cpu, cuda } => {
                // Both are looked up first: an unknown name must not leave half a group behind.
                let (cpu, cuda) = (self.find(&cpu)?, self.find(&cuda)?);
                let cpu = cpu(&below(init, "cpu"))?;
                let cuda = cuda(&below(init, "cuda"))?;
                Ok(ByDevice::new(cpu, cuda)?)
            }
        }
    }

    fn find(&self, name: &str) -> Result<Factory> {
        if let Some(factory) = self.factories.read().get(name) {
            return Ok(Arc::clone(factory));
        }
        let known = self.names();
        let known = match known.is_empty() {
            true => "none".to_owned(),
            false => known.join(", "),
        };
        Err(Error::invalid(format!(
            "no backend {name:?} is registered (known: {known}); a custom backend is registered \
             with `register`"
        )))
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Registry").field(&self.names()).finish()
    }
}

/// Two backends must not read each other's keys.
fn below(init: &GroupInit, prefix: &str) -> GroupInit {
    GroupInit {
        store: Arc::new(PrefixStore::new(prefix, Arc::clone(&init.store))),
        ..init.clone()
    }
}

/// Which backend serves which memory.
///
/// ```
/// use phalanx_pg::registry::Selection;
///
/// let one: Selection = "Native".parse()?;
/// assert_eq!(one, Selection::One("native".into()));
/// let same: Selection = "cpu:mpi,cuda:mpi".parse()?;
/// assert_eq!(same, Selection::One("mpi".into()));
/// # Ok::<(), phalanx_pg::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selection {
    /// One backend for everything.
    One(String),
    /// One for host memory, one for CUDA memory.
    ByDevice {
        /// For host memory.
        cpu: String,
        /// For CUDA memory.
        cuda: String,
    },
}

impl std::str::FromStr for Selection {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if !text.contains([':', ',']) {
            return backend_name(text).map(Self::One);
        }
        let (mut cpu, mut cuda) = (None, None);
        for pair in text.split(',') {
            let Some((device, backend)) = pair.split_once(':') else {
                return Err(Error::invalid(format!(
                    "{pair:?} in the backend selection {text:?} is not device:backend, as in \
                     \"cpu:native,cuda:nccl\""
                )));
            };
            let slot = match device.trim().to_ascii_lowercase().as_str() {
                "cpu" => &mut cpu,
                "cuda" => &mut cuda,
                _ => {
                    return Err(Error::invalid(format!(
                        "unknown device {device:?} in the backend selection {text:?}, use cpu or \
                         cuda"
                    )));
                }
            };
            if slot.replace(backend_name(backend)?).is_some() {
                return Err(Error::invalid(format!(
                    "duplicate device {device:?} in the backend selection {text:?}"
                )));
            }
        }
        match (cpu, cuda) {
            (Some(cpu), Some(cuda)) if cpu != cuda => Ok(Self::ByDevice { cpu, cuda }),
            (cpu, cuda) => Ok(Self::One(cpu.or(cuda).expect("a pair was read"))),
        }
    }
}

fn backend_name(name: &str) -> Result<String> {
    let name = name.trim();
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    match !name.is_empty() && name.chars().all(plain) {
        true => Ok(name.to_ascii_lowercase()),
        false => Err(Error::invalid(format!(
            "{name:?} is not a backend's name: letters, digits, '_', '-' and '.'"
        ))),
    }
}
