//! Sends and receives: matched by peer and tag, outside the order of collectives.
//!
//! Gloo has no way to ask whether a message is through, only to wait for it. Messages of one
//! direction, peer and tag go through in order, so one thread waits for all of them, one after the
//! other; it exists as long as there are any.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use phalanx_pg::{Buffer, Done, Error, ErrorKind, Frozen, MAX_OUTSTANDING, Part, Place, Result};

use crate::context::{Context, Message};
use crate::error::GlooError;
use crate::member::Member;

/// Up to this many bytes a send takes a copy and is over: the receiver need not be there. Gloo
/// itself sends nothing before it is.
const EAGER: usize = 64 << 10;

/// Most threads that wait.
const MAX_QUEUES: usize = 1024;

/// What messages are matched by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Queue {
    sends: bool,
    /// Nobody for a receive from anybody.
    peer: Option<usize>,
    tag: u32,
}

/// A message that has been posted and is not through.
#[derive(Debug)]
struct Posted {
    // Before the memory, which it points into.
    message: Arc<Message>,
    memory: Memory,
    /// The caller's side; gone for a send that took a copy.
    part: Option<Part>,
    /// Where its error happens, but for the time.
    place: Place,
    deadline: Instant,
    since: Instant,
}

/// What a message points into, kept until it is through.
#[derive(Debug)]
enum Memory {
    Received(Buffer),
    #[expect(dead_code, reason = "kept for its memory")]
    Sent(Frozen),
    #[expect(dead_code, reason = "kept for its memory")]
    Copied(Vec<u8>),
}

/// The point-to-point side of a member.
#[derive(Debug, Default)]
pub(crate) struct Messages {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queues: HashMap<Queue, VecDeque<Posted>>,
    posted: usize,
    /// Of these, those that a caller waits for.
    awaited: usize,
    aborted: bool,
    /// How many messages have gone to each rank, and have come from it.
    sent: HashMap<usize, u64>,
    received: HashMap<usize, u64>,
}

/// A send or a receive as it was called.
#[derive(Debug)]
pub(crate) enum Wanted {
    Send(Frozen),
    Recv(Buffer),
}

/// To or from whom, and until when.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Route {
    pub(crate) peer: Option<usize>,
    pub(crate) tag: u32,
    pub(crate) deadline: Instant,
}

impl Messages {
    /// Refuses before anything is posted.
    pub(crate) fn admit(&self, calls: usize) -> Result<()> {
        let state = self.state.lock();
        let what = match () {
            () if state.posted + calls > MAX_OUTSTANDING => {
                format!("{MAX_OUTSTANDING} messages are outstanding, wait for some")
            }
            () if state.queues.len() + calls > MAX_QUEUES => format!(
                "messages wait in {MAX_QUEUES} queues, one for each peer and tag; wait for some"
            ),
            () => return Ok(()),
        };
        Err(Error::new(ErrorKind::QueueFull, what))
    }

    /// Posts a message; `part` hears of its end.
    pub(crate) fn post(&self, member: &Arc<Member>, wanted: Wanted, route: Route, part: Part) {
        let queue = Queue {
            sends: matches!(wanted, Wanted::Send(_)),
            peer: route.peer,
            tag: route.tag,
        };
        // Posting is in the order of the calls.
        let mut state = self.state.lock();
        let eager = matches!(&wanted, Wanted::Send(data) if data.byte_len() <= EAGER);
        let place = part.place();
        let posted = match post(member.context(), member.rank(), wanted, route, place) {
            _ if state.aborted => Err(Error::new(ErrorKind::Aborted, "interrupted")),
            Ok(posted) => Ok(posted),
            Err(err) => Err(err.into_error()),
        };
        let mut posted = match posted {
            Ok(posted) => posted,
            Err(err) => {
                drop(state);
                let err = member.explain_message(err, part.place());
                return part.end(Err(err));
            }
        };
        posted.part = Some(part);
        state.posted += 1;
        let mut over = None;
        match eager {
            true => over = posted.part.take(),
            false => state.awaited += 1,
        }
        let first = !state.queues.contains_key(&queue);
        state.queues.entry(queue).or_default().push_back(posted);
        drop(state);
        if let Some(part) = over {
            part.end(Ok(Done::default()));
        }
        if first {
            self.attend(member, queue);
        }
    }

    fn attend(&self, member: &Arc<Member>, queue: Queue) {
        let owner = Arc::clone(member);
        let thread = std::thread::Builder::new().name("phalanx-message".into());
        let spawned = thread.spawn(move || owner.messages().wait_for_all(&owner, queue));
        if let Err(err) = spawned {
            let err = Error::new(ErrorKind::Backend, format!("starting a thread: {err}"));
            member.fail(err.clone());
            let left = self.state.lock().queues.remove(&queue).unwrap_or_default();
            for posted in left {
                self.end(posted, Err(err.clone()));
            }
        }
    }

    /// The thread of a queue.
    fn wait_for_all(&self, member: &Arc<Member>, queue: Queue) {
        loop {
            let mut state = self.state.lock();
            let Some(first) = state.queues.get(&queue).and_then(VecDeque::front) else {
                state.queues.remove(&queue);
                return;
            };
            let (message, deadline) = (Arc::clone(&first.message), first.deadline);
            drop(state);
            let came = match queue.sends {
                true => message.wait_sent(deadline).map(|sent| sent.then_some(None)),
                false => message.wait_received(deadline).map(|from| from.map(Some)),
            };
            drop(message);
            let mut state = self.state.lock();
            let waiting = state.queues.get_mut(&queue);
            let posted = waiting.and_then(VecDeque::pop_front);
            let posted = posted.expect("only this thread takes from the queue");
            match (&came, queue.peer) {
                (Ok(Some(Some(from))), _) => *state.received.entry(*from).or_default() += 1,
                (Ok(Some(None)), Some(to)) => *state.sent.entry(to).or_default() += 1,
                _ => {}
            }
            drop(state);
            let result = match came {
                Ok(Some(source)) => Ok(source),
                Ok(None) => Err(Error::new(ErrorKind::Aborted, "interrupted")),
                Err(err) => Err(self.late(err, queue)),
            };
            let result = result.map_err(|err| {
                let mut place = posted.place.clone();
                place.elapsed = Some(posted.since.elapsed());
                member.explain_message(err, place)
            });
            self.end(posted, result);
        }
    }

    fn late(&self, err: GlooError, queue: Queue) -> Error {
        let err = err.into_error();
        if err.kind() != ErrorKind::Timeout {
            return err;
        }
        let tag = queue.tag;
        match (queue.sends, queue.peer) {
            (true, Some(peer)) => {
                let what =
                    format!("rank {peer} did not receive the message with tag {tag} in time");
                Error::new(ErrorKind::Timeout, what).from_peer(peer)
            }
            (false, Some(peer)) => {
                let what = format!("rank {peer} did not send a message with tag {tag} in time");
                Error::new(ErrorKind::Timeout, what).from_peer(peer)
            }
            (_, None) => {
                let what = format!("nobody sent a message with tag {tag} in time");
                Error::new(ErrorKind::Timeout, what)
            }
        }
    }

    fn end(&self, posted: Posted, result: Result<Option<usize>>) {
        let Posted {
            message,
            memory,
            part,
            ..
        } = posted;
        // Gloo lets go of the memory here.
        drop(message);
        let result = result.map(|source| match memory {
            Memory::Received(buffer) => Done {
                source,
                ..buffer.into()
            },
            _ => Done::default(),
        });
        let mut state = self.state.lock();
        state.posted -= 1;
        if part.is_some() {
            state.awaited -= 1;
        }
        drop(state);
        self.changed.notify_all();
        if let Some(part) = part {
            part.end(result);
        }
    }

    /// Wakes everybody who waits, and refuses what comes.
    pub(crate) fn abort(&self) {
        let mut state = self.state.lock();
        state.aborted = true;
        for posted in state.queues.values().flatten() {
            posted.message.abort();
        }
    }

    /// Whether something that a caller waits for needs this rank.
    pub(crate) fn waits_for(&self, rank: usize) -> bool {
        let state = self.state.lock();
        let mut queues = state.queues.iter();
        queues.any(|(queue, posted)| {
            queue.peer == Some(rank) && posted.iter().any(|posted| posted.part.is_some())
        })
    }

    /// How many messages have gone to a rank, if none waits to be asked for.
    pub(crate) fn all_sent_to(&self, rank: usize) -> Option<u64> {
        let waits = |(queue, posted): (&Queue, &VecDeque<Posted>)| {
            queue.sends && queue.peer == Some(rank) && !posted.is_empty()
        };
        let state = self.state.lock();
        let waiting = state.queues.iter().any(waits);
        (!waiting).then(|| state.sent.get(&rank).copied().unwrap_or(0))
    }

    /// How many messages have gone to a rank.
    pub(crate) fn sent_to(&self, rank: usize) -> u64 {
        self.state.lock().sent.get(&rank).copied().unwrap_or(0)
    }

    /// How many messages have come from a rank.
    pub(crate) fn received_from(&self, rank: usize) -> u64 {
        self.state.lock().received.get(&rank).copied().unwrap_or(0)
    }

    /// Waits until callers wait for nothing any more; each message ends by its own deadline.
    pub(crate) fn settle(&self) {
        let mut state = self.state.lock();
        while state.awaited > 0 {
            self.changed.wait(&mut state);
        }
    }
}

fn post(
    context: &Arc<Context>,
    rank: usize,
    wanted: Wanted,
    route: Route,
    place: Place,
) -> std::result::Result<Posted, GlooError> {
    let slot = u64::from(route.tag);
    let now = Instant::now();
    let mut deadline = route.deadline;
    let (message, memory) = match wanted {
        Wanted::Send(data) => {
            let (pointer, len, memory) = match data.byte_len() <= EAGER {
                true => {
                    // Whoever has a copy has all the time there is.
                    deadline = now + Duration::from_secs(1 << 30);
                    let copy = data.as_bytes().unwrap_or_default().to_vec();
                    (copy.as_ptr(), copy.len(), Memory::Copied(copy))
                }
                false => (
                    data.as_ptr().as_ptr().cast_const(),
                    data.byte_len(),
                    Memory::Sent(data),
                ),
            };
            // SAFETY: `memory` owns the bytes, which nobody changes, and is dropped after the
            // message; moving it moves no bytes.
            let message = unsafe { Message::new(context, pointer.cast_mut(), len)? };
            message.send(route.peer.unwrap_or(rank), slot)?;
            (message, memory)
        }
        Wanted::Recv(buf) => {
            let (pointer, len) = (buf.as_ptr().as_ptr(), buf.byte_len());
            // SAFETY: the buffer is the only handle on these bytes and is dropped, or handed out,
            // after the message.
            let message = unsafe { Message::new(context, pointer, len)? };
            let from = match route.peer {
                Some(peer) => vec![peer],
                None => (0..context.size()).filter(|&peer| peer != rank).collect(),
            };
            message.recv(&from, slot)?;
            (message, Memory::Received(buf))
        }
    };
    Ok(Posted {
        message: Arc::new(message),
        memory,
        part: None,
        place,
        deadline,
        since: now,
    })
}
