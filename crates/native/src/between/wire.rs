//! The connections of a group between hosts, and moving data over them in both directions at once.
//!
//! Everything that a collective sends is a *piece*: a head of fixed size, then the data. Pieces say
//! which operation they belong to and which one they are, so the receiver knows where each goes,
//! whenever it comes. A rank takes from a peer only as many pieces as the operation has, since the
//! peer may have gone on to the next.
//!
//! Two ranks have one connection or several. The pieces of an operation take turns on them, so both
//! ends know how many come on which.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use phalanx_pg::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::link::{Link, Piece, lost};
use crate::room::Room;

/// How long a wait goes on before the state of the group is looked at.
const GLANCE: Duration = Duration::from_millis(50);

/// How long a rank that hears of the group's end still waits for data that was sent before it.
const GRACE: Duration = Duration::from_millis(200);

/// Pieces that wait to be written, for each connection, before no more are made.
const AHEAD_OF_WIRE: usize = 2;

/// Most rooms that are kept for the next operation.
const SPARE_ROOMS: usize = 32;

/// What an operation does with pieces.
pub(crate) trait Script {
    /// How many pieces come from a rank. Asked once, before anything else.
    fn expected(&self, from: usize) -> usize;

    /// Where a piece goes; `None` if there is none of this number and length.
    fn place(&mut self, from: usize, id: u32, len: usize, out: &mut Outgoing) -> Option<*mut u8>;

    /// A piece is in its place. May send more.
    fn arrived(&mut self, from: usize, id: u32, out: &mut Outgoing);

    /// Does something that needs no peer, and says whether there was anything. May send.
    fn work(&mut self, out: &mut Outgoing) -> bool;
}

/// Pieces to be sent, in order for each rank, and memory for them.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pieces: Vec<(usize, Piece)>,
    /// Pieces that wait on connections.
    queued: usize,
    /// Memory that has been touched before and is not in use.
    spare: Vec<Room>,
    room_bytes: usize,
}

// SAFETY: the pointers are those of the operation that runs, on whose thread they are used; they
// are gone when it ends.
unsafe impl Send for Outgoing {}

impl Outgoing {
    /// Sends `len` bytes at `data` to a rank. They stay as they are until the operation ends.
    pub(crate) fn push(&mut self, to: usize, id: u32, data: *const u8, len: usize) {
        let room = None;
        let piece = Piece {
            id,
            data,
            len,
            room,
        };
        self.pieces.push((to, piece));
    }

    /// Sends the first `len` bytes of a room to a rank.
    pub(crate) fn push_room(&mut self, to: usize, id: u32, room: Room, len: usize) {
        let piece = Piece {
            id,
            data: room.as_ptr(),
            len,
            room: Some(room),
        };
        self.pieces.push((to, piece));
    }

    /// Memory for a piece, with anything in it.
    pub(crate) fn room(&mut self) -> Room {
        let spare = self.spare.pop();
        spare.unwrap_or_else(|| Room::new(self.room_bytes))
    }

    /// The room is not needed any more.
    pub(crate) fn give_back(&mut self, room: Room) {
        if self.spare.len() < SPARE_ROOMS {
            self.spare.push(room);
        }
    }
}

/// One rank's connections to those on other hosts.
#[derive(Debug)]
pub(crate) struct Wire {
    /// By rank in the group; none to those on this host.
    peers: Vec<Peer>,
    out: Outgoing,
}

#[derive(Debug)]
struct Peer {
    links: Vec<Link>,
    /// Pieces of this operation that have gone to this rank or wait to.
    sent: usize,
}

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
    /// Over these streams, which do not block; by rank. Rooms have `room_bytes`.
    pub(crate) fn new(streams: Vec<Vec<TcpStream>>, room_bytes: usize) -> Self {
        let peer = |streams: Vec<TcpStream>| Peer {
            links: streams.into_iter().map(Link::new).collect(),
            sent: 0,
        };
        Self {
            peers: streams.into_iter().map(peer).collect(),
            out: Outgoing {
                pieces: Vec::new(),
                queued: 0,
                spare: Vec::new(),
                room_bytes,
            },
        }
    }

    /// Runs a script to its end.
    pub(crate) fn exchange(
        &mut self,
        stamp: Stamp,
        script: &mut dyn Script,
        watch: &Watch<'_>,
    ) -> Result<()> {
        let mut most = 0;
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            if !peer.links.is_empty() {
                peer.begin(script.expected(rank));
                most += AHEAD_OF_WIRE * peer.links.len();
            }
        }
        let mut broken_since: Option<Instant> = None;
        loop {
            let worked = self.out.queued < most && script.work(&mut self.out);
            let moved = self.advance(stamp, script)?;
            if worked || moved {
                continue;
            }
            let Some(waiting) = self.peers.iter().position(Peer::is_busy) else {
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
            self.poll(watch.deadline);
        }
    }

    /// Sends and receives what can be without waiting; whether anything was.
    fn advance(&mut self, stamp: Stamp, script: &mut dyn Script) -> Result<bool> {
        let mut moved = false;
        for (to, piece) in self.out.pieces.drain(..) {
            self.peers[to].push(piece);
            self.out.queued += 1;
        }
        let out = &mut self.out;
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            for link in &mut peer.links {
                let written = link.write(stamp, |piece| {
                    out.queued -= 1;
                    if let Some(room) = piece.room {
                        out.give_back(room);
                    }
                });
                moved |= written.map_err(|err| lost(rank, &err))?;
                moved |= link.read(rank, stamp, script, out)?;
            }
        }
        Ok(moved || !out.pieces.is_empty())
    }

    fn poll(&self, deadline: Instant) {
        let links = self.peers.iter().flat_map(|peer| &peer.links);
        let mut fds: smallvec::SmallVec<[PollFd<'_>; 8]> = links
            .filter_map(|link| {
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::IN, link.due > 0);
                flags.set(PollFlags::OUT, link.has_more_to_send());
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

impl Peer {
    /// An operation begins of which this many pieces come from here.
    fn begin(&mut self, expected: usize) {
        self.sent = 0;
        let streams = self.links.len();
        for (stream, link) in self.links.iter_mut().enumerate() {
            link.due = turns(expected, stream, streams);
        }
    }

    fn push(&mut self, piece: Piece) {
        let stream = self.sent % self.links.len();
        self.links[stream].push(piece);
        self.sent += 1;
    }

    /// Whether something is to come from it or to go to it.
    fn is_busy(&self) -> bool {
        let mut links = self.links.iter();
        links.any(|link| link.due > 0 || link.has_more_to_send())
    }
}

/// How many of so many pieces go on one of several streams.
fn turns(pieces: usize, stream: usize, streams: usize) -> usize {
    (pieces + streams - 1 - stream) / streams
}
