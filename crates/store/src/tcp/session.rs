//! One client of a TCP store server: its socket, and what has arrived or waits to leave.

use std::io::{self, Read, Write};
use std::net::SocketAddr;

use mio::net::TcpStream;

use super::state::{ConnId, Fault, Outbox, ServerState};
use super::wire::Decoder;
use crate::error::Result;

/// One read; also the most a connection may do before the others have their turn.
pub(super) const READ_LEN: usize = 64 << 10;
/// The most a connection may be sent before the others have their turn.
const SEND_LEN: usize = 256 << 10;
/// Answers a connection may owe before its further requests have to wait.
const MAX_UNSENT: usize = 1 << 20;

/// One client.
pub(super) struct Session {
    pub(super) socket: TcpStream,
    pub(super) peer: SocketAddr,
    /// Distinguishes connections that had the same number one after the other.
    pub(super) serial: u64,
    decoder: Decoder,
    /// The handshake is over.
    open: bool,
    /// Bytes of a request that is not whole yet, or that has to wait for answers to leave.
    pub(super) input: Vec<u8>,
    /// Answers that the socket did not take yet.
    pub(super) output: Vec<u8>,
    /// How much of `output` has left.
    sent: usize,
    /// The socket may take more.
    pub(super) writable: bool,
    /// There may be bytes to read.
    pub(super) readable: bool,
    /// Requests are left in `input` because answers could not leave.
    pub(super) stalled: bool,
    /// Wants to know when the socket takes more.
    pub(super) blocked: bool,
    /// In the run queue.
    pub(super) queued: bool,
    /// The client will send no more.
    pub(super) ended: bool,
    /// What it counts towards [`MAX_BUFFERED`].
    pub(super) accounted: usize,
}
/// What a connection needs next.
pub(super) enum Next {
    /// An event.
    Wait,
    /// Another turn.
    Again,
    /// To be closed: the client has left and has everything it asked for.
    Close,
}

impl Session {
    pub(super) fn new(socket: TcpStream, peer: SocketAddr, serial: u64) -> Self {
        Self {
            socket,
            peer,
            serial,
            decoder: Decoder::default(),
            open: false,
            input: Vec::new(),
            output: Vec::new(),
            sent: 0,
            writable: true,
            readable: false,
            stalled: false,
            blocked: false,
            queued: false,
            ended: false,
            accounted: 0,
        }
    }

    /// Reads once. Zero bytes if there are none now, or no more ever (then `ended` is set).
    pub(super) fn receive(&mut self, scratch: &mut [u8]) -> io::Result<usize> {
        match self.socket.read(scratch) {
            Ok(0) => {
                self.ended = true;
                self.readable = false;
                Ok(0)
            }
            Ok(n) => {
                // A short read has emptied the socket; the next byte brings an event. Only the
                // end of the stream may have been announced already.
                self.readable = n == scratch.len() || self.ended;
                Ok(n)
            }
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => {
                self.readable = false;
                Ok(0)
            }
            Err(err) if err.kind() == io::ErrorKind::Interrupted => Ok(0),
            Err(err) => Err(err),
        }
    }

    /// Bytes of answers that have not left.
    pub(super) fn unsent(&self) -> usize {
        self.output.len() - self.sent
    }

    /// Sends what the socket takes, but not more than is fair.
    pub(super) fn send(&mut self) -> io::Result<()> {
        let end = self.output.len().min(self.sent + SEND_LEN);
        while self.sent < end {
            match self.socket.write(&self.output[self.sent..end]) {
                Ok(n) => self.sent += n,
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => {
                    self.writable = false;
                    return Ok(());
                }
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(err) => return Err(err),
            }
        }
        // Not at every step: moving what is left of a long answer takes time.
        if self.unsent() == 0 || self.sent > self.unsent() + SEND_LEN {
            drop_front(&mut self.output, self.sent);
            self.sent = 0;
        }
        Ok(())
    }

    /// Acts on the requests that have arrived whole, while their answers can leave.
    pub(super) fn process(
        &mut self,
        conn: ConnId,
        received: &[u8],
        state: &mut ServerState,
        woken: &mut Vec<ConnId>,
    ) -> Result<(), Fault> {
        let fresh = self.input.is_empty();
        if !fresh {
            self.input.extend_from_slice(received);
        }
        let input = if fresh { received } else { &self.input };
        let mut used = 0;
        self.stalled = loop {
            if self.unsent() >= MAX_UNSENT {
                break true;
            }
            let rest = &input[used..];
            if let Some(&opcode) = rest.first()
                && !self.open
            {
                state.admits(conn, opcode)?;
                self.open = state.is_open(conn);
            }
            let Some((part, len)) = self.decoder.next(rest)? else {
                break false;
            };
            used += len;
            state.handle(
                conn,
                part,
                &mut Outbox {
                    reply: &mut self.output,
                    woken,
                },
            )?;
        };
        match fresh {
            true => self.input.extend_from_slice(&received[used..]),
            false => drop_front(&mut self.input, used),
        }
        Ok(())
    }

    pub(super) fn is_congested(&self) -> bool {
        self.unsent() >= MAX_UNSENT
    }

    pub(super) fn next(&self) -> Next {
        if self.unsent() > 0 && self.writable {
            Next::Again
        } else if self.is_congested() {
            Next::Wait
        } else if self.stalled || self.readable {
            Next::Again
        } else if self.ended && self.unsent() == 0 {
            Next::Close
        } else {
            Next::Wait
        }
    }
}

/// Removes bytes from the front; an emptied buffer gives its memory back if it had grown.
fn drop_front(buffer: &mut Vec<u8>, count: usize) {
    if count < buffer.len() {
        buffer.drain(..count);
    } else if buffer.capacity() > READ_LEN {
        *buffer = Vec::new();
    } else {
        buffer.clear();
    }
}
