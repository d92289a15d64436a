//! "Hosts" on one machine: network namespaces joined by veth.
//!
//! Each namespace lives as long as a process in it, which ends with this one: whatever happens to
//! the bench, nothing is left behind. Nothing is added to the machine's own namespace.

use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::process::{Child, Command, Stdio};

use crate::Failure;

/// The interface of every namespace.
pub(crate) const INTERFACE: &str = "eth0";

/// One network namespace for each host.
pub(crate) struct Namespaces {
    hosts: Vec<Namespace>,
    /// Where the bridge is, if there are more than two to join.
    _bridge: Option<Namespace>,
}

impl Namespaces {
    pub(crate) fn new(hosts: usize) -> Result<Self, Failure> {
        let hosts = (0..hosts)
            .map(|_| Namespace::new())
            .collect::<Result<Vec<_>, _>>()?;
        let bridge = match &hosts[..] {
            [_] => None,
            [left, right] => {
                left.ip(&format!(
                    "link add {INTERFACE} type veth peer {INTERFACE} netns {}",
                    right.pid()
                ))?;
                None
            }
            _ => Some(join(&hosts)?),
        };
        for (number, host) in hosts.iter().enumerate() {
            host.ip("link set lo up")?;
            if hosts.len() > 1 {
                host.ip(&format!(
                    "address add {}/16 dev {INTERFACE}",
                    address(number)
                ))?;
                host.ip(&format!("link set {INTERFACE} up"))?;
            }
        }
        Ok(Self {
            hosts,
            _bridge: bridge,
        })
    }

    pub(crate) fn count(&self) -> usize {
        self.hosts.len()
    }

    /// Lets no more than this out of any namespace.
    pub(crate) fn limit(&self, mbit: u32) -> Result<(), Failure> {
        // More than the largest segment that is handed to the line in one piece.
        let bucket = "burst 256kb latency 50ms";
        let limit = format!("qdisc add dev {INTERFACE} root tbf rate {mbit}mbit {bucket}");
        self.hosts
            .iter()
            .try_for_each(|host| host.run("tc", &limit))
    }

    /// The same command, on a host.
    pub(crate) fn confine(&self, host: usize, command: &Command) -> Command {
        let mut confined = self.hosts[host].enter();
        confined.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => confined.env(name, value),
                None => confined.env_remove(name),
            };
        }
        confined
    }
}

/// A bridge with a line to every host.
fn join(hosts: &[Namespace]) -> Result<Namespace, Failure> {
    let bridge = Namespace::new()?;
    bridge.ip("link add bridge type bridge")?;
    bridge.ip("link set bridge up")?;
    for (number, host) in hosts.iter().enumerate() {
        bridge.ip(&format!(
            "link add to{number} type veth peer {INTERFACE} netns {}",
            host.pid()
        ))?;
        bridge.ip(&format!("link set to{number} master bridge up"))?;
    }
    Ok(bridge)
}

/// A host's address.
pub(crate) fn address(host: usize) -> Ipv4Addr {
    let [high, low] = (host as u16 + 1).to_be_bytes();
    Ipv4Addr::new(10, 86, high, low)
}

struct Namespace {
    /// Ends when its input does.
    holder: Child,
}

impl Namespace {
    fn new() -> Result<Self, Failure> {
        let mut holder = Command::new("unshare")
            .args(["--net", "sh", "-c", "echo ready && exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|err| format!("starting unshare: {err}"))?;
        let stdout = holder.stdout.take().expect("stdout is a pipe");
        let namespace = Self { holder };
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        match line == "ready\n" {
            true => Ok(namespace),
            false => Err("no network namespace could be made; root may make them".into()),
        }
    }

    fn pid(&self) -> u32 {
        self.holder.id()
    }

    fn enter(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.pid()));
        command
    }

    fn ip(&self, arguments: &str) -> Result<(), Failure> {
        self.run("ip", arguments)
    }

    fn run(&self, program: &str, arguments: &str) -> Result<(), Failure> {
        let mut command = self.enter();
        command
            .arg(program)
            .args(arguments.split(' '))
            .stdin(Stdio::null());
        let output = command
            .output()
            .map_err(|err| format!("starting nsenter: {err}"))?;
        match output.status.success() {
            true => Ok(()),
            false => {
                let reason = String::from_utf8_lossy(&output.stderr);
                Err(format!("{program} {arguments}: {}", reason.trim()).into())
            }
        }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
