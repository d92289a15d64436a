//! Ranks that are connected by sockets: a thread that reads and one that writes for each peer.

use std::collections::VecDeque;
use std::io::{BufReader, BufWriter, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use phalanx_pg::{Error, ErrorKind, Result};
use phalanx_store::Deadline;

use crate::mailbox::{Data, Label};
use crate::member::Member;
use crate::transport::{Farewell, Ticket, Transport};
use crate::wire::{Assembly, HEADER_LEN, Header, MAX_CHUNK};
use phalanx_pg::Notice;

/// How long a rank that has left goes on reading, so that its socket does not refuse what a peer
/// still sends and take the farewell with it.
const LINGER: Duration = Duration::from_secs(2);

/// One rank's connections.
pub(crate) struct Mesh {
    /// By rank; none to itself.
    links: Vec<Option<Link>>,
    readers: Mutex<Vec<JoinHandle<()>>>,
    writers: Mutex<Vec<JoinHandle<()>>>,
}

struct Link {
    outbox: Arc<Outbox>,
    /// To cut it off when it takes too long.
    stream: TcpStream,
}

/// What waits to be written to one peer.
#[derive(Default)]
struct Outbox {
    state: Mutex<Outgoing>,
    changed: Condvar,
}

#[derive(Default)]
struct Outgoing {
    /// Not bounded here: a collective adds one message and then waits for everybody, and the
    /// member bounds the point-to-point operations.
    messages: VecDeque<Message>,
    farewell: Option<Farewell>,
}

struct Message {
    label: Label,
    data: Data,
    ticket: Option<Ticket>,
}

impl Mesh {
    /// Attaches the connections to the member and starts to read and write.
    pub(crate) fn start(member: &Arc<Member>, streams: Vec<Option<TcpStream>>) -> Result<()> {
        let link = |stream: TcpStream| Link {
            outbox: Arc::default(),
            stream,
        };
        let mesh = Arc::new(Mesh {
            links: streams.into_iter().map(|s| s.map(link)).collect(),
            readers: Mutex::default(),
            writers: Mutex::default(),
        });
        // First, since what a thread meets may end the group.
        member.attach(Arc::clone(&mesh) as Arc<dyn Transport>);
        let started = mesh.peers().try_for_each(|(peer, link)| {
            let (read, write) = (copy_of(&link.stream)?, copy_of(&link.stream)?);
            let (own, outbox) = (Arc::clone(member), Arc::clone(&link.outbox));
            let reader = spawn(move || read_all(&own, peer, read))?;
            mesh.readers.lock().push(reader);
            let own = Arc::clone(member);
            let writer = spawn(move || write_all(&own, peer, &outbox, write))?;
            mesh.writers.lock().push(writer);
            Ok(())
        });
        started.inspect_err(|_| member.leave())
    }

    fn peers(&self) -> impl Iterator<Item = (usize, &Link)> {
        let links = self.links.iter().enumerate();
        links.filter_map(|(peer, link)| Some((peer, link.as_ref()?)))
    }
}

impl Transport for Mesh {
    fn send(&self, peer: usize, label: Label, data: Data, ticket: Option<Ticket>) {
        let Some(link) = &self.links[peer] else {
            return;
        };
        let mut outgoing = link.outbox.state.lock();
        if outgoing.farewell.is_none() {
            outgoing.messages.push_back(Message {
                label,
                data,
                ticket,
            });
            link.outbox.changed.notify_one();
        }
    }

    fn close(&self, farewell: Farewell) {
        for (_, link) in self.peers() {
            let mut outgoing = link.outbox.state.lock();
            if matches!(farewell, Farewell::Abort(_)) {
                outgoing.messages.clear();
            }
            outgoing.farewell.get_or_insert(farewell.clone());
            link.outbox.changed.notify_one();
        }
    }

    fn join(&self, limit: Duration) {
        let mut writers = std::mem::take(&mut *self.writers.lock());
        let mut readers = std::mem::take(&mut *self.readers.lock());
        if readers.is_empty() {
            return;
        }
        wait_for(&mut writers, limit);
        // What did not go out by now is given up, but not what a peer is about to say.
        let streams: Vec<TcpStream> = self
            .peers()
            .filter_map(|(_, link)| link.stream.try_clone().ok())
            .collect();
        for stream in &streams {
            let _ = stream.shutdown(Shutdown::Write);
        }
        let cut = move || {
            wait_for(&mut readers, LINGER);
            for stream in streams {
                // Not connected any more is what is wanted.
                let _ = stream.shutdown(Shutdown::Both);
            }
            wait_for(&mut readers, LINGER);
        };
        if let Err(err) = spawn(cut) {
            tracing::debug!(target: "phalanx::reference", "leaving at once: {err}");
            for (_, link) in self.peers() {
                let _ = link.stream.shutdown(Shutdown::Both);
            }
        }
    }
}

fn spawn(job: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name("phalanx-peer".into());
    let spawned = thread.spawn(job);
    spawned.map_err(|err| os_error("starting a thread", &err))
}

/// Waits for threads to end, for `limit` at most, and forgets those that have.
fn wait_for(threads: &mut Vec<JoinHandle<()>>, limit: Duration) {
    let deadline = Deadline::after(limit);
    // A waker that runs in one of them may drop the group.
    let own = std::thread::current().id();
    threads.retain(|thread| thread.thread().id() != own);
    while !deadline.passed() && !threads.iter().all(JoinHandle::is_finished) {
        std::thread::sleep(Duration::from_millis(1));
    }
    for thread in threads.extract_if(.., |thread| thread.is_finished()) {
        if thread.join().is_err() {
            tracing::error!(target: "phalanx::reference", "a thread of a connection panicked");
        }
    }
}

/// The thread that reads from `peer`, until there is nothing more to read.
fn read_all(member: &Member, peer: usize, stream: TcpStream) {
    let mut stream = BufReader::with_capacity(64 << 10, stream);
    let reason = loop {
        match read_some(member, peer, &mut stream) {
            Ok(true) => {}
            Ok(false) => break "its connection closed".to_owned(),
            Err(reason) => break reason,
        }
    };
    member.lost(peer, &reason);
    // What was not understood is not read on.
    let _ = stream.get_ref().shutdown(Shutdown::Read);
}

/// Reads one message or less; false at the end. The error says why nothing more can be read.
fn read_some(
    member: &Member,
    peer: usize,
    stream: &mut BufReader<TcpStream>,
) -> Result<bool, String> {
    let cut = |err: std::io::Error| format!("its connection broke: {err}");
    let nonsense = |what: String| format!("it sent {what}");
    let mut assembly = Assembly::default();
    loop {
        let mut header = [0; HEADER_LEN];
        match stream.read_exact(&mut header) {
            Err(err) if err.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(false),
            read => read.map_err(cut)?,
        }
        match Header::decode(&header).map_err(nonsense)? {
            Header::Chunk { label, last, len } => {
                let room = assembly.room(label, len).map_err(nonsense)?;
                stream.read_exact(room).map_err(cut)?;
                if last {
                    member.deliver(peer, label, Arc::new(assembly.finish()));
                    return Ok(true);
                }
            }
            Header::Goodbye => member.said_goodbye(peer),
            Header::Left { len } => member.left(peer, &read_notice(member, stream, len)?),
            Header::Abort { len } => member.told(&read_notice(member, stream, len)?),
        }
    }
}

fn read_notice(
    member: &Member,
    stream: &mut BufReader<TcpStream>,
    len: usize,
) -> Result<Notice, String> {
    let mut bytes = vec![0; len];
    let read = stream.read_exact(&mut bytes);
    read.map_err(|err| format!("its connection broke: {err}"))?;
    let notice = Notice::decode(&bytes, member.size());
    notice.ok_or_else(|| "it sent a notice that cannot be read".into())
}

/// The thread that writes to one peer, until the farewell.
///
/// That a peer is gone is for the reader to find out: it may have said why before it went.
fn write_all(member: &Member, peer: usize, outbox: &Outbox, stream: TcpStream) {
    let mut stream = BufWriter::with_capacity(64 << 10, stream);
    let written = write_until_farewell(member, outbox, &mut stream);
    if let Err(err) = written {
        tracing::debug!(target: "phalanx::reference", "writing to rank {peer}: {err}");
        member.deaf(peer);
    }
    // The peer reads to the end; reading goes on here until it has done the same.
    let _ = stream.get_ref().shutdown(Shutdown::Write);
}

fn write_until_farewell(
    member: &Member,
    outbox: &Outbox,
    stream: &mut BufWriter<TcpStream>,
) -> std::io::Result<()> {
    loop {
        let message = outbox.next(|| stream.flush())?;
        match message {
            Next::Message(message) => {
                let sent = write_message(outbox, stream, &message)?;
                if let (true, Some(ticket)) = (sent, message.ticket) {
                    stream.flush()?;
                    member.sent(ticket);
                }
            }
            Next::Farewell(farewell) => {
                let (header, notice) = match farewell {
                    Farewell::Goodbye => (Header::Goodbye, vec![]),
                    Farewell::Left(notice) => {
                        let notice = notice.encode();
                        (Header::Left { len: notice.len() }, notice)
                    }
                    Farewell::Abort(notice) => {
                        let notice = notice.encode();
                        (Header::Abort { len: notice.len() }, notice)
                    }
                };
                stream.write_all(&header.encode())?;
                stream.write_all(&notice)?;
                return stream.flush();
            }
        }
    }
}

/// Writes a message; false if it stopped after some chunk because the group broke.
fn write_message(
    outbox: &Outbox,
    stream: &mut BufWriter<TcpStream>,
    message: &Message,
) -> std::io::Result<bool> {
    let label = message.label;
    let mut rest = message.data.as_slice();
    loop {
        let (chunk, after) = rest.split_at(rest.len().min(MAX_CHUNK));
        let (len, last) = (chunk.len(), after.is_empty());
        stream.write_all(&Header::Chunk { label, last, len }.encode())?;
        stream.write_all(chunk)?;
        if last {
            return Ok(true);
        }
        if outbox.is_cut() {
            return Ok(false);
        }
        rest = after;
    }
}

enum Next {
    Message(Message),
    Farewell(Farewell),
}

impl Outbox {
    /// What to write next. Calls `idle` before it waits.
    fn next(&self, mut idle: impl FnMut() -> std::io::Result<()>) -> std::io::Result<Next> {
        let mut flushed = false;
        let mut outgoing = self.state.lock();
        loop {
            if let Some(message) = outgoing.messages.pop_front() {
                return Ok(Next::Message(message));
            }
            if let Some(farewell) = &outgoing.farewell {
                return Ok(Next::Farewell(farewell.clone()));
            }
            if !std::mem::replace(&mut flushed, true) {
                parking_lot::MutexGuard::unlocked(&mut outgoing, &mut idle)?;
                continue;
            }
            self.changed.wait(&mut outgoing);
        }
    }

    /// Whether what is being written is no use any more.
    fn is_cut(&self) -> bool {
        matches!(self.state.lock().farewell, Some(Farewell::Abort(_)))
    }
}

fn copy_of(stream: &TcpStream) -> Result<TcpStream> {
    stream
        .try_clone()
        .map_err(|err| os_error("duplicating a socket", &err))
}

/// The operating system refused `what`.
pub(crate) fn os_error(what: &str, err: &std::io::Error) -> Error {
    Error::new(ErrorKind::Backend, format!("{what}: {err}"))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use phalanx_pg::group_identity;

    use super::*;
    use crate::connect::Seat;

    /// Rank 0 of a group of two whose other rank is a bare socket.
    fn beside_a_stranger() -> (Arc<Member>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let members = vec![0, 1];
        let seat = Seat {
            name: "pair".into(),
            identity: group_identity("", "pair", &members),
            rank: 0,
            members,
            timeout: Duration::from_secs(30),
            parent: None,
        };
        let member = Member::new(&seat, 0);
        let (stream, _) = listener.accept().unwrap();
        Mesh::start(&member, vec![None, Some(stream)]).unwrap();
        (member, stranger)
    }

    #[test]
    fn a_rank_that_leaves_does_not_wait_for_a_peer_that_stays() {
        for broken in [false, true] {
            let (member, mut stranger) = beside_a_stranger();
            if broken {
                member.fail(&Error::new(ErrorKind::Aborted, "enough"));
            }
            member.leave();
            // It has left, and what the peer still sends is read and not refused.
            let empty = Header::Chunk {
                label: Label::Tag(0),
                last: true,
                len: 0,
            };
            for _ in 0..100 {
                stranger.write_all(&empty.encode()).unwrap();
            }
            let mut farewell = Vec::new();
            stranger.read_to_end(&mut farewell).unwrap();
            let header = farewell.first_chunk().unwrap();
            let header = Header::decode(header).unwrap();
            match broken {
                true => assert!(matches!(header, Header::Abort { .. }), "{header:?}"),
                false => assert!(matches!(header, Header::Left { .. }), "{header:?}"),
            }
        }
    }
}
