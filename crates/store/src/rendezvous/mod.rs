//! How the ranks of a job meet: from what a launcher said to a store that all of them share.
//!
//! ```no_run
//! use phalanx_store::rendezvous;
//!
//! let meeting = rendezvous::from_env()?;
//! meeting.store.set(&format!("hello/{}", meeting.rank()), b"here")?;
//! meeting.leave()?;
//! # Ok::<(), phalanx_store::StoreError>(())
//! ```
//!
//! | started by | where the ranks meet |
//! |---|---|
//! | nothing | in the process itself, a world of one |
//! | `torchrun` | the store of its agent |
//! | `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` by hand | a store that rank 0 serves at that address |
//! | `mpirun`, `mpiexec`, `srun` on one host | a file named after the job, in a directory private to the user |
//! | `srun` on several hosts | a store that rank 0 serves on the first host of the node list |
//! | `mpirun`, `mpiexec` on several hosts | as by hand: `MASTER_ADDR` and `MASTER_PORT` are needed |
//!
//! Not done yet: SLURM's heterogeneous jobs, PMIx launchers that are neither Open MPI nor SLURM.

mod env;
mod host;
mod meet;
mod mpi;
mod nodelist;
mod open;
mod slurm;
mod timeout;
mod url;
mod vars;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

pub use env::{JobKey, Launcher, LauncherEnv, MeetingPoint};
pub use timeout::Timeouts;

use self::meet::NotMet;
use self::open::Place;
use self::vars::{Lookup, Vars, shown};
use crate::deadline::Deadline;
use crate::error::{Result, StoreError};
use crate::prefix::PrefixStore;
use crate::store::Store;
use crate::tcp::TcpStoreServer;
use crate::token::JobToken;

/// Where the store that rank 0 serves listens, if not at `MASTER_ADDR`.
const BIND_VAR: &str = "PHALANX_STORE_BIND";

/// How long a rank waits before it looks again whether the place of its meeting is there.
const COME_BACK: Duration = Duration::from_millis(10);

/// What a meeting needs beside the place: how long to wait, and whom to let in.
#[derive(Debug, Clone, Default)]
pub struct RendezvousOptions {
    /// How long to wait for the other ranks.
    pub timeouts: Timeouts,
    /// Proved to the store's server, and asked of clients if rank 0 serves it.
    pub token: Option<JobToken>,
    /// The address on which rank 0 serves. Without it, what `MASTER_ADDR` means on that host.
    pub bind: Option<IpAddr>,
}

impl RendezvousOptions {
    /// `PHALANX_TIMEOUT`, `PHALANX_TOKEN` and `PHALANX_STORE_BIND`.
    pub fn from_env() -> Result<Self> {
        Ok(Self {
            token: JobToken::from_env()?,
            timeouts: Timeouts::from_env()?,
            bind: bind_address(&vars::from_process)?,
        })
    }
}

fn bind_address(lookup: Lookup<'_>) -> Result<Option<IpAddr>> {
    let Some(text) = Vars::new(lookup).text(BIND_VAR) else {
        return Ok(None);
    };
    text.parse().map(Some).map_err(|_| {
        StoreError::Invalid(format!(
            "{BIND_VAR}={} is not an IP address; write the address of this host on which the \
             other ranks reach it, or 0.0.0.0 for all",
            shown(&text)
        ))
    })
}

/// All ranks are there, and this is what they share.
///
/// Keep it as long as any rank uses the store: the rank that serves it stops when this is dropped.
#[derive(Debug)]
pub struct Rendezvous {
    /// The store, below a prefix that no other job, attempt or round uses.
    pub store: Arc<dyn Store>,
    /// The same store without the prefix, for keys that other programs (PyTorch) know.
    pub base: Arc<dyn Store>,
    /// Who this process is.
    pub env: LauncherEnv,
    /// How long to wait, for what is built on this.
    pub timeouts: Timeouts,
    local_ip: Option<IpAddr>,
    // Last, so that the handles above are closed when it stops.
    server: Option<TcpStoreServer>,
}

impl Rendezvous {
    /// This process's number, below [`world_size`](Self::world_size).
    pub fn rank(&self) -> usize {
        self.env.rank
    }

    /// Number of processes that have met.
    pub fn world_size(&self) -> usize {
        self.env.world_size
    }

    /// Ends the use of the store so that nobody loses it while still needing it: the rank that
    /// serves it waits until all have called this, the others do not wait.
    ///
    /// Without this, the first process to end may take the store away from the others, who then
    /// see a lost connection instead of an orderly end.
    pub fn leave(self) -> Result<()> {
        let everyone = i64::try_from(self.world_size()).unwrap_or(i64::MAX);
        let (count, all) = ("left/count", "left/all");
        if self.store.add(count, 1)? >= everyone {
            self.store.set(all, b"")?;
        }
        if self.server.is_none() {
            return Ok(());
        }
        self.store.wait(&[all]).map_err(|err| match err {
            StoreError::Timeout { .. } => StoreError::Rendezvous(format!(
                "{} of {everyone} ranks did not leave within {}",
                everyone - self.store.add(count, 0).unwrap_or(0),
                meet::time_text(self.timeouts.store())
            )),
            other => other,
        })
    }

    /// This host's address on the network that leads to the store: where peers can reach it.
    /// `None` if the ranks meet in a file or in the process, and so on one host.
    pub fn local_ip(&self) -> Option<IpAddr> {
        self.local_ip
    }

    /// Where this process serves the store, if it does.
    pub fn serves_at(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(TcpStoreServer::local_addr)
    }
}

/// Meets as the environment says. This is what a training program calls.
pub fn from_env() -> Result<Rendezvous> {
    let options = RendezvousOptions::from_env()?;
    join(LauncherEnv::from_env()?, &options)
}

/// Meets as a URL says: `tcp://host:port?rank=0&world_size=2`, `file:///path?...` or `env://`.
///
/// `rank` and `world_size` may be given in the URL or as arguments, not both. Under `tcp://`
/// rank 0 serves the store.
pub fn from_url(
    url: &str,
    rank: Option<usize>,
    world_size: Option<usize>,
    options: &RendezvousOptions,
) -> Result<Rendezvous> {
    let env = url::parse(url, rank, world_size, &vars::from_process)?;
    join(env, options)
}

/// Meets as `env` says.
///
/// Returns when all ranks are there. If one does not come in time, if two come with the same rank
/// or if they disagree about the world size, every rank that did come gets the same error.
pub fn join(env: LauncherEnv, options: &RendezvousOptions) -> Result<Rendezvous> {
    if env.launcher == Launcher::None {
        tracing::warn!(
            "no launcher variables are set: this process is a world of one; to train with others, \
             start with torchrun, mpirun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR and \
             MASTER_PORT"
        );
    }
    let (place, prefix) = meet_somewhere(&env, options)?;
    tracing::debug!(rank = env.rank, world_size = env.world_size, %prefix, "all ranks have met");
    Ok(Rendezvous {
        store: Arc::new(PrefixStore::new(prefix, Arc::clone(&place.store))),
        base: place.store,
        env,
        timeouts: options.timeouts,
        local_ip: place.local_ip,
        server: place.server,
    })
}

/// Goes where the ranks meet, as often as it takes to find the place of this meeting.
///
/// A rank that ended its group and begins the next may come back to the same address before rank 0
/// has closed the store of the group before.
fn meet_somewhere(env: &LauncherEnv, options: &RendezvousOptions) -> Result<(Place, String)> {
    let deadline = Deadline::after(options.timeouts.store());
    loop {
        match meet_once(env, options, deadline) {
            Ok(met) => return Ok(met),
            Err(NotMet::Failed(err)) => return Err(err),
            Err(NotMet::Elsewhere(err)) if deadline.passed() => return Err(err),
            Err(NotMet::Elsewhere(err)) => tracing::debug!("not the place of this meeting: {err}"),
        }
        std::thread::sleep(COME_BACK.min(deadline.left()));
    }
}

fn meet_once(
    env: &LauncherEnv,
    options: &RendezvousOptions,
    deadline: Deadline,
) -> Result<(Place, String), NotMet> {
    let place = open::open(env, options, deadline)?;
    let guest = meet::Guest {
        rank: env.rank,
        world_size: env.world_size,
        attempt: env.restart_count,
        run_id: env.run_id.clone(),
        who: host::Identity::mine(),
        limit: options.timeouts.store(),
        fresh_store: place.fresh,
        serves: place.server.is_some(),
        shared: place.shared,
    };
    let prefix = meet::meet(&place.store, &guest, deadline)?;
    Ok((place, prefix))
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
