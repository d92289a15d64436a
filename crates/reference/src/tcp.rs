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
use crate::notice::Notice;
use crate::transport::{Farewell, Ticket, Transport};
use crate::wire::{Assembly, HEADER_LEN, Header, MAX_CHUNK};

/// How long a rank that leaves waits for its farewell to go out and for the peers to leave too.
const LINGER: Duration = Duration::from_secs(2);

/// One rank's connections.
pub(crate) struct Mesh {
    /// By rank; none to itself.
    links: Vec<Option<Link>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
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
            threads: Mutex::default(),
        });
        // First, since what a thread meets may end the group.
        member.attach(Arc::clone(&mesh) as Arc<dyn Transport>);
        let started = mesh.peers().try_for_each(|(peer, link)| {
            let (read, write) = (copy_of(&link.stream)?, copy_of(&link.stream)?);
            let (own, outbox) = (Arc::clone(member), Arc::clone(&link.outbox));
            mesh.spawn(move || read_all(&own, peer, read))?;
            let own = Arc::clone(member);
            mesh.spawn(move || write_all(&own, &outbox, write))
        });
        started.inspect_err(|_| member.leave())
    }

    fn spawn(&self, job: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new().name("phalanx-peer".into());
        let handle = thread
            .spawn(job)
            .map_err(|err| os_error("starting a thread", &err))?;
        self.threads.lock().push(handle);
        Ok(())
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

    fn join(&self) {
        // A waker that runs in one of these threads may drop the group.
        let own = std::thread::current().id();
        let mut threads = std::mem::take(&mut *self.threads.lock());
        threads.retain(|thread| thread.thread().id() != own);
        let deadline = Deadline::after(LINGER);
        while !deadline.passed() && !threads.iter().all(JoinHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(1));
        }
        for (_, link) in self.peers() {
            // Not connected any more is what is wanted.
            let _ = link.stream.shutdown(Shutdown::Both);
        }
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!(target: "phalanx::reference", "a thread of a connection panicked");
            }
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
            Header::Abort { len } => {
                let mut bytes = vec![0; len];
                stream.read_exact(&mut bytes).map_err(cut)?;
                let notice = Notice::decode(&bytes, member.size());
                let no_notice = || nonsense("an abort that cannot be read".into());
                member.told(&notice.ok_or_else(no_notice)?);
            }
        }
    }
}

/// The thread that writes to one peer, until the farewell.
///
/// That a peer is gone is for the reader to find out: it may have said why before it went.
fn write_all(member: &Member, outbox: &Outbox, stream: TcpStream) {
    let mut stream = BufWriter::with_capacity(64 << 10, stream);
    let written = write_until_farewell(member, outbox, &mut stream);
    if let Err(err) = written {
        tracing::debug!(target: "phalanx::reference", "writing to a peer: {err}");
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
            Next::Farewell(Farewell::Silent) => return stream.flush(),
            Next::Farewell(Farewell::Goodbye) => {
                stream.write_all(&Header::Goodbye.encode())?;
                return stream.flush();
            }
            Next::Farewell(Farewell::Abort(notice)) => {
                let notice = notice.encode();
                let len = notice.len();
                stream.write_all(&Header::Abort { len }.encode())?;
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
