//! Point-to-point messages of one rank in one group.
//!
//! Small messages travel in a frame and wait at the receiver until somebody wants them. Larger
//! ones are offered: a receiver on the same host copies the data out of the sender's memory, one
//! elsewhere asks for it. Messages from one rank with one tag are received in the order in which
//! they were sent.
//!
//! No sockets and no threads here: calls and frames in, frames and finished calls out.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use phalanx_pg::{Buffer, Done, Error, ErrorKind, Frozen, Part, Place, PointToPoint, Result};

use crate::domain::frame::{self, GroupId, Head, Kind, MAX_PAYLOAD};
use crate::domain::outbox::Outgoing;
use crate::shm::Mark;

/// Largest message that travels in a frame to a rank on this host, where memory can be shared.
pub(crate) const EAGER_LOCAL: usize = 16 << 10;
/// The same to a rank elsewhere.
pub(crate) const EAGER_REMOTE: usize = 64 << 10;
/// Most bytes that may wait for somebody to receive them, and most messages.
const MAX_WAITING: usize = 64 << 20;
const MAX_MESSAGES: usize = 64 << 10;

/// A frame for a rank of the group.
pub(crate) type Letter = (usize, Outgoing);

/// Copies what a rank on this host has offered: from whom, where, how much, and to where. Whether
/// it is there.
pub(crate) type Fetch<'a> = &'a dyn Fn(usize, (u32, usize), &mut Buffer) -> bool;

/// What has been sent and received, and what has not been yet.
pub(crate) struct Messages {
    group: GroupId,
    place: Place,
    issued: PointToPoint,
    state: Mutex<State>,
    /// A call has ended.
    settled: Condvar,
}

#[derive(Default)]
struct State {
    next_ticket: u64,
    sends: HashMap<u64, Send>,
    /// Those that nothing has come for, the oldest first.
    receives: VecDeque<Inbound>,
    /// What nobody has asked for, the oldest first.
    waiting: VecDeque<Waiting>,
    waiting_bytes: usize,
    /// Receives whose data is on its way, by sender and ticket.
    arriving: HashMap<(usize, u64), Arriving>,
}

/// Data to send, and where peers can reach it.
pub(crate) struct Outbound {
    pub(crate) peer: usize,
    pub(crate) tag: u32,
    pub(crate) data: Frozen,
    /// Whether it goes in a frame at once.
    pub(crate) eager: bool,
    /// Where the peer finds it otherwise; `None` if it has to ask.
    pub(crate) shared: Option<((u32, usize), Mark)>,
    pub(crate) deadline: Instant,
    pub(crate) part: Part,
}

/// Room for a message.
pub(crate) struct Inbound {
    pub(crate) peer: Option<usize>,
    pub(crate) tag: u32,
    pub(crate) buf: Buffer,
    pub(crate) deadline: Instant,
    pub(crate) part: Part,
}

struct Send {
    peer: usize,
    tag: u32,
    data: Frozen,
    mark: Option<Mark>,
    deadline: Instant,
    part: Part,
}

struct Waiting {
    from: usize,
    tag: u32,
    content: Content,
}

/// What came.
enum Content {
    Data(Vec<u8>),
    Offer {
        ticket: u64,
        bytes: usize,
        location: Option<(u32, usize)>,
    },
}

struct Arriving {
    receive: Inbound,
    filled: usize,
}

impl State {
    fn outstanding(&self) -> usize {
        self.sends.len() + self.receives.len() + self.arriving.len()
    }
}

impl Inbound {
    fn wants(&self, from: usize, tag: u32) -> bool {
        let peer = self.peer;
        peer.is_none_or(|peer| peer == from) && self.tag == tag
    }
}

impl Messages {
    pub(crate) fn new(group: GroupId, place: Place) -> Self {
        Self {
            group,
            issued: PointToPoint::new(place.clone()),
            place,
            state: Mutex::default(),
            settled: Condvar::new(),
        }
    }

    /// Their numbers.
    pub(crate) fn issued(&self) -> &PointToPoint {
        &self.issued
    }

    fn head(&self, kind: Kind, ticket: u64) -> Head {
        Head {
            a: ticket,
            ..Head::new(kind, self.group)
        }
    }

    /// Starts a send.
    pub(crate) fn send(&self, out: Outbound) -> Letter {
        let mut state = self.state.lock();
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        let bytes = out.data.byte_len();
        let frame = match (&out.shared, out.eager) {
            (_, true) => {
                let head = Head {
                    tag: out.tag,
                    ..self.head(Kind::Message, 0)
                };
                Outgoing::with_data(head, out.data.clone(), 0, bytes).completing(self.group, ticket)
            }
            (shared, false) => {
                let head = Head {
                    tag: out.tag,
                    b: bytes as u64,
                    ..self.head(Kind::Offer, ticket)
                };
                let location = shared
                    .as_ref()
                    .map(|(at, _)| frame::encode_location(at.0, at.1));
                Outgoing::new(
                    head,
                    location.as_ref().map_or(&[], |bytes| bytes.as_slice()),
                )
            }
        };
        let send = Send {
            peer: out.peer,
            tag: out.tag,
            data: out.data,
            mark: out.shared.map(|(_, mark)| mark),
            deadline: out.deadline,
            part: out.part,
        };
        state.sends.insert(ticket, send);
        (out.peer, frame)
    }

    /// Starts a receive; takes what has come for it already.
    pub(crate) fn receive(&self, receive: Inbound, fetch: Fetch<'_>) -> Option<Letter> {
        let mut state = self.state.lock();
        let found = state
            .waiting
            .iter()
            .position(|waiting| receive.wants(waiting.from, waiting.tag));
        let Some(waiting) = found.and_then(|at| state.waiting.remove(at)) else {
            state.receives.push_back(receive);
            return None;
        };
        if let Content::Data(data) = &waiting.content {
            state.waiting_bytes -= data.len();
        }
        drop(state);
        self.fill(receive, waiting.from, waiting.content, fetch)
    }

    /// A message or an offer has come. The error breaks the group.
    pub(crate) fn arrived(
        &self,
        from: usize,
        head: &Head,
        payload: &[u8],
        fetch: Fetch<'_>,
    ) -> Result<Option<Letter>> {
        let content = match head.kind {
            Kind::Offer => Content::Offer {
                ticket: head.a,
                bytes: usize::try_from(head.b).unwrap_or(usize::MAX),
                location: frame::decode_location(payload),
            },
            _ => Content::Data(payload.to_vec()),
        };
        let mut state = self.state.lock();
        let found = state
            .receives
            .iter()
            .position(|receive| receive.wants(from, head.tag));
        if let Some(receive) = found.and_then(|at| state.receives.remove(at)) {
            drop(state);
            self.settled.notify_all();
            return Ok(self.fill(receive, from, content, fetch));
        }
        state.waiting_bytes += payload.len();
        state.waiting.push_back(Waiting {
            from,
            tag: head.tag,
            content,
        });
        match state.waiting_bytes > MAX_WAITING || state.waiting.len() > MAX_MESSAGES {
            true => {
                let what = format!("rank {from} sends messages that nobody receives");
                Err(Error::new(ErrorKind::Backend, what).from_peer(from))
            }
            false => Ok(None),
        }
    }

    /// Brings a message and the receive that takes it together.
    fn fill(
        &self,
        mut receive: Inbound,
        from: usize,
        content: Content,
        fetch: Fetch<'_>,
    ) -> Option<Letter> {
        let room = receive.buf.byte_len();
        let sent = match &content {
            Content::Data(data) => data.len(),
            Content::Offer { bytes, .. } => *bytes,
        };
        let taken = |ticket| Some((from, Outgoing::new(self.head(Kind::Taken, ticket), &[])));
        if sent != room {
            let what = format!("rank {from} sent {sent} bytes, there is room for {room}");
            let err = Error::new(ErrorKind::Mismatch, what).from_peer(from);
            receive.part.end(Err(err));
            return match content {
                Content::Offer { ticket, .. } => taken(ticket),
                Content::Data(_) => None,
            };
        }
        let buf = &mut receive.buf;
        match content {
            Content::Data(data) => {
                let copied = buf.as_bytes_mut().map(|bytes| bytes.copy_from_slice(&data));
                receive.complete(from, copied);
                None
            }
            Content::Offer {
                ticket,
                location: Some(location),
                ..
            } => {
                let copied = match fetch(from, location, buf) {
                    true => Ok(()),
                    false => {
                        let what = format!("rank {from} offers memory that is not there");
                        Err(Error::new(ErrorKind::Backend, what).from_peer(from))
                    }
                };
                receive.complete(from, copied);
                taken(ticket)
            }
            Content::Offer { ticket, .. } => {
                let arriving = Arriving { receive, filled: 0 };
                self.state.lock().arriving.insert((from, ticket), arriving);
                Some((from, Outgoing::new(self.head(Kind::Wanted, ticket), &[])))
            }
        }
    }

    /// The peer wants the data of an offer: the frames to send.
    pub(crate) fn wanted(&self, ticket: u64) -> Vec<Letter> {
        let state = self.state.lock();
        let Some(send) = state.sends.get(&ticket) else {
            return Vec::new();
        };
        let bytes = send.data.byte_len();
        let pieces = (0..bytes).step_by(MAX_PAYLOAD).map(|start| {
            let end = (start + MAX_PAYLOAD).min(bytes);
            let head = self.head(Kind::Piece, ticket);
            let piece = Outgoing::with_data(head, send.data.clone(), start, end);
            match end == bytes {
                true => (send.peer, piece.completing(self.group, ticket)),
                false => (send.peer, piece),
            }
        });
        pieces.collect()
    }

    /// A part of the data that was asked for has come. The error breaks the group.
    pub(crate) fn piece(&self, from: usize, ticket: u64, payload: &[u8]) -> Result<()> {
        let unasked = || {
            let what = format!("rank {from} sends data that nobody asked for");
            Error::new(ErrorKind::Backend, what).from_peer(from)
        };
        let mut state = self.state.lock();
        let arriving = state
            .arriving
            .get_mut(&(from, ticket))
            .ok_or_else(unasked)?;
        let bytes = arriving.receive.buf.as_bytes_mut()?;
        let end = arriving.filled + payload.len();
        let room = bytes.get_mut(arriving.filled..end).ok_or_else(unasked)?;
        room.copy_from_slice(payload);
        arriving.filled = end;
        if end < bytes.len() {
            return Ok(());
        }
        let arriving = state.arriving.remove(&(from, ticket));
        drop(state);
        self.settled.notify_all();
        if let Some(arriving) = arriving {
            arriving.receive.complete(from, Ok(()));
        }
        Ok(())
    }

    /// A send is complete: written, or copied by the receiver.
    pub(crate) fn sent(&self, ticket: u64) {
        let send = self.state.lock().sends.remove(&ticket);
        self.settled.notify_all();
        if let Some(send) = send {
            if let Some(mark) = send.mark {
                mark.clear();
            }
            send.part.end(Ok(Done::default()));
        }
    }

    /// Whether something waits for this rank, who will not come.
    pub(crate) fn waits_for(&self, peer: usize) -> bool {
        let state = self.state.lock();
        state.sends.values().any(|send| send.peer == peer)
            || state
                .receives
                .iter()
                .any(|receive| receive.peer == Some(peer))
            || state.arriving.keys().any(|(from, _)| *from == peer)
    }

    /// How many calls are outstanding.
    pub(crate) fn outstanding(&self) -> usize {
        self.state.lock().outstanding()
    }

    /// Waits until none is.
    pub(crate) fn settle(&self, deadline: Instant) -> Result<()> {
        let mut state = self.state.lock();
        while state.outstanding() > 0 {
            let timed_out = self.settled.wait_until(&mut state, deadline).timed_out();
            if timed_out && state.outstanding() > 0 {
                let what = "sends or receives are outstanding";
                return Err(Error::new(ErrorKind::Timeout, what).at(self.place.clone()));
            }
        }
        Ok(())
    }

    /// Whether the time of an operation is up.
    pub(crate) fn is_late(&self, now: Instant) -> bool {
        let state = self.state.lock();
        let mut receives = state.receives.iter();
        let mut arriving = state.arriving.values();
        receives.any(|receive| receive.deadline <= now)
            || arriving.any(|arriving| arriving.receive.deadline <= now)
            || state.sends.values().any(|send| send.deadline <= now)
    }

    /// An operation whose time is up, if there is one, and its error, which breaks the group and
    /// then ends the operation. The ranks in `silent` do not answer: if not the peer itself, they
    /// may be what it waits for.
    pub(crate) fn late(&self, now: Instant, silent: &[usize]) -> Option<(Part, Error)> {
        let mut state = self.state.lock();
        let late = state
            .receives
            .iter()
            .position(|receive| receive.deadline <= now);
        if let Some(receive) = late.and_then(|at| state.receives.remove(at)) {
            drop(state);
            let tag = receive.tag;
            let what = match receive.peer {
                Some(peer) => format!("rank {peer} sent nothing with tag {tag} in time"),
                None => format!("no rank sent anything with tag {tag} in time"),
            };
            let err = too_late(what, receive.peer, silent).at(receive.part.place());
            return Some((receive.part, err));
        }
        let mut arriving = state.arriving.iter();
        let late = arriving.find(|(_, arriving)| arriving.receive.deadline <= now);
        if let Some(key) = late.map(|(key, _)| *key)
            && let Some(Arriving { receive, filled }) = state.arriving.remove(&key)
        {
            drop(state);
            let (from, tag) = (key.0, receive.tag);
            let room = receive.buf.byte_len();
            let what = format!(
                "rank {from} sent {filled} of {room} bytes with tag {tag}, and no more in time"
            );
            let err = too_late(what, Some(from), silent).at(receive.part.place());
            return Some((receive.part, err));
        }
        let late = state.sends.iter().find(|(_, send)| send.deadline <= now);
        let ticket = late.map(|(ticket, _)| *ticket)?;
        let send = state.sends.remove(&ticket)?;
        drop(state);
        let what = format!("rank {} did not take tag {} in time", send.peer, send.tag);
        let err = too_late(what, Some(send.peer), silent).at(send.part.place());
        Some((send.part, err))
    }

    /// The group is broken: nothing comes to a good end any more.
    pub(crate) fn fail(&self, cause: &Error) {
        let mut state = self.state.lock();
        let sends = std::mem::take(&mut state.sends);
        let receives = std::mem::take(&mut state.receives);
        let arriving = std::mem::take(&mut state.arriving);
        state.waiting.clear();
        drop(state);
        self.settled.notify_all();
        for send in sends.into_values() {
            send.part.end(Err(Error::because(cause)));
        }
        let arriving = arriving.into_values().map(|arriving| arriving.receive);
        for receive in receives.into_iter().chain(arriving) {
            receive.part.end(Err(Error::because(cause)));
        }
    }
}

impl Inbound {
    fn complete(self, from: usize, copied: Result<()>) {
        let Self { buf, part, .. } = self;
        part.end(copied.map(|()| Done {
            source: Some(from),
            ..buf.into()
        }));
    }
}

/// The error of a wait for `awaited` while the ranks in `silent` did not answer.
fn too_late(what: String, awaited: Option<usize>, silent: &[usize]) -> Error {
    let timeout = |what| Error::new(ErrorKind::Timeout, what);
    match (silent.first(), awaited) {
        (_, Some(awaited)) if silent.contains(&awaited) => timeout(what).from_peer(awaited),
        (Some(&other), _) => {
            let what = format!("{what}; rank {other} does not answer, others may wait for it");
            timeout(what).from_peer(other)
        }
        (None, Some(awaited)) => timeout(what).from_peer(awaited),
        (None, None) => timeout(what),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_pg::{Call, DType, RawWork};
    use std::time::Duration;

    fn receive(messages: &Messages, peer: usize, deadline: Instant) -> RawWork {
        let call = Call::Recv {
            buf: Buffer::zeroed(DType::U8, 100),
            peer: Some(peer),
            tag: 7,
        };
        let (mut calls, work) = messages.issued().issue(call, |_| Ok(())).unwrap();
        let (Call::Recv { buf, peer, tag }, part) = calls.remove(0) else {
            panic!("it is a receive");
        };
        let inbound = Inbound {
            peer,
            tag,
            buf,
            deadline,
            part,
        };
        let letter = messages.receive(inbound, &|_, _, _| false);
        assert!(letter.is_none(), "nothing has come yet");
        work
    }

    #[test]
    fn a_message_that_stops_halfway_is_late_too() {
        let messages = Messages::new([0; 16], Place::of_group("g", 0));
        let now = Instant::now();
        let mut work = receive(&messages, 1, now + Duration::from_secs(5));
        let offer = Head {
            tag: 7,
            b: 100,
            ..messages.head(Kind::Offer, 3)
        };
        let wanted = messages.arrived(1, &offer, &[], &|_, _, _| false);
        assert!(wanted.unwrap().is_some(), "the rest is asked for");
        messages.piece(1, 3, &[9; 60]).unwrap();
        assert!(!messages.is_late(now) && messages.late(now, &[]).is_none());
        let later = now + Duration::from_secs(6);
        assert!(messages.is_late(later));
        let (part, err) = messages.late(later, &[]).unwrap();
        part.end(Err(err.clone()));
        assert_eq!((err.kind(), err.peer()), (ErrorKind::Timeout, Some(1)));
        assert!(err.to_string().contains("60 of 100 bytes"), "{err}");
        assert!(work.block(Duration::ZERO).unwrap().is_err());
        assert_eq!(messages.outstanding(), 0);
    }
}
