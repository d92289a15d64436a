//! One connection to a rank on another host.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;

use phalanx_pg::{Error, ErrorKind, Result};

use super::wire::{Outgoing, Script, Stamp};
use crate::room::Room;

/// Bytes before the data of a piece: operation, digest of the call, which piece, length.
const HEAD: usize = 24;

/// Most bytes that are read together with a head: a small piece comes with one call.
const AHEAD: usize = 4096;

/// A part of what an operation sends to one rank.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) id: u32,
    pub(super) data: *const u8,
    pub(super) len: usize,
    /// Where the data is, if nobody else keeps it.
    pub(super) room: Option<Room>,
}

/// One connection, with what waits to be written and what has been read.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) stream: TcpStream,
    /// Pieces, and how much of each is written.
    outbox: VecDeque<(Piece, usize)>,
    /// What has been read and belongs to nothing yet, from `start` to `end`.
    ahead: Box<[u8; AHEAD]>,
    start: usize,
    end: usize,
    /// The piece that is coming: number, where the rest goes, how much is left.
    coming: Option<(u32, *mut u8, usize)>,
    /// Pieces of this operation that are still to come.
    pub(super) due: usize,
}

// SAFETY: the pointers are those of the operation that runs, on whose thread they are used; they
// are gone when it ends.
unsafe impl Send for Link {}

impl Link {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            outbox: VecDeque::new(),
            ahead: Box::new([0; AHEAD]),
            start: 0,
            end: 0,
            coming: None,
            due: 0,
        }
    }

    pub(super) fn push(&mut self, piece: Piece) {
        self.outbox.push_back((piece, 0));
    }

    pub(super) fn has_more_to_send(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Writes without waiting, and hands over the pieces that are through; whether anything moved.
    pub(super) fn write(&mut self, stamp: Stamp, mut sent: impl FnMut(Piece)) -> io::Result<bool> {
        let mut moved = false;
        while let Some((piece, written)) = self.outbox.front_mut() {
            let head = encode(stamp, piece);
            // SAFETY: whoever pushed the piece keeps these bytes as they are until the operation
            // ends, and no other process writes to them.
            let data = unsafe { std::slice::from_raw_parts(piece.data, piece.len) };
            let slices = [
                IoSlice::new(&head[(*written).min(HEAD)..]),
                IoSlice::new(&data[written.saturating_sub(HEAD)..]),
            ];
            match self.stream.write_vectored(&slices) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    moved = true;
                    *written += count;
                    if *written < HEAD + piece.len {
                        // The socket is full.
                        return Ok(moved);
                    }
                    if let Some((piece, _)) = self.outbox.pop_front() {
                        sent(piece);
                    }
                }
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => return Ok(moved),
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(err) => return Err(err),
            }
        }
        Ok(moved)
    }

    /// Reads pieces that are due, without waiting; whether anything moved.
    pub(super) fn read(
        &mut self,
        rank: usize,
        stamp: Stamp,
        script: &mut dyn Script,
        out: &mut Outgoing,
    ) -> Result<bool> {
        let mut moved = false;
        while self.due > 0 {
            self.use_ahead(rank, stamp, script, out)?;
            if let Some((id, _, 0)) = self.coming {
                self.coming = None;
                self.due -= 1;
                moved = true;
                script.arrived(rank, id, out);
                continue;
            }
            match self.fill() {
                Ok(0) => return Err(lost(rank, &io::ErrorKind::UnexpectedEof.into())),
                Ok(_) => moved = true,
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => return Ok(moved),
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(err) => return Err(lost(rank, &err)),
            }
        }
        Ok(moved)
    }

    /// Makes what has been read ahead part of the piece that it belongs to.
    fn use_ahead(
        &mut self,
        rank: usize,
        stamp: Stamp,
        script: &mut dyn Script,
        out: &mut Outgoing,
    ) -> Result<()> {
        let read = &self.ahead[self.start..self.end];
        let (head, data) = match (self.coming, read.split_first_chunk()) {
            (None, Some((head, data))) => (Some(head), data),
            (None, None) => return Ok(()),
            (Some(_), _) => (None, read),
        };
        if let Some(head) = head {
            let (theirs, id, len) = decode(head);
            let place = match (theirs.op, theirs.digest) == (stamp.op, stamp.digest) {
                true => script.place(rank, id, len, out),
                false => None,
            };
            let to = place.ok_or_else(|| {
                let what = format!("rank {rank} calls something else, or with another length");
                Error::new(ErrorKind::Backend, what).from_peer(rank)
            })?;
            self.coming = Some((id, to, len));
        }
        if let Some((_, to, left)) = &mut self.coming {
            let count = data.len().min(*left);
            // SAFETY: the script has named the place for this many bytes, which nobody else uses
            // until it hears that they are there.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), *to, count) };
            *to = to.wrapping_add(count);
            *left -= count;
            self.start = self.end - (data.len() - count);
        }
        Ok(())
    }

    /// Reads the rest of the piece that is coming and what follows it.
    fn fill(&mut self) -> io::Result<usize> {
        // At most a part of a head, since a piece takes what there is for it.
        self.ahead.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let ahead = &mut self.ahead[self.end..];
        let Some((_, to, left)) = &mut self.coming else {
            let count = self.stream.read(ahead)?;
            self.end += count;
            return Ok(count);
        };
        // SAFETY: the script has named the place for this many bytes, which nobody else uses
        // until it hears that they are there.
        let room = unsafe { std::slice::from_raw_parts_mut(*to, *left) };
        let mut slices = [IoSliceMut::new(room), IoSliceMut::new(ahead)];
        let count = self.stream.read_vectored(&mut slices)?;
        let taken = count.min(*left);
        *to = to.wrapping_add(taken);
        *left -= taken;
        self.end += count - taken;
        Ok(count)
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
    let len = usize::try_from(long(16)).unwrap_or(usize::MAX);
    (stamp, short(4), len)
}

pub(super) fn lost(rank: usize, err: &io::Error) -> Error {
    let what = format!("rank {rank} is lost: its connection broke: {err}");
    Error::new(ErrorKind::PeerLost, what).from_peer(rank)
}
