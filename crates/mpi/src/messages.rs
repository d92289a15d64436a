//! Sends and receives: matched by peer and tag, outside the order of collectives.
//!
//! They are started by whoever calls, and one thread of the group asks MPI how they stand as long
//! as there are any.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use phalanx_pg::{
    Buffer, Call, CallKind, CallOptions, Done, Error, ErrorKind, Frozen, MAX_OUTSTANDING, Part,
    RawWork, Result,
};

use crate::comm::Comm;
use crate::flight::{Flight, Source};
use crate::library::library;
use crate::member::{Member, Needs, Pace, RESERVED};

/// How long the thread stays when there is nothing to do.
const IDLE: Duration = Duration::from_millis(100);

/// How many tags that callers cannot use have a place.
const RESERVED_TAGS: u32 = 256;

/// The point-to-point side of a member.
#[derive(Default)]
pub(crate) struct Messages {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    started: Vec<Started>,
    /// Started, and what the thread has taken to look at.
    outstanding: usize,
    /// The thread is there.
    thread: bool,
}

/// A message that is not through.
struct Started {
    flight: Flight<Memory>,
    part: Part,
    kind: CallKind,
    peer: Option<usize>,
    tag: u32,
    deadline: Instant,
}

/// What a message is read from or written to.
enum Memory {
    Sent(Frozen),
    Received(Buffer),
}

impl Member {
    /// Starts a send, a receive or a batch of them.
    pub(crate) fn point_to_point(
        self: &Arc<Self>,
        call: Call,
        options: &CallOptions,
    ) -> Result<RawWork> {
        let timeout = options.timeout.unwrap_or(self.timeout());
        let deadline = Instant::now() + timeout.min(Duration::from_secs(1 << 30));
        let (calls, work) = self.issued().issue(call, |calls| self.admit(calls))?;
        for (call, part) in calls {
            self.start_message(call, deadline, part);
        }
        Ok(work)
    }

    /// Refuses before anything is started.
    fn admit(&self, calls: &[Call]) -> Result<()> {
        if self.messages().state.lock().outstanding + calls.len() > MAX_OUTSTANDING {
            let full = format!("{MAX_OUTSTANDING} operations are outstanding, wait for some");
            return Err(Error::new(ErrorKind::QueueFull, full));
        }
        for call in calls {
            if let Call::Send { tag, .. } | Call::Recv { tag, .. } = call {
                self.route(*tag)?;
            }
        }
        Ok(())
    }

    /// Where messages of a tag go, and under which tag of MPI's.
    fn route(&self, tag: u32) -> Result<(&Comm, c_int)> {
        let largest = library()?.largest_tag;
        match (c_int::try_from(tag), tag.wrapping_sub(1 << 31)) {
            (Ok(number), _) if tag <= largest => Ok((self.comm(), number)),
            // Those above are the process group's own, a few, and not for MPI to refuse.
            (Err(_), reserved @ 0..RESERVED_TAGS) => {
                Ok((self.control(), RESERVED + reserved as c_int))
            }
            _ => {
                let what = format!("MPI has no tag {tag} here, the largest is {largest}");
                Err(Error::unsupported(what))
            }
        }
    }

    fn start_message(self: &Arc<Self>, call: Call, deadline: Instant, part: Part) {
        let kind = call.kind();
        let (peer, tag, memory) = match call {
            Call::Send { data, peer, tag } => (Some(peer), tag, Memory::Sent(data)),
            Call::Recv { buf, peer, tag } => (peer, tag, Memory::Received(buf)),
            other => {
                let what = format!("{} is no point-to-point call", other.kind());
                return part.end(Err(Error::invalid(what)));
            }
        };
        let (comm, mpi_tag) = match self.route(tag) {
            Ok(route) => route,
            Err(err) => return part.end(Err(err)),
        };
        let buffer: &Buffer = match &memory {
            Memory::Sent(data) => data,
            Memory::Received(buf) => buf,
        };
        let (bytes, len) = (buffer.as_ptr().as_ptr(), buffer.byte_len());
        let sends = matches!(memory, Memory::Sent(_));
        let mut flight = Flight::new(memory);
        // SAFETY: the bytes are the buffer's, which is the flight's and does not move them; one
        // that is received into is the only handle on its memory.
        let begun = unsafe {
            match (sends, peer) {
                (true, peer) => {
                    let peer = peer.unwrap_or(self.rank());
                    flight.send(comm, (bytes.cast_const(), len), peer, mpi_tag)
                }
                (false, Some(peer)) => flight.recv(comm, (bytes, len), Source::Rank(peer), mpi_tag),
                (false, None) => flight.recv(comm, (bytes, len), Source::Anybody, mpi_tag),
            }
        };
        let mut started = Started {
            flight,
            part,
            kind,
            peer,
            tag,
            deadline,
        };
        match begun.and_then(|()| started.flight.test()) {
            Ok(true) => started.end(),
            Ok(false) => self.attend(started),
            Err(err) => started.fail(self, err),
        }
    }

    fn attend(self: &Arc<Self>, started: Started) {
        let messages = self.messages();
        let mut state = messages.state.lock();
        state.started.push(started);
        state.outstanding += 1;
        let spawn = !std::mem::replace(&mut state.thread, true);
        drop(state);
        messages.changed.notify_all();
        if spawn {
            let member = Arc::clone(self);
            let thread = std::thread::Builder::new().name("phalanx-message".into());
            if let Err(err) = thread.spawn(move || member.watch_messages()) {
                let err = Error::new(ErrorKind::Backend, format!("starting a thread: {err}"));
                self.fail(err);
            }
        }
    }

    /// The thread.
    fn watch_messages(&self) {
        let messages = self.messages();
        let mut mine: Vec<Started> = Vec::new();
        let mut pace = Pace::new();
        loop {
            let mut state = messages.state.lock();
            mine.append(&mut state.started);
            if mine.is_empty() {
                let late = messages.changed.wait_for(&mut state, IDLE).timed_out();
                if late && state.started.is_empty() {
                    state.thread = false;
                    return;
                }
                pace = Pace::new();
                continue;
            }
            drop(state);
            let before = mine.len();
            mine = self.look_at(mine);
            let ended = before - mine.len();
            if ended > 0 {
                messages.state.lock().outstanding -= ended;
                messages.changed.notify_all();
                pace = Pace::new();
            } else if pace.step() {
                self.look_around_for(&mine);
            }
        }
    }

    /// Breaks the group if somebody here waits for a rank that has left.
    fn look_around_for(&self, mine: &[Started]) {
        let peers: Vec<usize> = mine.iter().filter_map(|started| started.peer).collect();
        if let Err(err) = self.look_around(Needs::Only(&peers))
            && self.broken().is_none()
        {
            self.fail(err);
        }
    }

    /// Ends what is through, late, or in vain; the others.
    fn look_at(&self, mine: Vec<Started>) -> Vec<Started> {
        let (broken, now) = (self.broken(), Instant::now());
        let mut open = Vec::with_capacity(mine.len());
        for mut started in mine {
            match (started.flight.test(), &broken) {
                (Ok(true), _) => started.end(),
                (Err(err), _) => started.fail(self, err),
                (Ok(false), Some(_)) => {
                    started.fail(self, Error::new(ErrorKind::Aborted, "interrupted"));
                }
                (Ok(false), None) if now >= started.deadline => {
                    let late = started.late();
                    started.fail(self, late);
                }
                (Ok(false), None) => open.push(started),
            }
        }
        open
    }
}

impl Started {
    /// It is through.
    fn end(self) {
        let arrived: Result<(usize, usize)> = match self.kind {
            CallKind::Send => Ok((0, 0)),
            _ => (0..self.flight.messages()).try_fold((0, 0), |(_, sum), message| {
                let arrival = self.flight.arrival(message)?;
                Ok((arrival.from, sum + arrival.bytes))
            }),
        };
        let result = arrived.and_then(|(from, bytes)| match self.flight.land() {
            Memory::Sent(_) => Ok(Done::default()),
            Memory::Received(buf) if buf.byte_len() == bytes => Ok(Done {
                source: Some(from),
                ..buf.into()
            }),
            Memory::Received(buf) => {
                let room = buf.byte_len();
                let what = format!("rank {from} sent {bytes} bytes, there is room for {room}");
                Err(Error::new(ErrorKind::Mismatch, what).from_peer(from))
            }
        });
        self.part.end(result);
    }

    /// It has failed, and breaks the group.
    fn fail(self, member: &Member, err: Error) {
        let err = err.at(self.part.place());
        if err.kind() != ErrorKind::Aborted {
            member.fail(err.clone());
        }
        let err = match member.broken() {
            Some(cause) if cause.message() != err.message() => Error::because(&cause),
            _ => err,
        };
        self.part.end(Err(err));
    }

    fn late(&self) -> Error {
        let tag = self.tag;
        let what = match (self.kind, self.peer) {
            (CallKind::Send, Some(peer)) => format!("rank {peer} did not take tag {tag} in time"),
            (_, Some(peer)) => format!("rank {peer} sent nothing with tag {tag} in time"),
            (_, None) => format!("no rank sent anything with tag {tag} in time"),
        };
        Error::new(ErrorKind::Timeout, what)
    }
}

impl Messages {
    /// There is news.
    pub(crate) fn wake(&self) {
        self.changed.notify_all();
    }

    /// Waits until nothing is outstanding; each message ends by its own deadline.
    pub(crate) fn settle(&self) {
        let mut state = self.state.lock();
        while state.outstanding > 0 {
            self.changed.wait(&mut state);
        }
    }
}
