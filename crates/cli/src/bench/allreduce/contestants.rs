//! Who takes part, and how their processes are started.

use std::cell::OnceCell;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::thread::{CpuSet, sched_getaffinity};

use super::mpi::{self, Mpi};
use super::window::Dtype;
use super::world::{Desk, World};
use crate::Failure;
use crate::bench::namespaces::{self, Namespaces};

const TORCH_GLOO: &str = include_str!("competitors/allreduce_gloo.py");

/// Contestants that are not ours.
const COMPETITORS: &str = "torch-gloo, libgloo, openmpi and intelmpi";

/// A contestant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A backend of ours, by its name in the registry.
    Own(String),
    /// PyTorch's gloo.
    TorchGloo,
    /// libgloo without us.
    LibGloo,
    OpenMpi,
    IntelMpi,
    /// What nobody beats; see [`super::roof`].
    Roof,
}

impl Kind {
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Own(name) => name,
            Self::TorchGloo => "torch-gloo",
            Self::LibGloo => "libgloo",
            Self::OpenMpi => "openmpi",
            Self::IntelMpi => "intelmpi",
            Self::Roof => "roof",
        }
    }

    /// The contestants that `--backends` asks for.
    pub(crate) fn parse(names: &[String]) -> Result<Vec<Self>, Failure> {
        let known = phalanx::backends();
        let mut kinds = Vec::new();
        for (at, name) in names.iter().enumerate() {
            if names[..at].contains(name) {
                continue;
            }
            match name.as_str() {
                "torch-gloo" => kinds.push(Self::TorchGloo),
                "libgloo" => kinds.push(Self::LibGloo),
                "openmpi" => kinds.push(Self::OpenMpi),
                "intelmpi" => kinds.push(Self::IntelMpi),
                name if known.iter().any(|known| known == name) => {
                    kinds.push(Self::Own(name.into()))
                }
                name @ ("gloo" | "mpi") => {
                    let what = format!(
                        "{name} is not in this program; build it with `--features {name}`, which \
                         `cargo xtask bench` does"
                    );
                    return Err(what.into());
                }
                name => {
                    let known = known.join(", ");
                    return Err(format!(
                        "no backend {name:?}; there are {known}, and {COMPETITORS} to compare with"
                    )
                    .into());
                }
            }
        }
        Ok(kinds)
    }

    /// Whether it is a backend of ours that an MPI launcher has to start.
    fn is_own_mpi(&self) -> bool {
        matches!(self, Self::Own(name) if name == "mpi")
    }

    /// What it does without us, if a backend of ours stands on the same library.
    pub(crate) fn bare(&self) -> Option<Self> {
        match self {
            Self::Own(name) if name == "gloo" => Some(Self::LibGloo),
            Self::Own(name) if name == "mpi" => Some(Self::OpenMpi),
            _ => None,
        }
    }

    /// Why it cannot be measured like this, if it cannot.
    pub(crate) fn excuse(&self, dtype: Dtype, between_hosts: bool) -> Option<&'static str> {
        match self {
            own if own.is_own_mpi() && between_hosts => {
                Some("its launcher does not start ranks in network namespaces")
            }
            Self::LibGloo if dtype == Dtype::Bf16 => Some("the program knows f32 alone"),
            Self::OpenMpi | Self::IntelMpi if dtype == Dtype::Bf16 => Some("MPI has no bf16"),
            Self::OpenMpi | Self::IntelMpi if between_hosts => {
                Some("its launcher does not start ranks in network namespaces")
            }
            _ => None,
        }
    }
}

/// How worlds are started.
pub(crate) struct Launcher {
    executable: PathBuf,
    python: PathBuf,
    /// Of this run, for programs that are built.
    dir: PathBuf,
    processors: Vec<usize>,
    bare_gloo: OnceCell<Result<PathBuf, String>>,
    open_mpi: OnceCell<Result<Mpi, String>>,
    intel_mpi: OnceCell<Result<Mpi, String>>,
}

impl Launcher {
    pub(crate) fn new(python: PathBuf) -> Result<Self, Failure> {
        let dir = std::env::temp_dir().join(format!("phalanx-bench-{}", std::process::id()));
        std::fs::create_dir(&dir)?;
        let allowed = sched_getaffinity(None)?;
        Ok(Self {
            executable: std::env::current_exe()?,
            python,
            dir,
            processors: (0..CpuSet::MAX_CPU)
                .filter(|&cpu| allowed.is_set(cpu))
                .collect(),
            bare_gloo: OnceCell::new(),
            open_mpi: OnceCell::new(),
            intel_mpi: OnceCell::new(),
        })
    }

    /// The processor of each rank, if there is one for each.
    pub(crate) fn pinned(&self, ranks: usize) -> Option<&[usize]> {
        self.processors.get(..ranks)
    }

    /// The first two processors.
    pub(crate) fn neighbours(&self) -> Option<[usize; 2]> {
        self.processors.first_chunk().copied()
    }

    /// Starts a world; `hosts` have as many ranks each.
    pub(crate) fn start(
        &self,
        kind: &Kind,
        ranks: usize,
        hosts: Option<&Namespaces>,
    ) -> Result<World, Failure> {
        let desk = Desk::new()?;
        let socket = desk.path();
        let commands = match kind {
            own if own.is_own_mpi() => vec![self.own_mpi(socket, ranks)?],
            Kind::Own(backend) => {
                self.each_rank(ranks, hosts, |rank| self.own(socket, backend, ranks, rank))?
            }
            Kind::TorchGloo => self.each_rank(ranks, hosts, |_| self.torch_gloo(socket, ranks))?,
            Kind::LibGloo => {
                let program = self
                    .bare_gloo
                    .get_or_init(|| text(mpi::bare_gloo(&self.dir)));
                let program = program.as_ref().map_err(String::as_str)?;
                let meeting = self.dir.join(format!("meeting-{}", ranks));
                std::fs::create_dir_all(&meeting)?;
                self.each_rank(ranks, hosts, |_| {
                    let mut command = Command::new(program);
                    command.arg(socket).arg(&meeting);
                    command.arg(mpi::list(self.pinned(ranks)));
                    command
                })?
            }
            Kind::OpenMpi => {
                let mpi = self.open_mpi.get_or_init(|| text(Mpi::open(&self.dir)));
                vec![mpi.as_ref().map_err(String::as_str)?.command(
                    socket,
                    ranks,
                    self.pinned(ranks),
                )]
            }
            Kind::IntelMpi => {
                let mpi = self.intel_mpi.get_or_init(|| text(Mpi::intel(&self.dir)));
                vec![mpi.as_ref().map_err(String::as_str)?.command(
                    socket,
                    ranks,
                    self.pinned(ranks),
                )]
            }
            Kind::Roof => vec![self.roof(socket, ranks)],
        };
        let reporting = if *kind == Kind::Roof { 1 } else { ranks };
        World::start(&desk, commands, reporting)
    }

    /// A command for each rank, with what a launcher tells it.
    fn each_rank(
        &self,
        ranks: usize,
        hosts: Option<&Namespaces>,
        command: impl Fn(usize) -> Command,
    ) -> Result<Vec<Command>, Failure> {
        let (address, interface) = match hosts {
            Some(_) => (namespaces::address(0).to_string(), namespaces::INTERFACE),
            None => ("127.0.0.1".to_owned(), "lo"),
        };
        // Free here and now; within new namespaces every port is.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let local_size = ranks / hosts.map_or(1, Namespaces::count);
        let commands = (0..ranks).map(|rank| {
            let (host, local_rank) = (rank / local_size, rank % local_size);
            let mut command = command(rank);
            command
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", ranks.to_string())
                .env("LOCAL_RANK", local_rank.to_string())
                .env("LOCAL_WORLD_SIZE", local_size.to_string())
                .env("MASTER_ADDR", &address)
                .env("MASTER_PORT", port.to_string())
                .env("GLOO_SOCKET_IFNAME", interface)
                // Ranks whose bench was killed in the middle of a window end by this.
                .env("PHALANX_TIMEOUT", "120")
                .env_remove("TORCHELASTIC_RUN_ID")
                .env_remove("TORCHELASTIC_USE_AGENT_STORE")
                .env_remove("PHALANX_TOKEN");
            match hosts {
                None => command,
                Some(hosts) => {
                    command.env("PHALANX_HOST_ID", format!("bench-{host}"));
                    hosts.confine(host, &command)
                }
            }
        });
        Ok(commands.collect())
    }

    fn own(&self, socket: &Path, backend: &str, ranks: usize, rank: usize) -> Command {
        let mut command = Command::new(&self.executable);
        command.args(["bench", "rank"]).arg(socket).arg(backend);
        if let Some(processors) = self.pinned(ranks) {
            command.arg("--processor").arg(processors[rank].to_string());
        }
        command
    }

    fn own_mpi(&self, socket: &Path, ranks: usize) -> Result<Command, Failure> {
        let processors = self.pinned(ranks);
        let mut command = mpi::own_launcher(ranks, processors)?;
        command.arg(&self.executable).args(["bench", "rank"]);
        command.arg(socket).arg("mpi");
        if processors.is_some() {
            command.arg("--processors").arg(mpi::list(processors));
        }
        command.env("PHALANX_TIMEOUT", "120");
        Ok(command)
    }

    fn torch_gloo(&self, socket: &Path, ranks: usize) -> Command {
        let mut command = Command::new(&self.python);
        command
            .args(["-c", TORCH_GLOO])
            .arg(socket)
            .arg(mpi::list(self.pinned(ranks)));
        command.env("TORCH_CPP_LOG_LEVEL", "ERROR");
        command
    }

    fn roof(&self, socket: &Path, ranks: usize) -> Command {
        let threads = ranks.min(self.processors.len());
        let mut command = Command::new(&self.executable);
        command
            .args(["bench", "roof"])
            .arg(socket)
            .arg(ranks.to_string());
        command.arg(mpi::list(Some(&self.processors[..threads])));
        command
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn text<T>(result: Result<T, Failure>) -> Result<T, String> {
    result.map_err(|failure| failure.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn competitors_have_names_and_unknown_ones_are_listed_with_the_known() {
        let names = |names: &[&str]| {
            names
                .iter()
                .map(|&name| name.to_owned())
                .collect::<Vec<_>>()
        };
        let all = ["reference", "openmpi", "intelmpi", "torch-gloo", "libgloo"];
        let kinds = Kind::parse(&names(&all)).unwrap();
        let found: Vec<_> = kinds.iter().map(Kind::name).collect();
        assert_eq!(found, all);
        if !cfg!(feature = "gloo") {
            let error = Kind::parse(&names(&["gloo"])).unwrap_err().to_string();
            assert!(error.contains("--features gloo"), "{error}");
        }
        let error = Kind::parse(&names(&["nativ"])).unwrap_err().to_string();
        assert!(
            error.contains("nativ") && error.contains("reference"),
            "{error}"
        );
    }
}
