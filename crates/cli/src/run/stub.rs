//! Two hidden subcommands: the first moments of a rank, and the process that outlives a launcher
//! which is killed.
//!
//! A rank must not outlive `phalanx run`, whatever ends that, and neither must what the rank has
//! started. So each rank is a process group, and a *warden*, a process that reads from a pipe of
//! the launcher, knows them all: when the pipe ends, it kills what is still on its list. A rank
//! begins as `phalanx __rank`, which becomes the program only once the launcher has told the
//! warden. Should the warden be killed as well, the kernel kills at least the ranks themselves.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};

use rustix::process::{
    Pid, Resource, Signal, getppid, getrlimit, kill_process_group, set_parent_process_death_signal,
    setrlimit,
};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde::{Deserialize, Serialize};

use crate::Failure;

/// This program, also if its file has been replaced since.
const MYSELF: &str = "/proc/self/exe";

/// Becomes the program of a rank. For `phalanx run` alone.
#[derive(clap::Args)]
pub(crate) struct RankArgs {
    #[arg(last = true, required = true)]
    program: Vec<OsString>,
}

/// What a rank does before it becomes its program.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Orders {
    pub(super) launcher: u32,
    pub(super) cpus: Option<Vec<usize>>,
    /// The limit of open files that the launcher found; its own is higher.
    pub(super) open_files: Option<u64>,
}

/// The command of a rank; [`release`] lets it go on.
pub(super) fn rank_command(program: &[OsString]) -> Command {
    let mut command = Command::new(MYSELF);
    command.args(["__rank", "--"]).args(program);
    command.process_group(0).stdin(Stdio::piped());
    command
}

pub(super) fn release(mut stdin: ChildStdin, orders: &Orders) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(orders)?;
    line.push(b'\n');
    stdin.write_all(&line)
}

pub(crate) fn become_rank(args: &RankArgs) -> Result<ExitCode, Failure> {
    let mut line = String::new();
    BufReader::new(std::io::stdin()).read_line(&mut line)?;
    let orders: Orders =
        serde_json::from_str(&line).map_err(|_| "this is for phalanx run to call")?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid().map(|pid| pid.as_raw_nonzero().get().cast_unsigned()) != Some(orders.launcher) {
        return Err("phalanx run is gone".into());
    }
    bind(orders.cpus.as_deref());
    let mut open_files = getrlimit(Resource::Nofile);
    open_files.current = orders.open_files;
    setrlimit(Resource::Nofile, open_files)?;
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    let (name, rest) = args.program.split_first().ok_or("no program")?;
    let err = Command::new(name).args(rest).exec();
    eprintln!("phalanx: cannot run {}: {err}", name.display());
    Ok(ExitCode::from(match err.kind() {
        std::io::ErrorKind::NotFound => super::program::NOT_FOUND,
        _ => super::program::NOT_EXECUTABLE,
    }))
}

fn bind(cpus: Option<&[usize]>) {
    let Some(cpus) = cpus else { return };
    let mut set = CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu));
    // The processors may have been taken away since; then the rank runs where it may.
    if let Err(err) = sched_setaffinity(None, &set) {
        eprintln!("phalanx: not bound to processors {cpus:?}: {err}");
    }
}

/// The launcher's side of the warden.
#[derive(Debug)]
pub(super) struct Warden {
    child: Child,
    list: Option<ChildStdin>,
}

impl Warden {
    pub(super) fn start() -> std::io::Result<Self> {
        let mut child = Command::new(MYSELF)
            .arg("__warden")
            // What is typed at the terminal is not meant for it.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let list = child.stdin.take();
        Ok(Self { child, list })
    }

    pub(super) fn add(&mut self, pid: u32) -> std::io::Result<()> {
        self.tell('+', pid)
    }

    /// Before the process is waited for: from then on its number may be somebody else's.
    pub(super) fn remove(&mut self, pid: u32) {
        // A warden that was killed has no list.
        let _ = self.tell('-', pid);
    }

    fn tell(&mut self, sign: char, pid: u32) -> std::io::Result<()> {
        match &mut self.list {
            Some(list) => writeln!(list, "{sign}{pid}"),
            None => Ok(()),
        }
    }
}

impl Drop for Warden {
    fn drop(&mut self) {
        self.list = None;
        let _ = self.child.wait();
    }
}

/// Kills the process groups that are still listed when stdin ends.
pub(crate) fn be_warden() -> Result<ExitCode, Failure> {
    let mut groups: Vec<Pid> = Vec::new();
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let pid = line.get(1..).and_then(|pid| pid.parse().ok());
        let Some(pid) = pid.and_then(Pid::from_raw) else {
            continue;
        };
        match line.starts_with('+') {
            true => groups.push(pid),
            false => groups.retain(|known| *known != pid),
        }
    }
    for group in groups {
        let _ = kill_process_group(group, Signal::KILL);
    }
    Ok(ExitCode::SUCCESS)
}
