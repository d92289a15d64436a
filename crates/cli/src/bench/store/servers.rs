//! The servers under test, each a process of its own that ends with this one.

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::resolver::Resolver;
use crate::Failure;
use crate::bench::cpu;
use crate::bench::load::Pattern;

/// Importing PyTorch from a cold disk takes long.
const START_LIMIT: Duration = Duration::from_secs(180);
/// A server at rest uses less than this within [`REST_WINDOW`].
const REST: Duration = Duration::from_millis(1);
const REST_WINDOW: Duration = Duration::from_millis(50);
const REST_LIMIT: Duration = Duration::from_secs(10);

const TORCH_SERVER: &str = include_str!("torch_server.py");

/// Which server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Bare,
    Phalanx,
    Libuv,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Phalanx => "phalanx",
            Self::Libuv => "libuv",
        }
    }
}

/// How servers are started.
pub(crate) struct Launcher {
    executable: PathBuf,
    python: Option<PathBuf>,
}

impl Launcher {
    pub(crate) fn new(python: Option<&Path>) -> Result<Self, Failure> {
        Ok(Self {
            executable: std::env::current_exe()?,
            python: python.map(Path::to_owned),
        })
    }

    /// This program again, with other arguments.
    pub(crate) fn own(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command.env_remove("PHALANX_TOKEN");
        command
    }

    pub(crate) fn phalanx(&self) -> Result<Server, Failure> {
        let mut command = self.own();
        command.args(["store", "--until-eof", "--bind", "127.0.0.1:0"]);
        Server::start(Kind::Phalanx, command)
    }

    pub(crate) fn bare(&self, pattern: Pattern) -> Result<Server, Failure> {
        let mut command = self.own();
        let pattern = match pattern {
            Pattern::Torch => "torch",
            Pattern::Pipelined => "pipelined",
        };
        command.args(["bench", "bare", pattern]);
        Server::start(Kind::Bare, command)
    }

    pub(crate) fn libuv(&self) -> Result<Server, Failure> {
        Server::start(Kind::Libuv, self.torch("inet"))
    }

    /// Either server, listening on `[::]` as PyTorch's does by default, with `resolver` to ask.
    pub(crate) fn named(&self, kind: Kind, resolver: &Resolver) -> Result<Server, Failure> {
        let command = match kind {
            Kind::Libuv => self.torch("default"),
            _ => {
                let mut command = self.own();
                command.args(["store", "--until-eof", "--bind", "[::]:0"]);
                command
            }
        };
        Server::start(kind, resolver.confine(&command))
    }

    fn torch(&self, listen: &str) -> Command {
        let python = self.python.as_deref().unwrap_or(Path::new("python3"));
        let mut command = Command::new(python);
        command.args(["-c", TORCH_SERVER, listen]);
        command
    }
}

/// A running server.
pub(crate) struct Server {
    pub(crate) kind: Kind,
    pub(crate) addr: SocketAddrV4,
    /// What it says about itself.
    pub(crate) version: String,
    child: Child,
}

impl Server {
    fn start(kind: Kind, mut command: Command) -> Result<Self, Failure> {
        if kind == Kind::Libuv {
            // PyTorch warns about what is asked of it here.
            command.stderr(Stdio::null());
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|err| format!("starting {:?}: {err}", command.get_program()))?;
        let stdout = child.stdout.take().expect("stdout is a pipe");
        let mut server = Self {
            kind,
            addr: SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0),
            version: String::new(),
            child,
        };
        let (sender, line) = mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            let _ = BufReader::new(stdout).read_line(&mut line);
            let _ = sender.send(line);
        });
        let line = line.recv_timeout(START_LIMIT).unwrap_or_default();
        let (port, version) = parse_greeting(&line).ok_or_else(|| {
            let hint = match kind {
                Kind::Libuv => "; does this Python have torch 2.13?",
                _ => "",
            };
            format!("the {} server did not start{hint}", kind.name())
        })?;
        server.addr.set_port(port);
        server.version = version;
        Ok(server)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until it has digested what the last window left, closed connections above all.
    pub(crate) fn rest(&self) -> Result<(), Failure> {
        let begin = Instant::now();
        let mut used = cpu::used_by(self.pid())?;
        while begin.elapsed() < REST_LIMIT {
            std::thread::sleep(REST_WINDOW);
            let now = cpu::used_by(self.pid())?;
            if now - used < REST {
                break;
            }
            used = now;
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `listening on ADDRESS:PORT` and maybe more.
fn parse_greeting(line: &str) -> Option<(u16, String)> {
    let rest = line.strip_prefix("listening on ")?.trim_end();
    let (addr, version) = rest.split_once(' ').unwrap_or((rest, ""));
    let addr: SocketAddr = addr.parse().ok()?;
    Some((addr.port(), version.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greetings_give_the_port_and_the_version() {
        let greeting = |line| parse_greeting(line);
        assert_eq!(
            greeting("listening on 127.0.0.1:80\n"),
            Some((80, String::new()))
        );
        assert_eq!(
            greeting("listening on [::]:81\n"),
            Some((81, String::new()))
        );
        let torch = "listening on 127.0.0.1:82 PyTorch 2.13.0\n";
        assert_eq!(greeting(torch), Some((82, "PyTorch 2.13.0".into())));
        assert_eq!(greeting("Traceback (most recent call last):\n"), None);
        assert_eq!(greeting(""), None);
    }
}
