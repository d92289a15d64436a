//! The processes of a job as one of them sees them: connections, shared memory, groups.
//!
//! A domain begins with the world's connections and ends with the last of its groups. Nothing of
//! it is used again afterwards: a new world has new connections and new memory. One thread per
//! process, the *service*, reads what peers say, notices who is gone, and watches deadlines.

pub(crate) mod frame;
pub(crate) mod outbox;
mod service;

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Condvar, Mutex};
use phalanx_pg::mesh::Stream;
use phalanx_pg::{Error, ErrorKind, Result};
use phalanx_store::{JobToken, Store};

use crate::between::Cut;
use crate::host_map::HostMap;
use crate::kernels::Kernels;
use crate::maps::Maps;
use crate::meet::World;
use crate::member::Member;
use crate::shm::{Arenas, Segment};
use frame::{GroupId, Head, Kind};
use outbox::{Outbox, Outgoing};
use service::Service;

/// Most control segments that wait for this process to join their groups.
const MAX_OFFERS: usize = 4096;

/// One process of a job.
pub(crate) struct Domain {
    /// Own rank in the world.
    pub(crate) rank: usize,
    pub(crate) hosts: HostMap,
    pub(crate) kernels: Kernels,
    pub(crate) arenas: Arc<Arenas>,
    pub(crate) maps: Arc<Maps>,
    /// For the connections of groups across hosts.
    pub(crate) store: Arc<dyn Store>,
    pub(crate) token: Option<JobToken>,
    /// The address that other hosts reach this process at.
    pub(crate) bind: Option<IpAddr>,
    /// How what goes to other hosts is cut.
    pub(crate) cut: Cut,
    links: Arc<Links>,
    service: Option<Service>,
}

/// Connections to all processes, and who is in which group.
pub(crate) struct Links {
    peers: Vec<Option<Peer>>,
    groups: Mutex<HashMap<GroupId, Weak<Member>>>,
    offers: Mutex<HashMap<GroupId, (Arc<Segment>, usize)>>,
    offered: Condvar,
    maps: Arc<Maps>,
    wake: OwnedFd,
}

struct Peer {
    /// Writing; the service reads from its own handle of it.
    stream: Mutex<(Stream, Outbox)>,
    /// It has left in order, or is lost.
    gone: AtomicBool,
}

impl Domain {
    pub(crate) fn start(
        rank: usize,
        world: World,
        kernels: Kernels,
        store: Arc<dyn Store>,
        token: Option<JobToken>,
    ) -> Result<Arc<Self>> {
        let World {
            hosts,
            cut,
            bind,
            streams,
        } = world;
        let maps = Arc::new(Maps::new(streams.len()));
        let (links, readers) = Links::new(streams, Arc::clone(&maps))?;
        let announce = {
            let (links, maps, hosts) = (Arc::clone(&links), Arc::clone(&maps), hosts.clone());
            move |index: u32, segment: &Arc<Segment>| {
                maps.add(rank, index, Arc::clone(segment));
                let head = Head {
                    a: index.into(),
                    b: segment.len() as u64,
                    ..Head::new(Kind::Arena, [0; 16])
                };
                for peer in hosts.neighbours(rank) {
                    let frame = Outgoing::new(head, &[]).with_segment(Arc::clone(segment));
                    links.send(peer, frame);
                }
            }
        };
        let service = Service::start(Arc::clone(&links), readers)?;
        Ok(Arc::new(Self {
            rank,
            hosts,
            kernels,
            arenas: Arenas::new(Box::new(announce)),
            maps,
            store,
            token,
            bind,
            cut,
            links,
            service: Some(service),
        }))
    }

    pub(crate) fn links(&self) -> &Arc<Links> {
        &self.links
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        for peer in 0..self.links.peers.len() {
            self.links
                .send(peer, Outgoing::new(Head::new(Kind::Bye, [0; 16]), &[]));
        }
        if let Some(service) = self.service.take() {
            service.stop();
        }
    }
}

impl Links {
    fn new(
        streams: Vec<Option<Stream>>,
        maps: Arc<Maps>,
    ) -> Result<(Arc<Self>, Vec<Option<Stream>>)> {
        let mut readers = Vec::with_capacity(streams.len());
        let mut peers = Vec::with_capacity(streams.len());
        for stream in streams {
            let Some(stream) = stream else {
                readers.push(None);
                peers.push(None);
                continue;
            };
            stream
                .set_nonblocking(true)
                .map_err(|err| os_error("setting up a socket", &err))?;
            readers.push(Some(copy_of(&stream)?));
            peers.push(Some(Peer {
                stream: Mutex::new((stream, Outbox::default())),
                gone: AtomicBool::new(false),
            }));
        }
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let wake = rustix::event::eventfd(0, flags)
            .map_err(|err| os_error("creating an event", &err.into()))?;
        let links = Self {
            peers,
            groups: Mutex::default(),
            offers: Mutex::default(),
            offered: Condvar::new(),
            maps,
            wake,
        };
        Ok((Arc::new(links), readers))
    }

    /// Sends a frame to a process, now as far as it goes and the rest when it can. What is for a
    /// process that is gone is dropped.
    pub(crate) fn send(&self, peer: usize, frame: Outgoing) {
        let Some(link) = self.peers.get(peer).and_then(Option::as_ref) else {
            return;
        };
        if link.gone.load(Ordering::Acquire) {
            return;
        }
        let mut sent = Vec::new();
        let mut guard = link.stream.lock();
        let (stream, outbox) = &mut *guard;
        outbox.push(frame);
        // That a peer is gone is for the reader to find out: it may have said why.
        let written = outbox.write(stream, |ticket| sent.push(ticket));
        let more = written.is_ok() && !outbox.is_empty();
        drop(guard);
        self.tell_sent(sent);
        if more {
            self.wake();
        }
    }

    /// Writes what waits for a process; whether something is left.
    fn write_on(&self, peer: usize) -> bool {
        let Some(link) = self.peers.get(peer).and_then(Option::as_ref) else {
            return false;
        };
        let mut sent = Vec::new();
        let mut guard = link.stream.lock();
        let (stream, outbox) = &mut *guard;
        let written = outbox.write(stream, |ticket| sent.push(ticket));
        let more = written.is_ok() && !outbox.is_empty();
        drop(guard);
        self.tell_sent(sent);
        more
    }

    fn has_more(&self, peer: usize) -> bool {
        let link = self.peers.get(peer).and_then(Option::as_ref);
        link.is_some_and(|link| !link.stream.lock().1.is_empty())
    }

    fn tell_sent(&self, sent: Vec<(GroupId, u64)>) {
        for (group, ticket) in sent {
            if let Some(member) = self.member(&group) {
                member.messages().sent(ticket);
            }
        }
    }

    fn wake(&self) {
        // Full means that it is awake.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn member(&self, group: &GroupId) -> Option<Arc<Member>> {
        self.groups.lock().get(group)?.upgrade()
    }

    fn members(&self) -> Vec<Arc<Member>> {
        let mut groups = self.groups.lock();
        groups.retain(|_, member| member.strong_count() > 0);
        groups.values().filter_map(Weak::upgrade).collect()
    }

    /// From now on what is said about the group reaches the member.
    pub(crate) fn register(&self, group: GroupId, member: &Arc<Member>) {
        self.groups.lock().insert(group, Arc::downgrade(member));
    }

    /// Whether a process is known to be gone.
    pub(crate) fn is_gone(&self, peer: usize) -> bool {
        let link = self.peers.get(peer).and_then(Option::as_ref);
        link.is_some_and(|link| link.gone.load(Ordering::Acquire))
    }

    /// The control segment of a group, once the process that made it has sent it; with that
    /// process's rank. `None` if it does not come within `limit`.
    pub(crate) fn await_control(
        &self,
        group: &GroupId,
        limit: std::time::Duration,
    ) -> Option<(Arc<Segment>, usize)> {
        let mut offers = self.offers.lock();
        if !offers.contains_key(group) {
            self.offered.wait_for(&mut offers, limit);
        }
        offers.remove(group)
    }

    fn offer(&self, group: GroupId, segment: Arc<Segment>, from: usize) {
        let mut offers = self.offers.lock();
        if offers.len() < MAX_OFFERS {
            offers.insert(group, (segment, from));
            self.offered.notify_all();
        }
    }
}

fn copy_of(stream: &Stream) -> Result<Stream> {
    let copy = match stream {
        Stream::Tcp(stream) => stream.try_clone().map(Stream::Tcp),
        Stream::Unix(stream) => stream.try_clone().map(Stream::Unix),
    };
    copy.map_err(|err| os_error("duplicating a socket", &err))
}

/// The operating system refused `what`.
pub(crate) fn os_error(what: &str, err: &std::io::Error) -> Error {
    Error::new(ErrorKind::Backend, format!("{what}: {err}"))
}
