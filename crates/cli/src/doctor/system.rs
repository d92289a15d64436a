//! Processors, memory, limits and networks of this machine.

use rustix::fs::{MemfdFlags, memfd_create, statvfs};
use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use super::Finding;
use crate::run::cores;

#[derive(Debug, Serialize)]
pub(super) struct System {
    host: String,
    kernel: String,
    /// Processors that this process may use.
    processors: usize,
    /// Processors of the machine.
    processors_online: usize,
    /// Cores that they belong to.
    cores: usize,
    /// Why no memory can be shared through memfd.
    memfd_error: Option<String>,
    dev_shm_free_bytes: Option<u64>,
    open_files: Limit,
    locked_memory_bytes: Limit,
    interfaces: Vec<Interface>,
    /// Why no server can listen on loopback.
    loopback_error: Option<String>,
}

/// `None`: unlimited.
#[derive(Debug, Serialize)]
struct Limit {
    now: Option<u64>,
    at_most: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Interface {
    name: String,
    addresses: Vec<String>,
    loopback: bool,
}

/// Open files that a rank of a middle-sized job needs, with sockets to its peers.
const FEW_OPEN_FILES: u64 = 1024;
const LITTLE_SHM: u64 = 256 << 20;

impl System {
    pub(super) fn read() -> Self {
        let uname = rustix::system::uname();
        let cores = cores::available();
        let online = std::fs::read_dir("/sys/devices/system/cpu").map(|entries| {
            let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
            let number = |name: &String| {
                name.strip_prefix("cpu")
                    .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
            };
            names.filter(number).count()
        });
        let processors = cores.iter().map(Vec::len).sum();
        Self {
            host: uname.nodename().to_string_lossy().into_owned(),
            kernel: uname.release().to_string_lossy().into_owned(),
            processors,
            processors_online: online.unwrap_or(processors),
            cores: cores.len(),
            memfd_error: memfd_error(),
            dev_shm_free_bytes: statvfs("/dev/shm").ok().map(|fs| fs.f_bavail * fs.f_frsize),
            open_files: limit(Resource::Nofile),
            locked_memory_bytes: limit(Resource::Memlock),
            interfaces: interfaces(),
            loopback_error: std::net::TcpListener::bind("127.0.0.1:0")
                .err()
                .map(|err| err.to_string()),
        }
    }

    pub(super) fn findings(&self) -> Vec<Finding> {
        let mut found = Vec::new();
        if let Some(err) = &self.memfd_error {
            found.push(Finding::problem(format!(
                "no shared memory between ranks: memfd_create with sealing fails: {err}"
            )));
        }
        if let Some(err) = &self.loopback_error {
            found.push(Finding::problem(format!(
                "nothing can listen on 127.0.0.1: {err}; in a new network namespace: ip link set \
                 lo up"
            )));
        }
        if self.open_files.at_most.is_some_and(|n| n < FEW_OPEN_FILES) {
            found.push(Finding::warning(format!(
                "a process may open {} files at most, each peer takes some: raise the hard limit \
                 (ulimit -Hn) to {FEW_OPEN_FILES} or more",
                text(self.open_files.at_most)
            )));
        }
        if self
            .dev_shm_free_bytes
            .is_some_and(|free| free < LITTLE_SHM)
        {
            found.push(Finding::advice(
                "little space is left in /dev/shm, which MPI and PyTorch's data loaders use (in \
                 Docker: --shm-size); phalanx itself does not",
            ));
        }
        if self.interfaces.iter().all(|interface| interface.loopback) {
            found.push(Finding::advice(
                "there is no network interface but loopback: jobs on this host only",
            ));
        }
        found
    }

    pub(super) fn print(&self) {
        println!("\nmachine {} (Linux {})", self.host, self.kernel);
        println!(
            "  processors     {} of {}, on {} cores; phalanx run binds up to {} ranks",
            self.processors, self.processors_online, self.cores, self.cores
        );
        let memfd = match &self.memfd_error {
            None => "works",
            Some(err) => err,
        };
        println!("  shared memory  memfd {memfd}");
        if let Some(free) = self.dev_shm_free_bytes {
            println!("  /dev/shm       {} MiB free", free >> 20);
        }
        let Limit { now, at_most } = &self.open_files;
        println!(
            "  open files     {}, at most {}",
            text(*now),
            text(*at_most)
        );
        let Limit { now, at_most } = &self.locked_memory_bytes;
        println!(
            "  locked memory  {} bytes, at most {}",
            text(*now),
            text(*at_most)
        );
        println!("\ninterfaces");
        for interface in &self.interfaces {
            println!(
                "  {:<10} {}",
                interface.name,
                interface.addresses.join(", ")
            );
        }
    }
}

fn text(limit: Option<u64>) -> String {
    limit.map_or("unlimited".to_owned(), |limit| limit.to_string())
}

fn limit(resource: Resource) -> Limit {
    let limit = getrlimit(resource);
    Limit {
        now: limit.current,
        at_most: limit.maximum,
    }
}

fn memfd_error() -> Option<String> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let made =
        memfd_create("phalanx-doctor", flags).and_then(|fd| rustix::fs::ftruncate(&fd, 4096));
    made.err().map(|err| err.to_string())
}

fn interfaces() -> Vec<Interface> {
    let mut found: Vec<Interface> = Vec::new();
    for address in if_addrs::get_if_addrs().unwrap_or_default() {
        let ip = address.ip().to_string();
        match found.iter_mut().find(|known| known.name == address.name) {
            Some(known) => known.addresses.push(ip),
            None => found.push(Interface {
                loopback: address.is_loopback(),
                name: address.name,
                addresses: vec![ip],
            }),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_will_not_work_is_a_problem_and_what_is_scarce_is_not() {
        let mut system = System::read();
        system.memfd_error = Some("function not implemented".into());
        system.open_files.at_most = Some(64);
        let found = system.findings();
        let levels: Vec<_> = found.iter().map(|finding| finding.level).collect();
        assert!(levels.contains(&super::super::Level::Problem), "{found:?}");
        assert!(levels.contains(&super::super::Level::Warning), "{found:?}");
    }
}
