//! The processes of this node's ranks: starting, signalling, waiting for their ends.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::mpsc::Sender;
use std::time::Duration;

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid,
};

use super::cores;
use super::environment::{self, Job};
use super::message::{End, Share};
use super::output::{Pump, Sink, Stream};
use super::stub::{Orders, Warden, rank_command, release};
use super::supervise::Event;

/// How long the output of a rank may stay open after its end.
const DRAIN: Duration = Duration::from_secs(1);

/// What does not change from attempt to attempt.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) program: Vec<OsString>,
    pub(super) job: Job,
    pub(super) log_dir: Option<PathBuf>,
    /// Whether output is shown.
    pub(super) show: bool,
    pub(super) bind: bool,
    pub(super) open_files: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Workers {
    settings: Settings,
    warden: Warden,
    /// By local rank; `None` once it has been waited for.
    ranks: Vec<Option<Rank>>,
}

#[derive(Debug)]
struct Rank {
    child: Child,
    stdout: Pump,
    stderr: Pump,
}

impl Rank {
    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

/// How a rank ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) pid: u32,
    pub(super) end: End,
    pub(super) stderr: Vec<String>,
}

impl Workers {
    pub(super) fn new(settings: Settings) -> io::Result<Self> {
        Ok(Self {
            settings,
            warden: Warden::start()?,
            ranks: Vec::new(),
        })
    }

    /// Starts all ranks. In the thread that runs this, which has to stay: the kernel takes its end
    /// for that of the parent.
    ///
    /// An error says which rank could not be started; those before it run.
    pub(super) fn spawn(
        &mut self,
        share: &Share,
        events: &Sender<Event>,
    ) -> Result<(), (usize, io::Error)> {
        self.ranks.clear();
        let fits = self.settings.bind && share.alone_on_host;
        let cpus = fits.then(|| cores::divide(&cores::available(), share.nproc));
        let cpus = cpus.flatten();
        for local in 0..share.nproc {
            let cpus = cpus.as_ref().map(|cpus| cpus[local].clone());
            let rank = self
                .spawn_one(share, local, cpus, events)
                .map_err(|err| (local, err))?;
            self.ranks.push(Some(rank));
        }
        Ok(())
    }

    fn spawn_one(
        &mut self,
        share: &Share,
        local: usize,
        cpus: Option<Vec<usize>>,
        events: &Sender<Event>,
    ) -> io::Result<Rank> {
        let rank = share.first_rank + local;
        let [out_log, err_log] = self.log_files(share.attempt, rank)?;
        let mut command = rank_command(&self.settings.program);
        let is_set = |name: &str| std::env::var_os(name).is_some();
        for (name, value) in environment::of_rank(&self.settings.job, share, local, is_set) {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let sink = |stream, log| Sink {
            rank,
            show: self.settings.show.then_some(stream),
            log,
        };
        let pipe = || io::Error::other("no pipe");
        let stdout = child.stdout.take().ok_or_else(pipe)?;
        let stderr = child.stderr.take().ok_or_else(pipe)?;
        let stdin = child.stdin.take().ok_or_else(pipe)?;
        let pumps = Pump::start(stdout, sink(Stream::Stdout, out_log)).and_then(|stdout| {
            let stderr = Pump::start(stderr, sink(Stream::Stderr, err_log))?;
            Ok((stdout, stderr))
        });
        let orders = Orders {
            launcher: std::process::id(),
            cpus,
            open_files: self.settings.open_files,
        };
        let warden = &mut self.warden;
        let running = pumps.and_then(|pumps| {
            watch(Pid::from_child(&child), local, events)?;
            warden.add(child.id())?;
            release(stdin, &orders)?;
            Ok(pumps)
        });
        match running {
            Ok((stdout, stderr)) => Ok(Rank {
                child,
                stdout,
                stderr,
            }),
            Err(err) => {
                let _ = child.kill();
                self.warden.remove(child.id());
                let _ = child.wait();
                Err(err)
            }
        }
    }

    fn log_files(&self, attempt: usize, rank: usize) -> io::Result<[Option<File>; 2]> {
        let Some(dir) = &self.settings.log_dir else {
            return Ok([None, None]);
        };
        let dir = dir.join(format!("attempt_{attempt}"));
        let named = |err: io::Error| {
            io::Error::new(err.kind(), format!("--log-dir: {}: {err}", dir.display()))
        };
        fs::create_dir_all(&dir).map_err(named)?;
        let file = |kind| File::create(dir.join(format!("rank_{rank}.{kind}"))).map_err(named);
        Ok([Some(file("out")?), Some(file("err")?)])
    }

    /// Sends a signal to everything that the ranks are made of.
    pub(super) fn signal_groups(&self, locals: &[usize], signal: i32) {
        self.each(locals, signal, kill_process_group);
    }

    /// Sends a signal to the ranks, not to what they have started.
    pub(super) fn signal_leaders(&self, locals: &[usize], signal: i32) {
        self.each(locals, signal, kill_process);
    }

    fn each(&self, locals: &[usize], signal: i32, send: fn(Pid, Signal) -> rustix::io::Result<()>) {
        let Some(signal) = Signal::from_named_raw(signal) else {
            return;
        };
        for rank in locals
            .iter()
            .filter_map(|&local| self.ranks.get(local)?.as_ref())
        {
            // Not waited for yet, so the number is still its own; it may have ended, though.
            let _ = send(rank.pid(), signal);
        }
    }

    /// Waits for a rank that has ended, and ends what it left in its process group.
    pub(super) fn reap(&mut self, local: usize) -> Option<io::Result<Ended>> {
        let mut rank = self.ranks.get_mut(local)?.take()?;
        let _ = kill_process_group(rank.pid(), Signal::KILL);
        self.warden.remove(rank.child.id());
        let status = match rank.child.wait() {
            Ok(status) => status,
            Err(err) => return Some(Err(err)),
        };
        rank.stdout.drain(DRAIN);
        rank.stderr.drain(DRAIN);
        Some(Ok(Ended {
            pid: rank.child.id(),
            end: End::of(status),
            stderr: rank.stderr.tail(),
        }))
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for rank in self.ranks.iter().flatten() {
            let _ = kill_process_group(rank.pid(), Signal::KILL);
        }
        for local in 0..self.ranks.len() {
            let _ = self.reap(local);
        }
    }
}

/// Says when a process has ended, and leaves it to be waited for.
fn watch(pid: Pid, local: usize, events: &Sender<Event>) -> io::Result<()> {
    let events = events.clone();
    let wait = move || {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), options) {}
        // Nobody listens any more when this process is about to end.
        let _ = events.send(Event::Exited { local });
    };
    std::thread::Builder::new()
        .name(format!("wait for {local}"))
        .stack_size(1 << 16)
        .spawn(wait)?;
    Ok(())
}
