//! Ranks that are children of the test's process.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::time::Duration;

use phalanx_store::Deadline;

use super::Crew;
use crate::log::Log;
use crate::outcome::End;
use crate::process::{Proc, ready};

pub(crate) struct Direct {
    ranks: Vec<Proc>,
}

impl Direct {
    /// Starts one process per command.
    ///
    /// Ranks die with the *thread* that started them (that is how Linux sends the signal), so this
    /// is called on the thread that then waits for them.
    pub(crate) fn start(commands: impl Iterator<Item = Command>) -> io::Result<Self> {
        let ranks = commands.map(Proc::spawn).collect::<io::Result<_>>()?;
        Ok(Self { ranks })
    }

    fn running(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.ranks.len()).filter(|&rank| self.ranks[rank].status().is_none())
    }
}

impl Crew for Direct {
    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn wait(&mut self, until: Deadline) -> io::Result<Vec<(usize, End)>> {
        let running: Vec<usize> = self.running().collect();
        let fds: Vec<_> = running.iter().map(|&r| self.ranks[r].ended()).collect();
        let mut ended = Vec::new();
        for i in ready(&fds, until)? {
            let rank = running[i];
            let proc = &mut self.ranks[rank];
            if let Some(status) = proc.wait_for(Duration::ZERO)? {
                ended.push((rank, end_of(status, proc.log())));
            }
        }
        Ok(ended)
    }

    fn finished(&self) -> bool {
        self.running().next().is_none()
    }

    fn kill(&mut self) -> io::Result<()> {
        // All at once first: otherwise those at the end would see those at the start die.
        for rank in self.running() {
            self.ranks[rank].signal(rustix::process::Signal::KILL)?;
        }
        self.ranks.iter_mut().try_for_each(|p| p.kill().map(drop))
    }

    fn log(&self, rank: usize) -> &Log {
        self.ranks[rank].log()
    }
}

fn end_of(status: ExitStatus, log: &Log) -> End {
    if !log.begun() {
        let hint = match status.success() {
            true => "; a body outside the test function needs World::test_name",
            false => "",
        };
        return End::NeverRan(format!("its process ended with {status}{hint}"));
    }
    match (status.code(), status.signal(), log.end()) {
        (_, Some(signal), _) => End::Signaled(signal),
        (Some(0), _, Some(mark)) if mark.panic.is_none() => End::Finished,
        (Some(101), _, Some(mark)) if mark.panic.is_some() => {
            End::Panicked(mark.panic.unwrap_or_default())
        }
        (code, ..) => End::Exited(code.unwrap_or(-1)),
    }
}
