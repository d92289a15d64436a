//! Which ranks share a host.

use std::collections::BTreeMap;
use std::sync::Arc;

use phalanx_pg::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::between::Cut;

/// Overrides what a host is known by, so that tests can make several of one.
pub(crate) const HOST_VAR: &str = "PHALANX_HOST_ID";

/// What a rank tells the others about where it runs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Notes {
    /// Ranks with the same one can connect by local sockets and share memory.
    pub(crate) host: String,
    /// The processors it may run on, by number.
    pub(crate) cpus: Vec<u32>,
    /// How it would cut what goes to other hosts.
    pub(crate) cut: Cut,
}

impl Notes {
    /// About this process.
    pub(crate) fn of_this_process() -> Result<Self> {
        Ok(Self {
            host: std::env::var(HOST_VAR).unwrap_or_else(|_| host_id()),
            cpus: cpus(),
            cut: Cut::from_environment()?,
        })
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        postcard::to_stdvec(self).map_err(|err| Error::new(ErrorKind::Backend, err.to_string()))
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        postcard::from_bytes(bytes).map_err(|_| {
            let what = "a rank describes its host in another way; do all run the same version?";
            Error::new(ErrorKind::Backend, what)
        })
    }
}

/// The kernel that runs, the network that local sockets are in, and the user who may use them.
fn host_id() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    // The thread's, as its sockets are; a process may be in several.
    let network = std::fs::read_link("/proc/thread-self/ns/net").unwrap_or_default();
    let user = rustix::process::geteuid().as_raw();
    format!("{} {} {user}", boot.trim(), network.display())
}

fn cpus() -> Vec<u32> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else {
        return Vec::new();
    };
    let may_run = |&cpu: &usize| set.is_set(cpu);
    (0..rustix::thread::CpuSet::MAX_CPU)
        .filter(may_run)
        .map(|cpu| cpu as u32)
        .collect()
}

/// Which ranks of the world are on which host. The same on all ranks.
#[derive(Debug, Clone)]
pub(crate) struct HostMap {
    /// By rank: the number of its host, in the order of their lowest ranks.
    host_of: Arc<[usize]>,
    /// By host: whether every rank on it has a processor to itself.
    cores_suffice: Arc<[bool]>,
}

impl HostMap {
    /// As the ranks' notes say.
    pub(crate) fn new(notes: &[Notes]) -> Self {
        let mut numbers = BTreeMap::new();
        let host_of: Vec<usize> = notes
            .iter()
            .map(|notes| {
                let next = numbers.len();
                *numbers.entry(notes.host.as_str()).or_insert(next)
            })
            .collect();
        let suffice = |host: usize| {
            let on_it = || (0..notes.len()).filter(|&rank| host_of[rank] == host);
            let cpus = on_it().flat_map(|rank| &notes[rank].cpus);
            let cpus: std::collections::BTreeSet<_> = cpus.collect();
            on_it().count() <= cpus.len()
        };
        let cores_suffice = (0..numbers.len()).map(suffice).collect();
        Self {
            host_of: host_of.into(),
            cores_suffice,
        }
    }

    /// As if every rank had a host of its own.
    pub(crate) fn apart(size: usize) -> Self {
        Self {
            host_of: (0..size).collect(),
            cores_suffice: (0..size).map(|_| true).collect(),
        }
    }

    /// The number of a rank's host.
    pub(crate) fn host(&self, rank: usize) -> usize {
        self.host_of[rank]
    }

    /// Whether two ranks can share memory.
    pub(crate) fn together(&self, a: usize, b: usize) -> bool {
        self.host_of[a] == self.host_of[b]
    }

    /// The other ranks on the same host.
    pub(crate) fn neighbours(&self, rank: usize) -> impl Iterator<Item = usize> {
        (0..self.host_of.len()).filter(move |&other| other != rank && self.together(rank, other))
    }

    /// Whether every rank on the host of `rank` has a processor to itself.
    pub(crate) fn cores_suffice(&self, rank: usize) -> bool {
        self.cores_suffice[self.host_of[rank]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(host: &str, cpus: &[u32]) -> Notes {
        Notes {
            host: host.into(),
            cpus: cpus.to_vec(),
            cut: Cut::default(),
        }
    }

    #[test]
    fn hosts_are_numbered_by_their_lowest_rank() {
        let map = HostMap::new(&[
            notes("b", &[0, 1]),
            notes("a", &[0]),
            notes("b", &[0, 1]),
            notes("a", &[1]),
        ]);
        assert_eq!([0, 1, 2, 3].map(|rank| map.host(rank)), [0, 1, 0, 1]);
        assert_eq!(map.neighbours(2).collect::<Vec<_>>(), [0]);
        assert!(map.cores_suffice(0) && map.cores_suffice(1));
    }

    #[test]
    fn pinned_ranks_have_cores_if_they_are_different_ones() {
        let apart = HostMap::new(&[notes("a", &[0]), notes("a", &[1])]);
        assert!(apart.cores_suffice(0));
        let stacked = HostMap::new(&[notes("a", &[0]), notes("a", &[0])]);
        assert!(!stacked.cores_suffice(0));
    }
}
