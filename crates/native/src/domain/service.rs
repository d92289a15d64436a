//! The thread that listens to the other processes.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use phalanx_pg::mesh::Stream;
use phalanx_pg::{Error, ErrorKind, Notice, Result};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};

use super::frame::{Assembly, Head, Kind};
use super::{Links, os_error};
use crate::shm::Segment;

/// How often deadlines of messages are looked at.
const PERIOD: Duration = Duration::from_millis(100);

/// How long a process that leaves waits for its last words to go out.
const LINGER: Duration = Duration::from_secs(2);

/// Bytes read from a process in one go.
const PORTION: usize = 256 << 10;

/// Most descriptors of one process that wait for their frames.
const MAX_DESCRIPTORS: usize = 64;

/// The running thread.
pub(crate) struct Service {
    links: Arc<Links>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Service {
    pub(super) fn start(links: Arc<Links>, streams: Vec<Option<Stream>>) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let readers = streams.into_iter().enumerate();
        let readers = readers.filter_map(|(rank, stream)| {
            Some(Reader {
                rank,
                stream: stream?,
                assembly: Assembly::default(),
                descriptors: VecDeque::new(),
                left: false,
            })
        });
        let watch = Watch {
            links: Arc::clone(&links),
            stop: Arc::clone(&stop),
            readers: readers.collect(),
            portion: vec![0; PORTION],
        };
        let thread = std::thread::Builder::new()
            .name("phalanx-service".into())
            .spawn(move || watch.run())
            .map_err(|err| os_error("starting a thread", &err))?;
        Ok(Self {
            links,
            stop,
            thread,
        })
    }

    /// Ends the thread once what waits to be written is written, or after a while.
    pub(super) fn stop(self) {
        self.stop.store(true, Ordering::Release);
        self.links.wake();
        // The last handle of a group may have been dropped by the thread itself.
        if self.thread.thread().id() != std::thread::current().id() && self.thread.join().is_err() {
            tracing::error!(target: "phalanx::native", "the service thread panicked");
        }
    }
}

struct Watch {
    links: Arc<Links>,
    stop: Arc<AtomicBool>,
    readers: Vec<Reader>,
    portion: Vec<u8>,
}

struct Reader {
    rank: usize,
    stream: Stream,
    assembly: Assembly,
    /// Descriptors that have come and whose frames have not been read yet.
    descriptors: VecDeque<OwnedFd>,
    /// It has said goodbye.
    left: bool,
}

impl Watch {
    fn run(mut self) {
        let mut stopping: Option<Instant> = None;
        loop {
            if self.stop.load(Ordering::Acquire) {
                let since = *stopping.get_or_insert_with(Instant::now);
                let unwritten = self
                    .readers
                    .iter()
                    .any(|reader| self.links.has_more(reader.rank));
                if !unwritten || since.elapsed() > LINGER {
                    return;
                }
            }
            for at in self.poll() {
                self.attend(at);
            }
            self.readers
                .retain(|reader| !self.links.is_gone(reader.rank));
            let now = Instant::now();
            for member in self.links.members() {
                member.look_around(now);
            }
        }
    }

    /// Waits until somebody has something to say or room to listen; who.
    fn poll(&self) -> Vec<usize> {
        let mut fds = vec![PollFd::new(&self.links.wake, PollFlags::IN)];
        fds.extend(self.readers.iter().map(|reader| {
            let mut flags = PollFlags::IN;
            flags.set(PollFlags::OUT, self.links.has_more(reader.rank));
            PollFd::new(&reader.stream, flags)
        }));
        let limit = Timespec {
            tv_sec: 0,
            tv_nsec: PERIOD.subsec_nanos().into(),
        };
        // Interrupted is as good as nothing.
        let _ = rustix::event::poll(&mut fds, Some(&limit));
        if !fds[0].revents().is_empty() {
            let _ = rustix::io::read(&self.links.wake, &mut [0; 8]);
        }
        let events = fds[1..].iter().enumerate();
        let ready = events.filter(|(_, fd)| !fd.revents().is_empty());
        ready.map(|(at, _)| at).collect()
    }

    fn attend(&mut self, at: usize) {
        let reader = &mut self.readers[at];
        self.links.write_on(reader.rank);
        let end = loop {
            match reader.read(&mut self.portion) {
                Ok(0) => break Some("its connection closed".to_owned()),
                Ok(count) => {
                    reader.assembly.push(&self.portion[..count]);
                    if let Err(nonsense) = reader.handle(&self.links) {
                        break Some(nonsense);
                    }
                    if count < PORTION {
                        break None;
                    }
                }
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => break None,
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(err) => break Some(format!("its connection broke: {err}")),
            }
        };
        if let Some(reason) = end {
            let (rank, left) = (reader.rank, reader.left);
            self.links.lose(rank, left, &reason);
        }
    }
}

impl Reader {
    /// Reads what is there, and descriptors that come with it.
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let Stream::Unix(socket) = &self.stream else {
            return self.stream.read(buf);
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buf)], &mut control, flags)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.descriptors.extend(fds);
            }
        }
        if got.flags.contains(ReturnFlags::CTRUNC) {
            let what = "its memory cannot be opened here: too many open files, see ulimit -n";
            return Err(io::Error::other(what));
        }
        match self.descriptors.len() > MAX_DESCRIPTORS {
            true => Err(io::Error::other("it sends descriptors without frames")),
            false => Ok(got.bytes),
        }
    }

    /// Does what the frames that have come ask for; the error says why no more can be read.
    fn handle(&mut self, links: &Arc<Links>) -> std::result::Result<(), String> {
        loop {
            let (head, payload) = match self.assembly.next() {
                Ok(Some(frame)) => frame,
                Ok(None) => return Ok(()),
                Err(()) => return Err("it sent something that is no frame".into()),
            };
            let segment = match head.kind.has_descriptor() {
                true => {
                    let fd = self.descriptors.pop_front();
                    let fd = fd.ok_or("it sent no descriptor where one belongs")?;
                    let len = usize::try_from(head.b).map_err(|_| "it sent nonsense")?;
                    let segment = Segment::open(fd, len);
                    Some(Arc::new(segment.map_err(|err| err.message().to_owned())?))
                }
                false => None,
            };
            match (head.kind, segment) {
                (Kind::Bye, _) => self.left = true,
                (Kind::Arena, Some(segment)) => {
                    links.maps.add(self.rank, head.a as u32, segment);
                    links.members().iter().for_each(|member| member.wake_self());
                }
                (Kind::Control, Some(segment)) => links.offer(head.group, segment, self.rank),
                _ => dispatch(links, self.rank, &head, payload),
            }
        }
    }
}

/// Hands a frame to the group that it is for. Without one it is late, and dropped.
fn dispatch(links: &Links, from: usize, head: &Head, payload: &[u8]) {
    if let Some(member) = links.member(&head.group)
        && let Some(rank) = member.rank_of(from)
    {
        match head.kind {
            Kind::Broken => {
                if let Some(notice) = Notice::decode(payload, member.size()) {
                    member.peer_broke(notice);
                }
            }
            Kind::Dropped => {
                if let Some(notice) = Notice::decode(payload, member.size()) {
                    member.peer_gone(rank, notice.to_error());
                }
            }
            Kind::Left => member.peer_left(rank),
            Kind::Ping => member.answer(rank, head.a),
            Kind::Pong => member.answered(rank, head.a),
            _ => member.on_message(rank, head, payload),
        }
    }
}

impl Links {
    /// Nothing more comes from a process, for this reason.
    fn lose(&self, peer: usize, left: bool, reason: &str) {
        let Some(link) = self.peers.get(peer).and_then(Option::as_ref) else {
            return;
        };
        let reason = if left {
            "it dropped its groups"
        } else {
            reason
        };
        link.gone.store(true, Ordering::Release);
        tracing::debug!(target: "phalanx::native", "rank {peer} of the world is gone: {reason}");
        for member in self.members() {
            let Some(rank) = member.rank_of(peer) else {
                continue;
            };
            let what = format!("rank {rank} is lost: {reason}");
            member.peer_died(rank, Error::new(ErrorKind::PeerLost, what).from_peer(rank));
        }
        self.offered.notify_all();
    }
}
