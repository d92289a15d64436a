//! `phalanx run`: starts the ranks of a job and stays with them.
//!
//! | file | what is in it |
//! |---|---|
//! | `agent.rs`, `job.rs`, `culprit.rs`, `message.rs` | the decisions: of one node, of the job, whom to name, and what agents say to each other; no clock, no process |
//! | `environment.rs`, `cores.rs`, `program.rs`, `endpoint.rs`, `mpirun.rs` | what a rank is started with, and where it meets the others |
//! | `supervise.rs` | the loop between decisions and the world |
//! | `workers.rs`, `stub.rs`, `output.rs` | processes, their ends, their output |
//! | `link.rs` | the agents of several nodes, through the store |

mod agent;
pub(crate) mod cores;
mod culprit;
mod endpoint;
mod environment;
mod job;
mod link;
mod message;
mod mpirun;
mod output;
mod program;
pub(crate) mod stub;
mod supervise;
mod workers;

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::mpsc;
use std::time::Duration;

use phalanx_store::rendezvous::Timeouts;
use phalanx_store::token::TOKEN_VAR;
use phalanx_store::{JobToken, TcpStoreOptions, TcpStoreServer};

use self::endpoint::Endpoint;
use self::job::{Job, Limits};
use self::link::{Hub, Spoke};
use self::message::{AgentId, News, Outcome};
use self::supervise::{Seat, Stores, Supervisor};
use self::workers::{Settings, Workers};
use crate::{Failure, descriptors};

/// Start the ranks of a job and stay with them until all have ended.
///
/// Each rank is a process with the variables that PyTorch's launcher sets, so that a program which
/// runs under torchrun runs here, and the other way round. Its output lines have the rank in front.
/// When a rank fails, all are stopped and, if --max-restarts allows it, started again.
///
/// The exit code is 0 if all ranks succeed, otherwise that of the rank which failed first: its own,
/// or 128 and the number of the signal that killed it.
#[derive(clap::Args)]
#[command(args_override_self = true)]
pub(crate) struct Args {
    /// Ranks on this node: a number, or "auto" for one per core.
    #[arg(long, value_name = "N", aliases = ["nproc-per-node", "nproc_per_node"], value_parser = nproc)]
    nproc: usize,

    /// Nodes in the job; `phalanx run` is started once on each.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    nnodes: usize,

    /// This node's number, 0 to NNODES-1. Node 0 serves the store for all.
    #[arg(long, value_name = "R", default_value_t = 0)]
    node_rank: usize,

    /// Where node 0 is reached, the same on all nodes. One node alone takes a free port of its own.
    #[arg(long, value_name = "HOST:PORT")]
    rdzv_endpoint: Option<String>,

    /// A name for the job, the same on all nodes.
    #[arg(long, value_name = "ID")]
    rdzv_id: Option<String>,

    /// How often all ranks are started again after a failure.
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_restarts: usize,

    /// Who starts the processes: this program, or mpirun, which this program then becomes.
    #[arg(long, value_enum, default_value_t = Launcher::Local)]
    launcher: Launcher,

    /// Give the ranks no job token, so that PyTorch processes can take part.
    #[arg(long)]
    no_token: bool,

    /// Write each rank's output to DIR/attempt_A/rank_R.out and .err instead of showing it.
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,

    /// Show the output as well as writing it to --log-dir.
    #[arg(long, requires = "log_dir")]
    tee: bool,

    /// Leave the ranks on all processors, also if each could have cores of its own.
    #[arg(long)]
    no_bind: bool,

    /// Seconds between asking ranks to end (SIGTERM) and killing them.
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = seconds)]
    grace: f64,

    /// Seconds to wait for all nodes; PHALANX_TIMEOUT or 300 if not given.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    join_timeout: Option<f64>,

    /// Seconds of silence after which a node counts as lost.
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = seconds)]
    node_timeout: f64,

    /// The program of every rank, and its arguments.
    #[arg(
        value_name = "PROGRAM",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    program: Vec<OsString>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Launcher {
    Local,
    Mpirun,
}

/// More processes than one host runs; a larger number is a typing error.
const MAX_NPROC: usize = 4096;

fn nproc(text: &str) -> Result<usize, String> {
    if text == "auto" {
        return Ok(cores::available().len().max(1));
    }
    match text.parse() {
        Ok(0) => Err("a node runs at least one rank".into()),
        Ok(n) if n <= MAX_NPROC => Ok(n),
        _ => Err(format!("not a number from 1 to {MAX_NPROC}, nor \"auto\"")),
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("not a number from 1 up".into()),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(n) if (0.0..=1e6).contains(&n) => Ok(n),
        _ => Err("not a number of seconds".into()),
    }
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Failure> {
    if let Err(unusable) = program::check(&args.program[0]) {
        eprintln!("phalanx: {}", unusable.why);
        return Ok(ExitCode::from(unusable.code));
    }
    if args.node_rank >= args.nnodes {
        let Args {
            node_rank, nnodes, ..
        } = args;
        let problem = format!("--node-rank {node_rank} is not below --nnodes {nnodes}");
        return Err(problem.into());
    }
    match args.launcher {
        Launcher::Local => local(args),
        Launcher::Mpirun => Err(become_mpirun(args)?),
    }
}

fn local(args: &Args) -> Result<ExitCode, Failure> {
    let token = token(args)?;
    let secret = token.clone().map(JobToken::new).transpose()?;
    let join = match args.join_timeout {
        Some(seconds) => Duration::from_secs_f64(seconds),
        None => Timeouts::from_env()?.store(),
    };
    let run_id = match &args.rdzv_id {
        Some(id) => id.clone(),
        None if args.nnodes > 1 => "job".to_owned(),
        None => JobToken::generate()?[..16].to_owned(),
    };
    let open_files = descriptors::limit();
    descriptors::raise_limit();
    descriptors::reserve_table();
    let endpoint = Endpoint::of(args.rdzv_endpoint.as_deref(), args.nnodes)?;
    let (sender, events) = mpsc::channel();
    let id = AgentId(u64::from_str_radix(&JobToken::generate()?[..16], 16)?);
    let host = host_name();
    let limits = Limits {
        nnodes: args.nnodes,
        max_restarts: args.max_restarts,
        join,
        silence: Duration::from_secs_f64(args.node_timeout),
    };
    let control = TcpStoreOptions {
        timeout: join,
        token: secret.clone(),
        ..TcpStoreOptions::new(&endpoint.host, endpoint.port)
    };
    // Lives as long as the job.
    let mut server = None;
    let seat = if args.node_rank == 0 {
        let mut addrs = endpoint.bind_addresses()?;
        let mut hub = None;
        if args.nnodes > 1 {
            let server = server.insert(TcpStoreServer::start(&addrs, secret.clone())?);
            let control = endpoint::own(control, server);
            hub = Some(Hub::open(&control, &run_id, sender.clone())?);
            // The ranks have stores of their own, at the same addresses.
            addrs.iter_mut().for_each(|addr| addr.set_port(0));
        }
        let stores = Stores {
            addrs,
            token: secret,
            current: None,
        };
        let job = Box::new(Job::new(limits));
        Seat::Coordinator { job, stores, hub }
    } else {
        let spoke = Spoke::open(&control, &run_id, args.node_rank, id, sender.clone());
        Seat::Member(spoke?)
    };
    // Only now: until here there is nothing that a signal would leave behind.
    supervise::listen_for_signals(sender.clone())?;
    let workers = Workers::new(Settings {
        program: args.program.clone(),
        job: environment::Job {
            master_addr: endpoint.host,
            run_id,
            max_restarts: args.max_restarts,
            token,
        },
        log_dir: args.log_dir.clone(),
        show: args.log_dir.is_none() || args.tee,
        bind: !args.no_bind,
        open_files,
    })?;
    let supervisor = Supervisor {
        node: args.node_rank,
        id,
        agent: agent::Agent::new(id, host.clone()),
        seat,
        workers,
        grace: Duration::from_secs_f64(args.grace),
        sender,
        events,
        told: Outcome::Success,
    };
    let joined = News::Joined {
        nproc: args.nproc,
        nnodes: args.nnodes,
        host,
    };
    Ok(ExitCode::from(supervisor.run(joined).exit_code()))
}

/// The secret of the job: the user's, or a fresh one that only this job knows.
fn token(args: &Args) -> Result<Option<String>, Failure> {
    if args.no_token {
        return Ok(None);
    }
    // Checks it as well.
    match JobToken::from_env()? {
        Some(_) => Ok(std::env::var(TOKEN_VAR).ok()),
        None if args.nnodes == 1 => Ok(Some(JobToken::generate()?)),
        None => Err(format!(
            "several nodes need one secret: set {TOKEN_VAR} to the same text on all of them (for \
             example the output of `phalanx token`), or use --no-token on a network that you trust"
        )
        .into()),
    }
}

fn host_name() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}

/// Replaces this process by `mpirun`. Returns only the reason why that failed.
fn become_mpirun(args: &Args) -> Result<Failure, Failure> {
    if args.max_restarts > 0 || args.log_dir.is_some() || args.nnodes > 1 {
        return Err(
            "--launcher mpirun has no --max-restarts, --log-dir and --nnodes: mpirun ends \
                    the job at the first failure, and takes hosts from its own options or from \
                    the batch system"
                .into(),
        );
    }
    let family = mpirun::Family::of_installed()?;
    let mut command = Command::new("mpirun");
    let mut set: Vec<(&str, String)> = Vec::new();
    match token(args)? {
        Some(token) => set.push((TOKEN_VAR, token)),
        None => drop(command.env_remove(TOKEN_VAR)),
    }
    if let Some(endpoint) = &args.rdzv_endpoint {
        let Endpoint { host, port } = Endpoint::parse(endpoint)?;
        set.extend([("MASTER_ADDR", host), ("MASTER_PORT", port.to_string())]);
    }
    let inherited: Vec<String> = std::env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| name != TOKEN_VAR)
        .collect();
    let names = set.iter().map(|(name, _)| *name);
    let names = names.chain(inherited.iter().map(String::as_str));
    command.args(mpirun::arguments(family, args.nproc, names, &args.program));
    command.envs(set.iter().map(|(name, value)| (name, value)));
    let shown: Vec<_> = command
        .get_args()
        .map(|arg| arg.display().to_string())
        .collect();
    eprintln!("phalanx: mpirun {}", shown.join(" "));
    Ok(format!("mpirun: {}", command.exec()).into())
}
