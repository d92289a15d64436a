//! Connections between all processes of a job, beside gloo's.
//!
//! Gloo says that some connection has closed, not which rank is gone or why. So every two
//! processes have one more connection, on which they tell each other why a group ends, and whose
//! end is the end of the process. These connections prove the job token; gloo's own cannot.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use phalanx_pg::mesh::{Meeting, Stream, Way};
use phalanx_pg::registry::GroupInit;
use phalanx_pg::{Error, ErrorKind, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::frame::{Assembly, Frame, GroupId, Saying};
use crate::member::Member;

/// How often groups look whether somebody who leaves still holds them up.
const PERIOD: Duration = Duration::from_millis(50);

/// How long a word may take to go out to a process that stands still with full buffers.
const WRITE_LIMIT: Duration = Duration::from_secs(2);

/// Most words that wait for this process to join their groups.
const MAX_EARLY: usize = 4096;

/// The links of one process, by rank in the world.
pub(crate) struct Links {
    peers: Vec<Option<Peer>>,
    groups: Mutex<Groups>,
    wake: OwnedFd,
    stop: AtomicBool,
}

struct Peer {
    writer: Mutex<Stream>,
    gone: AtomicBool,
}

#[derive(Default)]
struct Groups {
    members: HashMap<GroupId, Weak<Member>>,
    /// What came before the own side of its group was there: from whom, and what.
    early: Vec<(usize, Frame)>,
}

/// The links with the thread that reads them; ends them when dropped.
pub(crate) struct Service {
    links: Arc<Links>,
    thread: Option<JoinHandle<()>>,
}

impl Service {
    /// Meets all ranks of the world. A collective call.
    pub(crate) fn start(init: &GroupInit, prefix: &str, limit: Duration) -> Result<Self> {
        let meeting = Meeting {
            store: init.store.second_handle()?,
            prefix: prefix.to_owned(),
            name: &init.name,
            rank: init.rank,
            size: init.world_size,
            bind: init.bind,
            token: init.token.as_ref(),
            limit,
            give_up: &|| None,
        };
        let streams = meeting.connect(&[], |all| Ok(vec![Way::Tcp; all.len()]))?;
        let mut peers = Vec::new();
        let mut readers = Vec::new();
        for (rank, stream) in streams.into_iter().enumerate() {
            let Some(stream) = stream else {
                peers.push(None);
                continue;
            };
            readers.push(Reader {
                rank,
                stream: prepare(&stream).map_err(|err| os_error("setting up a socket", &err))?,
                assembly: Assembly::default(),
            });
            peers.push(Some(Peer {
                writer: Mutex::new(stream),
                gone: AtomicBool::new(false),
            }));
        }
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|err| os_error("creating an event", &err.into()))?;
        let links = Arc::new(Links {
            peers,
            groups: Mutex::default(),
            wake,
            stop: AtomicBool::new(false),
        });
        let watched = Arc::clone(&links);
        let thread = std::thread::Builder::new()
            .name("phalanx-gloo".into())
            .spawn(move || watched.watch(readers))
            .map_err(|err| os_error("starting a thread", &err))?;
        Ok(Self {
            links,
            thread: Some(thread),
        })
    }

    pub(crate) fn links(&self) -> &Arc<Links> {
        &self.links
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.links.stop.store(true, Ordering::Release);
        // Full means that it is awake.
        let _ = rustix::io::write(&self.links.wake, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take()
            // The last handle of a group may be dropped by the thread itself.
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!(target: "phalanx::gloo", "the thread of the links panicked");
        }
    }
}

/// A second handle to read from; writing to the first is bounded.
fn prepare(stream: &Stream) -> std::io::Result<Stream> {
    match stream {
        Stream::Tcp(stream) => {
            stream.set_write_timeout(Some(WRITE_LIMIT))?;
            stream.try_clone().map(Stream::Tcp)
        }
        Stream::Unix(stream) => {
            stream.set_write_timeout(Some(WRITE_LIMIT))?;
            stream.try_clone().map(Stream::Unix)
        }
    }
}

struct Reader {
    rank: usize,
    stream: Stream,
    assembly: Assembly,
}

impl Links {
    /// Tells a process something. Not if it is gone, which is for its reader to find out.
    pub(crate) fn tell(&self, rank: usize, group: GroupId, saying: Saying) {
        let Some(peer) = self.peers.get(rank).and_then(Option::as_ref) else {
            return;
        };
        if !peer.gone.load(Ordering::Acquire) {
            let bytes = Frame { group, saying }.encode();
            if let Err(err) = peer.writer.lock().write_all(&bytes) {
                tracing::debug!(target: "phalanx::gloo", "rank {rank} was not told: {err}");
            }
        }
    }

    /// Whether a process is known to have ended.
    pub(crate) fn is_gone(&self, rank: usize) -> bool {
        let peer = self.peers.get(rank).and_then(Option::as_ref);
        peer.is_some_and(|peer| peer.gone.load(Ordering::Acquire))
    }

    /// From now on what is said about the group reaches its member.
    pub(crate) fn register(&self, member: &Arc<Member>) {
        let mut groups = self.groups.lock();
        groups.members.insert(member.id(), Arc::downgrade(member));
        let (mine, others) = std::mem::take(&mut groups.early)
            .into_iter()
            .partition(|(_, frame)| frame.group == member.id());
        groups.early = others;
        drop(groups);
        let mine: Vec<(usize, Frame)> = mine;
        mine.into_iter()
            .for_each(|(from, frame)| member.told(from, frame.saying));
        for rank in (0..self.peers.len()).filter(|&rank| self.is_gone(rank)) {
            member.process_ended(rank);
        }
    }

    fn watch(&self, mut readers: Vec<Reader>) {
        while !self.stop.load(Ordering::Acquire) {
            for at in self.wait(&readers).into_iter().rev() {
                let reader = &mut readers[at];
                if !self.listen(reader) {
                    let rank = reader.rank;
                    readers.swap_remove(at);
                    self.ended(rank);
                }
            }
            for member in self.members() {
                member.look_around();
            }
        }
    }

    /// The readers with something to read, in ascending order.
    fn wait(&self, readers: &[Reader]) -> Vec<usize> {
        let fds = readers.iter().map(|reader| reader.stream.as_fd());
        let mut polled: Vec<PollFd<'_>> = fds
            .chain([self.wake.as_fd()])
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let period = Timespec {
            tv_sec: 0,
            tv_nsec: PERIOD.subsec_nanos().into(),
        };
        if poll(&mut polled, Some(&period)).is_err() {
            // Interrupted.
            return Vec::new();
        }
        let ready = |&at: &usize| !polled[at].revents().is_empty();
        (0..readers.len()).filter(ready).collect()
    }

    /// Reads what is there; whether there may be more.
    fn listen(&self, reader: &mut Reader) -> bool {
        let mut bytes = [0; 4096];
        let frames = match reader.stream.read(&mut bytes) {
            Ok(0) => return false,
            Ok(count) => reader.assembly.feed(&bytes[..count], self.peers.len()),
            Err(err) if err.kind() == std::io::ErrorKind::Interrupted => return true,
            Err(_) => return false,
        };
        match frames {
            Ok(frames) => {
                for frame in frames {
                    self.deliver(reader.rank, frame);
                }
                true
            }
            Err(what) => {
                let rank = reader.rank;
                tracing::warn!(target: "phalanx::gloo", "rank {rank} sent {what}, cut off");
                false
            }
        }
    }

    fn deliver(&self, from: usize, frame: Frame) {
        let mut groups = self.groups.lock();
        let known = groups.members.get(&frame.group).map(Weak::upgrade);
        match known {
            None if groups.early.len() < MAX_EARLY => groups.early.push((from, frame)),
            None | Some(None) => {}
            Some(Some(member)) => {
                drop(groups);
                member.told(from, frame.saying);
            }
        }
    }

    fn members(&self) -> Vec<Arc<Member>> {
        let groups = self.groups.lock();
        groups.members.values().filter_map(Weak::upgrade).collect()
    }

    fn ended(&self, rank: usize) {
        if let Some(Some(peer)) = self.peers.get(rank) {
            peer.gone.store(true, Ordering::Release);
        }
        for member in self.members() {
            member.process_ended(rank);
        }
    }
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Service({} ranks)", self.links.peers.len())
    }
}

/// The operating system refused `what`.
pub(crate) fn os_error(what: &str, err: &std::io::Error) -> Error {
    Error::new(ErrorKind::Backend, format!("{what}: {err}"))
}
