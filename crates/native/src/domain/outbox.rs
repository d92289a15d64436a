//! What waits to be written to one process.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Write};
use std::sync::Arc;

use phalanx_pg::Frozen;
use phalanx_pg::mesh::Stream;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::frame::{GroupId, Head};
use crate::shm::Segment;

/// A frame on its way.
pub(crate) struct Outgoing {
    /// Head, and a payload that is no buffer.
    bytes: Vec<u8>,
    /// The rest of the payload: these bytes of a buffer.
    data: Option<(Frozen, usize, usize)>,
    /// A descriptor that goes with it.
    segment: Option<Arc<Segment>>,
    /// Which send is complete once this is written.
    completes: Option<(GroupId, u64)>,
    written: usize,
}

impl Outgoing {
    /// A frame with a payload of its own.
    pub(crate) fn new(mut head: Head, payload: &[u8]) -> Self {
        head.len = payload.len();
        let mut bytes = head.encode().to_vec();
        bytes.extend_from_slice(payload);
        Self {
            bytes,
            data: None,
            segment: None,
            completes: None,
            written: 0,
        }
    }

    /// A frame whose payload is a part of a buffer: from byte `start` to `end`.
    pub(crate) fn with_data(mut head: Head, data: Frozen, start: usize, end: usize) -> Self {
        head.len = end - start;
        Self {
            bytes: head.encode().to_vec(),
            data: Some((data, start, end)),
            segment: None,
            completes: None,
            written: 0,
        }
    }

    /// With a segment's descriptor.
    pub(crate) fn with_segment(self, segment: Arc<Segment>) -> Self {
        Self {
            segment: Some(segment),
            ..self
        }
    }

    /// The frame's last byte completes the group's send with this ticket.
    pub(crate) fn completing(self, group: GroupId, ticket: u64) -> Self {
        Self {
            completes: Some((group, ticket)),
            ..self
        }
    }

    fn len(&self) -> usize {
        self.bytes.len() + self.data.as_ref().map_or(0, |(_, start, end)| end - start)
    }

    /// Writes on, without waiting; true when all of it is written.
    fn write(&mut self, stream: &mut Stream) -> io::Result<bool> {
        while self.written < self.len() {
            let count = match self.written < self.bytes.len() {
                true => self.write_head(stream)?,
                false => {
                    let (data, start, end) = self.data.as_ref().expect("longer than the head");
                    let at = start + self.written - self.bytes.len();
                    let bytes = data.as_bytes().map_err(io::Error::other)?;
                    stream.write(&bytes[at..*end])?
                }
            };
            if count == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            self.written += count;
        }
        Ok(true)
    }

    fn write_head(&mut self, stream: &mut Stream) -> io::Result<usize> {
        let bytes = &self.bytes[self.written..];
        let (Some(segment), Stream::Unix(socket)) = (&self.segment, &*stream) else {
            return stream.write(bytes);
        };
        // With the first byte that gets through.
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [segment.fd()];
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let flags = SendFlags::NOSIGNAL;
        let count = rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
        self.segment = None;
        Ok(count)
    }
}

/// The frames for one process, in order.
#[derive(Default)]
pub(crate) struct Outbox {
    queue: VecDeque<Outgoing>,
}

impl Outbox {
    pub(crate) fn push(&mut self, frame: Outgoing) {
        self.queue.push_back(frame);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Writes what can be written now; `sent` hears of sends that this completes.
    pub(crate) fn write(
        &mut self,
        stream: &mut Stream,
        mut sent: impl FnMut((GroupId, u64)),
    ) -> io::Result<()> {
        while let Some(frame) = self.queue.front_mut() {
            match frame.write(stream) {
                Ok(true) => {
                    let frame = self.queue.pop_front();
                    if let Some(ticket) = frame.and_then(|frame| frame.completes) {
                        sent(ticket);
                    }
                }
                Ok(false) => return Ok(()),
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(err) => return Err(err),
            }
        }
        Ok(())
    }
}
