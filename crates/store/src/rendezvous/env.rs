//! What the launcher told this process: variables in, plain data out.

use super::vars::{self, Lookup, Vars, shown};
use super::{mpi, slurm};
use crate::error::Result;

/// More ranks than any job has; a larger number is a typing error that would cost memory.
pub(super) const MAX_WORLD_SIZE: usize = 1_000_000;

/// Who this process is among its peers, as its launcher says.
///
/// The same binary runs under every launcher: the variables are looked for in the order of
/// [`Launcher`], and the first launcher that gives a rank is believed. What a launcher does not
/// say is `None`.
///
/// ```
/// use phalanx_store::rendezvous::{LauncherEnv, Launcher, MeetingPoint};
///
/// let variables = |name: &str| match name {
///     "RANK" => Some("1".to_owned()),
///     "WORLD_SIZE" => Some("2".to_owned()),
///     "MASTER_ADDR" => Some("node1".to_owned()),
///     "MASTER_PORT" => Some("29500".to_owned()),
///     _ => None,
/// };
/// let env = LauncherEnv::from_lookup(&variables)?;
/// assert_eq!((env.rank, env.world_size), (1, 2));
/// assert_eq!(env.launcher, Launcher::Variables);
/// let point = MeetingPoint::Tcp { host: "node1".to_owned(), port: 29500, agent_hosted: false };
/// assert_eq!(env.meeting, point);
/// # Ok::<(), phalanx_store::StoreError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LauncherEnv {
    /// This process's number, below `world_size`.
    pub rank: usize,
    /// Number of processes in the job.
    pub world_size: usize,
    /// This process's number on its host; what one chooses a device by.
    pub local_rank: Option<usize>,
    /// Number of the job's processes on this host.
    pub local_world_size: Option<usize>,
    /// This host's number.
    pub node_rank: Option<usize>,
    /// Number of hosts.
    pub num_nodes: Option<usize>,
    /// How often the job was restarted, as far as this process's launcher counted.
    pub restart_count: usize,
    /// What the launcher calls this job.
    pub run_id: Option<String>,
    /// Where all this comes from.
    pub launcher: Launcher,
    /// Where the ranks find each other.
    pub meeting: MeetingPoint,
}

/// Who started this process, in the order in which they are looked for.
///
/// `torchrun` inside a SLURM job sets `RANK`, which is why that comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// `torchrun`, or another that sets `TORCHELASTIC_RUN_ID`.
    Torchrun,
    /// `RANK` and `WORLD_SIZE`, set by a person, a script or another launcher.
    Variables,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// MPICH's or Intel MPI's `mpiexec` (Hydra).
    Mpich,
    /// SLURM's `srun`.
    Slurm,
    /// A rendezvous URL that says everything itself.
    Url,
    /// Nobody: a world of one.
    None,
}

/// Where the ranks of a job find each other.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MeetingPoint {
    /// Nowhere: there is one rank.
    Alone,
    /// A TCP store.
    Tcp {
        /// Host name or address.
        host: String,
        /// Its port.
        port: u16,
        /// The launcher serves the store, so that every rank is a client; otherwise rank 0 serves.
        agent_hosted: bool,
    },
    /// A file in a directory private to the user, for ranks that all run on this host.
    LocalFile {
        /// Tells this job from every other one of the user.
        job: JobKey,
    },
    /// A file that the user chose.
    File {
        /// Its path.
        path: std::path::PathBuf,
    },
}

/// What tells a job from all others of its user on one host, today and after a crash.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum JobKey {
    /// A name that the launcher made unique.
    Named(String),
    /// The launcher gives no such name. The job is told by the process that started the ranks:
    /// the nearest ancestor of this process whose environment lacks `variable`.
    StartedBy {
        /// A variable that the launcher sets for ranks only.
        variable: &'static str,
        /// What is known besides; may be empty, may occur again in a later job.
        name: String,
    },
}

impl LauncherEnv {
    /// What the environment of this process says.
    ///
    /// Without any launcher variable this is a world of one. With any, it is strict: each one that
    /// is missing or cannot be used is named in the error, all of them at once.
    pub fn from_env() -> Result<Self> {
        Self::from_lookup(&vars::from_process)
    }

    /// The same with variables from elsewhere.
    pub fn from_lookup(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        detect(lookup)
    }

    /// A world of one.
    pub fn alone() -> Self {
        Self {
            rank: 0,
            world_size: 1,
            local_rank: Some(0),
            local_world_size: Some(1),
            node_rank: Some(0),
            num_nodes: Some(1),
            restart_count: 0,
            run_id: None,
            launcher: Launcher::None,
            meeting: MeetingPoint::Alone,
        }
    }
}

fn detect(lookup: Lookup<'_>) -> Result<LauncherEnv> {
    let vars = Vars::new(lookup);
    let env = if vars.is_set("RANK") {
        by_rank(&vars)
    } else if vars.is_set(mpi::OPEN_MPI.rank) || vars.is_set(mpi::OPEN_MPI.world_size) {
        mpi::open_mpi(&vars)
    } else if (vars.is_set(mpi::MPICH.rank) || vars.is_set(mpi::MPICH.world_size))
        && !slurm::gave_pmi(&vars)
    {
        mpi::mpich(&vars)
    } else if vars.is_set(slurm::RANK) {
        slurm::task(&vars)
    } else if TORCH_STYLE.iter().any(|name| vars.is_set(name)) {
        by_rank(&vars)
    } else {
        Some(LauncherEnv::alone())
    };
    if let Some(env) = &env {
        agree_with_world_size(&vars, env);
    }
    vars.finish(env)
}

/// Variables that mean "a launcher was here" even when the rank is missing.
const TORCH_STYLE: [&str; 8] = [
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
];

const BY_RANK: Names = Names {
    rank: "RANK",
    rank_hint: "set it to this process's number, 0 to WORLD_SIZE-1, or start with torchrun, mpirun \
                or srun",
    world_size: "WORLD_SIZE",
    world_size_hint: "set it to the number of processes, the same for all",
    local_rank: "LOCAL_RANK",
    local_world_size: Some("LOCAL_WORLD_SIZE"),
};

/// `RANK` and its companions, as torchrun sets them and people write them.
fn by_rank(vars: &Vars<'_>) -> Option<LauncherEnv> {
    let sizes = BY_RANK.read(vars);
    let count = 0..=MAX_WORLD_SIZE;
    let node_rank = vars.number("GROUP_RANK", count.clone(), "torchrun sets it");
    let num_nodes = vars.number("GROUP_WORLD_SIZE", 1..=MAX_WORLD_SIZE, "torchrun sets it");
    let named = ("GROUP_RANK", node_rank);
    below(vars, named, ("GROUP_WORLD_SIZE", num_nodes));
    let restarts = "TORCHELASTIC_RESTART_COUNT";
    let restart_count = vars.number(restarts, count, "unset it, or set it to 0");
    let run_id = vars.text("TORCHELASTIC_RUN_ID");
    // Exactly this text, as PyTorch compares it.
    let agent_hosted = vars.text("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
    let (host, port) = (need_master_addr(vars, ADDR_HINT), need_master_port(vars));
    let sizes = sizes?;
    Some(LauncherEnv {
        node_rank,
        num_nodes,
        restart_count: restart_count.unwrap_or(0),
        launcher: match run_id {
            Some(_) => Launcher::Torchrun,
            None => Launcher::Variables,
        },
        run_id,
        meeting: MeetingPoint::Tcp {
            host: host?,
            port: port?,
            agent_hosted,
        },
        ..sizes
    })
}

/// Under MPI and SLURM a `WORLD_SIZE` that says something else would split the job in silence.
fn agree_with_world_size(vars: &Vars<'_>, env: &LauncherEnv) {
    let hint = "unset it, the launcher says the size";
    if let Some(size) = vars.number("WORLD_SIZE", 1..=MAX_WORLD_SIZE, hint)
        && size != env.world_size
    {
        vars.problem(format!(
            "WORLD_SIZE={size}, but the launcher started {} processes ({:?}); {hint}",
            env.world_size, env.launcher
        ));
    }
}

const ADDR_HINT: &str =
    "set it to the host of rank 0, the same for all ranks, for example MASTER_ADDR=127.0.0.1";
const PORT_HINT: &str = "set it to a free port on the host of rank 0, the same for all ranks, for example \
     MASTER_PORT=29500";

pub(super) fn need_master_addr(vars: &Vars<'_>, hint: &str) -> Option<String> {
    if !vars.is_set("MASTER_ADDR") {
        vars.missing("MASTER_ADDR", hint);
    }
    master_addr(vars)
}

/// `MASTER_ADDR` if it is set and looks like a host.
pub(super) fn master_addr(vars: &Vars<'_>) -> Option<String> {
    let text = vars.text("MASTER_ADDR")?;
    match host_name(&text) {
        Ok(host) => Some(host.to_owned()),
        Err(why) => {
            let value = shown(&text);
            vars.problem(format!("MASTER_ADDR={value} {why}; {ADDR_HINT}"));
            None
        }
    }
}

/// A host name or address as it stands in `MASTER_ADDR` or a URL; IPv6 may be in brackets.
pub(super) fn host_name(text: &str) -> Result<&str, &'static str> {
    let inner = text.strip_prefix('[').and_then(|t| t.strip_suffix(']'));
    let host = inner.unwrap_or(text);
    if host.parse::<std::net::Ipv6Addr>().is_ok() {
        return Ok(host);
    }
    // A zone such as fe80::1%eth0 is for the resolver to judge.
    let odd = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '/' | '?' | '#' | '@');
    match host {
        "" => Err("is empty"),
        _ if host.contains("://") => Err("is a URL, not a host"),
        _ if host.contains(odd) => Err("is not a host name or address"),
        _ if host.matches(':').count() == 1 => {
            Err("has a port in it, which belongs into MASTER_PORT")
        }
        _ => Ok(host),
    }
}

pub(super) fn need_master_port(vars: &Vars<'_>) -> Option<u16> {
    if !vars.is_set("MASTER_PORT") {
        vars.missing("MASTER_PORT", PORT_HINT);
    }
    master_port(vars)
}

/// `MASTER_PORT` if it is set and a port.
pub(super) fn master_port(vars: &Vars<'_>) -> Option<u16> {
    let port = vars.number("MASTER_PORT", 1..=usize::from(u16::MAX), PORT_HINT)?;
    u16::try_from(port).ok()
}

/// A launcher's names for the same four facts, and what to tell who lacks them.
pub(super) struct Names {
    pub(super) rank: &'static str,
    pub(super) rank_hint: &'static str,
    pub(super) world_size: &'static str,
    pub(super) world_size_hint: &'static str,
    pub(super) local_rank: &'static str,
    /// `None`: it is not said as a number.
    pub(super) local_world_size: Option<&'static str>,
}

impl Names {
    /// The facts under these names; everything else is left for the caller to fill in.
    pub(super) fn read(&self, vars: &Vars<'_>) -> Option<LauncherEnv> {
        let sizes = 1..=MAX_WORLD_SIZE;
        let world_size = vars.need_number(self.world_size, sizes.clone(), self.world_size_hint);
        let ranks = 0..=MAX_WORLD_SIZE - 1;
        let rank = vars.need_number(self.rank, ranks.clone(), self.rank_hint);
        let local_hint = "unset it, or set it to this process's number on its host";
        let local_rank = vars.number(self.local_rank, ranks, local_hint);
        let local_hint = "unset it, or set it to the number of processes on this host";
        let local_size_name = self.local_world_size.unwrap_or_default();
        let local_world_size = self
            .local_world_size
            .and_then(|name| vars.number(name, sizes, local_hint));
        let (rank_named, size_named) = ((self.rank, rank), (self.world_size, world_size));
        below(vars, rank_named, size_named);
        let rank_named = (self.local_rank, local_rank);
        below(vars, rank_named, (local_size_name, local_world_size));
        if let (Some(local), Some(world)) = (local_world_size, world_size)
            && local > world
        {
            vars.problem(format!(
                "{local_size_name}={local} is more than {}={world}, the whole job",
                self.world_size
            ));
        }
        Some(LauncherEnv {
            rank: rank?,
            world_size: world_size?,
            local_rank,
            local_world_size,
            node_rank: None,
            num_nodes: None,
            ..LauncherEnv::alone()
        })
    }
}

/// A number must be below its size.
fn below(vars: &Vars<'_>, rank: (&str, Option<usize>), size: (&str, Option<usize>)) {
    if let ((name, Some(rank)), (size_name, Some(size))) = (rank, size)
        && rank >= size
    {
        vars.problem(format!(
            "{name}={rank} is not below {size_name}={size}; it goes from 0 to {}",
            size - 1
        ));
    }
}

#[cfg(test)]
#[path = "env_tests.rs"]
mod tests;
