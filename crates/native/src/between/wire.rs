//! The connections of a group between hosts, and moving data over them in both directions at once.
//!
//! Everything that a collective sends is a *piece*: a head of fixed size, then the data. Pieces say
//! which operation they belong to and which one they are, so the receiver knows where each goes,
//! whenever it comes. A rank reads from a peer only as many pieces as the operation has, since the
//! peer may have gone on to the next.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use phalanx_pg::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec};

/// Bytes before the data of a piece: operation, digest of the call, which piece, length.
const HEAD: usize = 24;

/// How long a wait goes on before the state of the group is looked at.
const GLANCE: Duration = Duration::from_millis(50);

/// How long a rank that hears of the group's end still waits for data that was sent before it.
const GRACE: Duration = Duration::from_millis(200);

/// What an operation does with pieces.
pub(crate) trait Script {
    /// How many pieces come from a rank.
    fn expected(&self, from: usize) -> usize;

    /// Where a piece goes; `None` if there is none of this number and length.
    fn place(&mut self, from: usize, id: u32, len: usize) -> Option<*mut u8>;

    /// A piece is in its place. May send more.
    fn arrived(&mut self, from: usize, id: u32, out: &mut Outgoing);

    /// Does something that needs no peer, and says whether there was anything. May send.
    fn work(&mut self, out: &mut Outgoing) -> bool;
}

/// Pieces to be sent, in order for each rank.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    pieces: Vec<(usize, Piece)>,
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    id: u32,
    data: *const u8,
    len: usize,
}

impl Outgoing {
    /// Sends `len` bytes at `data` to a rank. They stay as they are until the operation ends.
    pub(crate) fn push(&mut self, to: usize, id: u32, data: *const u8, len: usize) {
        self.pieces.push((to, Piece { id, data, len }));
    }
}

/// One rank's connections to those on other hosts.
#[derive(Debug)]
pub(crate) struct Wire {
    /// By rank in the group; none to those on this host.
    links: Vec<Option<Link>>,
}

#[derive(Debug)]
struct Link {
    stream: TcpStream,
    outbox: VecDeque<(Piece, usize)>,
    /// The head of the next piece, as far as it has come.
    head: [u8; HEAD],
    head_len: usize,
    /// The piece that is coming: number, where the rest goes, how much is left.
    coming: Option<(u32, *mut u8, usize)>,
    /// Pieces of this operation that have come.
    count: usize,
}

// SAFETY: the pointers are those of the operation that runs, on whose thread they are used; they
// are gone when it ends.
unsafe impl Send for Link {}

/// Which operation the pieces belong to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stamp {
    pub(crate) op: u32,
    /// Of the call, so that different ones are noticed.
    pub(crate) digest: u64,
}

/// What an exchange looks at while it waits.
pub(crate) struct Watch<'a> {
    pub(crate) deadline: Instant,
    /// Why a rank will not come, if so.
    pub(crate) broken: &'a dyn Fn(usize) -> Option<Error>,
    /// The error of a rank that did not come.
    pub(crate) late: &'a dyn Fn(usize) -> Error,
}

impl Wire {
    pub(crate) fn new(streams: Vec<Option<TcpStream>>) -> Self {
        let link = |stream| Link {
            stream,
            outbox: VecDeque::new(),
            head: [0; HEAD],
            head_len: 0,
            coming: None,
            count: 0,
        };
        Self {
            links: streams.into_iter().map(|s| s.map(link)).collect(),
        }
    }

    /// Runs a script to its end.
    pub(crate) fn exchange(
        &mut self,
        stamp: Stamp,
        script: &mut dyn Script,
        watch: &Watch<'_>,
    ) -> Result<()> {
        for link in self.links.iter_mut().flatten() {
            link.count = 0;
        }
        let mut out = Outgoing::default();
        let mut broken_since: Option<Instant> = None;
        loop {
            let worked = script.work(&mut out);
            let moved = self.advance(stamp, script, &mut out)?;
            if worked || moved {
                continue;
            }
            let Some(waiting) = self.waits_for(script) else {
                return Ok(());
            };
            if let Some(cause) = (watch.broken)(waiting) {
                // What was sent before the end still counts, and comes soon if at all.
                if broken_since.get_or_insert_with(Instant::now).elapsed() > GRACE {
                    return Err(cause);
                }
            }
            if Instant::now() >= watch.deadline {
                return Err((watch.late)(waiting));
            }
            self.poll(script, watch.deadline);
        }
    }

    /// The first rank that something is to come from or go to.
    fn waits_for(&self, script: &dyn Script) -> Option<usize> {
        let links = self.links.iter().enumerate();
        let mut links = links.filter_map(|(rank, link)| Some((rank, link.as_ref()?)));
        let open = |(rank, link): &(usize, &Link)| {
            link.count < script.expected(*rank) || !link.outbox.is_empty()
        };
        links.find(open).map(|(rank, _)| rank)
    }

    /// Sends and receives what can be without waiting; whether anything was.
    fn advance(
        &mut self,
        stamp: Stamp,
        script: &mut dyn Script,
        out: &mut Outgoing,
    ) -> Result<bool> {
        let mut moved = false;
        for (to, piece) in out.pieces.drain(..) {
            if let Some(link) = &mut self.links[to] {
                link.outbox.push_back((piece, 0));
            }
        }
        for (rank, link) in self.links.iter_mut().enumerate() {
            let Some(link) = link else { continue };
            moved |= link.write(stamp).map_err(|err| lost(rank, &err))?;
            if link.count < script.expected(rank) {
                moved |= link.read(rank, stamp, script, out)?;
            }
        }
        Ok(moved || !out.pieces.is_empty())
    }

    fn poll(&self, script: &dyn Script, deadline: Instant) {
        let links = self.links.iter().enumerate();
        let links = links.filter_map(|(rank, link)| Some((rank, link.as_ref()?)));
        let mut fds: smallvec::SmallVec<[PollFd<'_>; 8]> = links
            .filter_map(|(rank, link)| {
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::IN, link.count < script.expected(rank));
                flags.set(PollFlags::OUT, !link.outbox.is_empty());
                (!flags.is_empty()).then(|| PollFd::new(&link.stream, flags))
            })
            .collect();
        let left = deadline
            .saturating_duration_since(Instant::now())
            .min(GLANCE);
        let limit = Timespec {
            tv_sec: 0,
            tv_nsec: left.subsec_nanos().into(),
        };
        // However it ends, the streams are tried again.
        let _ = rustix::event::poll(&mut fds, Some(&limit));
    }
}

impl Link {
    fn write(&mut self, stamp: Stamp) -> io::Result<bool> {
        let mut moved = false;
        while let Some((piece, written)) = self.outbox.front_mut() {
            let head = encode(stamp, piece);
            let from = written.saturating_sub(HEAD);
            // SAFETY: whoever pushed the piece keeps these bytes as they are until the operation
            // ends, and no other process writes to them.
            let data = unsafe { std::slice::from_raw_parts(piece.data, piece.len) };
            let slices = [
                IoSlice::new(&head[(*written).min(HEAD)..]),
                IoSlice::new(&data[from..]),
            ];
            match self.stream.write_vectored(&slices) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    moved = true;
                    *written += count;
                    if *written == HEAD + piece.len {
                        self.outbox.pop_front();
                    }
                }
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => return Ok(moved),
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(err) => return Err(err),
            }
        }
        Ok(moved)
    }

    fn read(
        &mut self,
        rank: usize,
        stamp: Stamp,
        script: &mut dyn Script,
        out: &mut Outgoing,
    ) -> Result<bool> {
        let mut moved = false;
        while self.count < script.expected(rank) {
            if let Some((id, _, 0)) = self.coming {
                self.coming = None;
                self.count += 1;
                script.arrived(rank, id, out);
                continue;
            }
            let room = match self.coming {
                // SAFETY: the script has named the place for this many bytes, which nobody else
                // uses until it hears that they are there.
                Some((_, to, left)) => unsafe { std::slice::from_raw_parts_mut(to, left) },
                None => &mut self.head[self.head_len..],
            };
            match self.stream.read(room) {
                Ok(0) => return Err(lost(rank, &io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => {
                    moved = true;
                    self.advance_by(count, rank, stamp, script)?;
                }
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => return Ok(moved),
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(err) => return Err(lost(rank, &err)),
            }
        }
        Ok(moved)
    }

    fn advance_by(
        &mut self,
        count: usize,
        rank: usize,
        stamp: Stamp,
        script: &mut dyn Script,
    ) -> Result<()> {
        if let Some((_, to, left)) = &mut self.coming {
            *to = to.wrapping_add(count);
            *left -= count;
            return Ok(());
        }
        self.head_len += count;
        if self.head_len < HEAD {
            return Ok(());
        }
        self.head_len = 0;
        let (theirs, id, len) = decode(&self.head);
        let differ = || {
            let what = format!("rank {rank} calls something else, or with another length");
            Error::new(ErrorKind::Backend, what).from_peer(rank)
        };
        if (theirs.op, theirs.digest) != (stamp.op, stamp.digest) {
            return Err(differ());
        }
        let to = script.place(rank, id, len).ok_or_else(differ)?;
        self.coming = Some((id, to, len));
        Ok(())
    }
}

fn encode(stamp: Stamp, piece: &Piece) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..4].copy_from_slice(&stamp.op.to_le_bytes());
    head[4..8].copy_from_slice(&piece.id.to_le_bytes());
    head[8..16].copy_from_slice(&stamp.digest.to_le_bytes());
    head[16..].copy_from_slice(&(piece.len as u64).to_le_bytes());
    head
}

fn decode(head: &[u8; HEAD]) -> (Stamp, u32, usize) {
    let short = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("4 bytes"));
    let long = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("8 bytes"));
    let stamp = Stamp {
        op: short(0),
        digest: long(8),
    };
    // What does not fit is longer than any place.
    (
        stamp,
        short(4),
        usize::try_from(long(16)).unwrap_or(usize::MAX),
    )
}

fn lost(rank: usize, err: &io::Error) -> Error {
    let what = format!("rank {rank} is lost: its connection broke: {err}");
    Error::new(ErrorKind::PeerLost, what).from_peer(rank)
}
