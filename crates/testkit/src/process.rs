//! A child process that cannot outlive its owner, with its output.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use phalanx_store::Deadline;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, kill_process_group, pidfd_open, pidfd_send_signal};

pub use rustix::process::Signal;

use crate::log::Log;

/// How long output may stay open after its process group was killed; only a process that left the
/// group can hold it.
const DRAIN: Duration = Duration::from_secs(1);

/// A process in a group of its own whose output is read all the time.
///
/// Also useful without a [`World`](crate::World), to run a program next to a test: dropping it
/// kills the process and everything in its group.
#[derive(Debug)]
pub struct Proc {
    child: Child,
    pid: Pid,
    pidfd: OwnedFd,
    log: Arc<Log>,
    status: Option<ExitStatus>,
}

impl Proc {
    /// Starts the command with both outputs going to [`log`](Proc::log) and no input.
    pub fn spawn(mut command: Command) -> io::Result<Self> {
        let (output, write_end) = io::pipe()?;
        command
            .stdin(Stdio::null())
            .stdout(write_end.try_clone()?)
            .stderr(write_end)
            .process_group(0);
        let mut child = command.spawn()?;
        // The command holds write ends of the pipe; with them the output would never end.
        drop(command);

        let pid = Pid::from_child(&child);
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(err) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(err.into());
            }
        };
        let log = Arc::new(Log::default());
        let sink = Arc::clone(&log);
        let proc = Self {
            child,
            pid,
            pidfd,
            log,
            status: None,
        };
        let output = File::from(OwnedFd::from(output));
        std::thread::Builder::new()
            .name(format!("log of {}", proc.id()))
            .spawn(move || sink.fill_from(output))?;
        Ok(proc)
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it has printed.
    pub fn log(&self) -> &Arc<Log> {
        &self.log
    }

    /// How it ended, once [`wait_for`](Proc::wait_for) or [`kill`](Proc::kill) has seen it.
    pub fn status(&self) -> Option<ExitStatus> {
        self.status
    }

    /// Waits until it has ended; `None` if it is still running after `limit`.
    ///
    /// What it leaves running in its process group is killed then, and its output is complete.
    pub fn wait_for(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        if self.status.is_none() && ready(&[self.ended()], Deadline::after(limit))?.is_empty() {
            return Ok(None);
        }
        self.reap().map(Some)
    }

    /// Sends a signal to the process alone, not to its group.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        Ok(pidfd_send_signal(&self.pidfd, signal)?)
    }

    /// Kills the process and its group, and waits for the end of it.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        if self.status.is_none() {
            self.kill_group();
        }
        self.reap()
    }

    /// A descriptor that becomes readable when the process has ended.
    pub(crate) fn ended(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    fn reap(&mut self) -> io::Result<ExitStatus> {
        if let Some(status) = self.status {
            return Ok(status);
        }
        // Between the two the group's number could come to belong to others; a process that has
        // ended but was not yet waited for keeps it.
        if !ready(&[self.ended()], Deadline::after(Duration::ZERO))?.is_empty() {
            self.kill_group();
        }
        let status = self.child.wait()?;
        self.status = Some(status);
        self.log.wait_closed(DRAIN);
        Ok(status)
    }

    fn kill_group(&self) {
        // The only failure left is that nobody is there any more.
        let _ = kill_process_group(self.pid, Signal::KILL);
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// Waits until some of the descriptors are readable or closed; returns which.
pub(crate) fn ready(fds: &[BorrowedFd<'_>], deadline: Deadline) -> io::Result<Vec<usize>> {
    let mut polled: Vec<PollFd<'_>> = fds
        .iter()
        .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN))
        .collect();
    loop {
        let left = deadline.left();
        let timeout = Timespec {
            tv_sec: left.as_secs().min(i32::MAX as u64) as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(err) => return Err(err.into()),
        }
    }
    Ok((0..fds.len())
        .filter(|&i| !polled[i].revents().is_empty())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Proc {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Proc::spawn(command).unwrap()
    }

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn status_and_both_outputs_are_there_when_it_has_ended() {
        let mut proc = sh("echo out; echo err >&2; exit 3");
        let status = proc.wait_for(LONG).unwrap().unwrap();
        assert_eq!(status.code(), Some(3));
        assert_eq!(proc.log().text(), "out\nerr\n");
    }

    #[test]
    fn what_it_left_in_the_background_ends_with_it() {
        let mut proc = sh("sleep 1000 & echo $!");
        assert!(proc.wait_for(LONG).unwrap().is_some());
        let left: i32 = proc.log().text().trim().parse().unwrap();
        // The log is complete only because the background process, which held it open, is gone.
        assert!(proc.log().wait_closed(Duration::ZERO));
        let left = Pid::from_raw(left).unwrap();
        let gone = Deadline::after(LONG);
        while rustix::process::test_kill_process(left).is_ok() && !is_zombie(left) {
            assert!(!gone.passed(), "the background process is still there");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn is_zombie(pid: Pid) -> bool {
        let path = format!("/proc/{}/stat", pid.as_raw_nonzero());
        std::fs::read_to_string(path).is_ok_and(|stat| stat.contains(") Z "))
    }

    #[test]
    fn a_limit_of_zero_only_looks() {
        let mut proc = sh("sleep 1000");
        assert!(proc.wait_for(Duration::ZERO).unwrap().is_none());
        assert!(proc.kill().unwrap().code().is_none());
    }
}
