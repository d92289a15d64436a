//! Ranks that another program starts, such as mpirun.
//!
//! The harness does not know these processes, so each calls back: it connects to a socket of the
//! harness, says which rank it is, and sends its output through it (launchers mix the output of
//! ranks). The same connection is its lifeline: when it ends, the rank kills itself. That reaches
//! ranks which the launcher has put into other process groups, and works when the harness is
//! killed.

use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use phalanx_store::Deadline;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{PidfdFlags, Signal, getuid, pidfd_open, pidfd_send_signal};

use super::Crew;
use crate::log::Log;
use crate::outcome::{End, LauncherOutcome};
use crate::process::{Proc, ready};

/// How long a rank that has connected may take to say who it is.
const HELLO: Duration = Duration::from_secs(2);

/// How long a launcher may take to notice that its ranks are gone and to clean up after them.
const CLEAN_UP: Duration = Duration::from_secs(1);

/// Where the ranks of one world call back.
pub(crate) struct Exchange {
    listener: UnixListener,
    name: String,
}

impl Exchange {
    /// In the abstract name space: there is no file that could stay behind.
    pub(crate) fn open() -> io::Result<Self> {
        let (pid, random) = (std::process::id(), fastrand::u64(..));
        let name = format!("phalanx-testkit-{pid}-{random:016x}");
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, name })
    }

    /// What a rank needs to know for [`call_back`].
    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

/// A rank's side: connects to the harness.
pub(crate) fn call_back(name: &str, rank: usize) -> io::Result<UnixStream> {
    let mut link = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
    let rank = u32::try_from(rank).map_err(io::Error::other)?;
    io::Write::write_all(&mut link, &rank.to_le_bytes())?;
    Ok(link)
}

pub(crate) struct Launched {
    launcher: Proc,
    killed: bool,
    exchange: Exchange,
    ranks: Vec<Seat>,
}

/// The place of one rank, empty until it has called back.
#[derive(Default)]
struct Seat {
    log: Arc<Log>,
    called: bool,
    /// `None` also for one that was gone before it could be looked at.
    pidfd: Option<OwnedFd>,
    ended: bool,
}

impl Launched {
    pub(crate) fn start(command: Command, exchange: Exchange, size: usize) -> io::Result<Self> {
        Ok(Self {
            launcher: Proc::spawn(command)?,
            killed: false,
            exchange,
            ranks: (0..size).map(|_| Seat::default()).collect(),
        })
    }

    fn running(&self) -> impl Iterator<Item = (usize, &OwnedFd)> + '_ {
        let seats = self.ranks.iter().enumerate().filter(|(_, s)| !s.ended);
        seats.filter_map(|(rank, seat)| Some((rank, seat.pidfd.as_ref()?)))
    }

    /// Seats everyone who is at the door.
    fn admit(&mut self) -> io::Result<()> {
        loop {
            match self.exchange.listener.accept() {
                Ok((link, _)) => self.seat(link)?,
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(err) => return Err(err),
            }
        }
    }

    fn seat(&mut self, mut link: UnixStream) -> io::Result<()> {
        let peer = socket_peercred(&link)?;
        let mut hello = [0; 4];
        link.set_nonblocking(false)?;
        link.set_read_timeout(Some(HELLO))?;
        // Anybody can connect to such a socket; strangers and those who say nothing are let go.
        if peer.uid != getuid() || link.read_exact(&mut hello).is_err() {
            return Ok(());
        }
        link.set_read_timeout(None)?;
        let rank = u32::from_le_bytes(hello) as usize;
        let size = self.ranks.len();
        let seat = self.ranks.get_mut(rank).filter(|s| !s.called);
        let seat = seat.ok_or_else(|| {
            let what = format!("rank {rank} called back twice or the world of {size} has no such");
            io::Error::other(what)
        })?;
        seat.called = true;
        seat.pidfd = pidfd_open(peer.pid, PidfdFlags::empty()).ok();
        let log = Arc::clone(&seat.log);
        std::thread::Builder::new()
            .name(format!("log of rank {rank}"))
            .spawn(move || log.fill_from(link))?;
        Ok(())
    }

    fn end_of(&self, rank: usize) -> End {
        let log = &self.ranks[rank].log;
        log.wait_closed(CLEAN_UP);
        match log.end() {
            Some(mark) => mark.panic.map_or(End::Finished, End::Panicked),
            None => End::Lost,
        }
    }

    /// How ranks ended whose processes cannot be watched: those that were gone too soon and, once
    /// the launcher is gone, those who have not come and so will not come.
    fn unwatched(&self, launcher_ended: bool) -> Vec<(usize, End)> {
        let seats = self.ranks.iter().enumerate();
        let unwatched = seats.filter(|(_, seat)| seat.pidfd.is_none() && !seat.ended);
        unwatched
            .filter_map(|(rank, seat)| match (seat.called, launcher_ended) {
                (true, _) => Some((rank, self.end_of(rank))),
                (false, true) => {
                    let why = "the launcher ended without it having called back";
                    Some((rank, End::NeverRan(why.into())))
                }
                (false, false) => None,
            })
            .collect()
    }
}

impl Crew for Launched {
    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn wait(&mut self, until: Deadline) -> io::Result<Vec<(usize, End)>> {
        let (running, mut fds): (Vec<usize>, Vec<_>) =
            self.running().map(|(rank, fd)| (rank, fd.as_fd())).unzip();
        fds.push(self.exchange.listener.as_fd());
        if self.launcher.status().is_none() {
            fds.push(self.launcher.ended());
        }
        let ready = ready(&fds, until)?;

        let launcher_ended = self.launcher.wait_for(Duration::ZERO)?.is_some();
        self.admit()?;
        let mut ended = self.unwatched(launcher_ended);
        let seen = ready.into_iter().filter_map(|i| running.get(i).copied());
        ended.extend(seen.map(|rank| (rank, self.end_of(rank))));
        for (rank, _) in &ended {
            self.ranks[*rank].ended = true;
        }
        Ok(ended)
    }

    fn finished(&self) -> bool {
        self.launcher.status().is_some() && self.ranks.iter().all(|seat| seat.ended)
    }

    fn kill(&mut self) -> io::Result<()> {
        // Ranks first: the launcher, which knows them, then gets its chance to clean up.
        for (_, pidfd) in self.running() {
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
        if self.launcher.wait_for(CLEAN_UP)?.is_none() {
            self.killed = true;
            self.launcher.kill()?;
        }
        for (_, pidfd) in self.running() {
            ready(&[pidfd.as_fd()], Deadline::after(CLEAN_UP))?;
        }
        Ok(())
    }

    fn log(&self, rank: usize) -> &Log {
        &self.ranks[rank].log
    }

    fn launcher(&self) -> Option<LauncherOutcome> {
        let status = self.launcher.status();
        Some(LauncherOutcome {
            status: status.filter(|_| !self.killed),
            log: self.launcher.log().text(),
        })
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}
