//! One rank of one group: what has come for it, what waits, and how it ends.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use phalanx_pg::{Error, ErrorKind, Place, PointToPoint, Result};

use crate::connect::Seat;
use crate::mailbox::{Data, Delivery, Label, Letter, Mailbox};
use crate::pending::Pending;
use crate::transport::{Farewell, Ticket, Transport};
use phalanx_pg::Notice;

mod point_to_point;
mod round;

/// How long a rank that leaves waits for what it has sent to go out.
const LINGER: Duration = Duration::from_secs(2);

/// The same for a rank whose group is broken: the others have nothing to lose but the reason.
const BRIEFLY: Duration = Duration::from_millis(100);

/// The meeting point of three parties: the caller who submits, the transport that delivers, and
/// the clock. None of them waits for another with the lock held.
pub(crate) struct Member {
    place: Place,
    rank: usize,
    size: usize,
    timeout: Duration,
    messages: PointToPoint,
    state: Mutex<State>,
    /// A message for a collective came or went out, or the group ended.
    arrived: Condvar,
    /// A point-to-point operation ended, or the group did.
    settled: Condvar,
    /// There is an earlier deadline to watch, or the group ended.
    clock: Condvar,
    transport: OnceLock<Arc<dyn Transport>>,
}

struct State {
    phase: Phase,
    mailbox: Mailbox<Pending>,
    sends: HashMap<Ticket, Pending>,
    /// Messages of collectives that have not gone out, and to whom they go.
    flying: HashMap<Ticket, usize>,
    next_ticket: Ticket,
    /// Why nothing more comes from a rank, if it has left the group. What it sent before counts: it
    /// fails the operations that need more of it, and no others.
    gone: Vec<Option<Error>>,
    /// To whom nothing can be sent any more.
    deaf: Vec<bool>,
    /// When the thread that watches deadlines looks next; `None` if there is no thread yet.
    next_look: Option<Instant>,
}

#[derive(Debug)]
enum Phase {
    Open,
    /// Shut down in order.
    Closed,
    /// By this cause, the first.
    Broken(Error),
}

impl Member {
    /// Rank `rank` of the group that `seat` is in, without a transport yet.
    pub(crate) fn new(seat: &Seat<'_>, rank: usize) -> Arc<Self> {
        let size = seat.size();
        let state = State {
            phase: Phase::Open,
            mailbox: Mailbox::new(size),
            sends: HashMap::new(),
            flying: HashMap::new(),
            next_ticket: 0,
            gone: vec![None; size],
            deaf: vec![false; size],
            next_look: None,
        };
        Arc::new(Self {
            place: seat.place_of(rank),
            rank,
            size,
            timeout: seat.timeout,
            messages: PointToPoint::new(seat.place_of(rank)),
            state: Mutex::new(state),
            arrived: Condvar::new(),
            settled: Condvar::new(),
            clock: Condvar::new(),
            transport: OnceLock::new(),
        })
    }

    /// Connects it with the others. Before that nothing can be sent; what comes is kept.
    pub(crate) fn attach(&self, transport: Arc<dyn Transport>) {
        let fresh = self.transport.set(transport).is_ok();
        debug_assert!(fresh, "a member has one transport");
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Number of sends and receives issued.
    pub(crate) fn p2p_sequence(&self) -> u64 {
        self.messages.sequence()
    }

    /// What broke the group, if it is broken.
    pub(crate) fn broken(&self) -> Option<Error> {
        match &self.state.lock().phase {
            Phase::Broken(cause) => Some(cause.clone()),
            _ => None,
        }
    }

    fn transport(&self) -> &dyn Transport {
        let transport = self.transport.get();
        transport
            .expect("attached before the group is handed out")
            .as_ref()
    }
}

/// What the transport reports.
impl Member {
    /// A message came. Whoever brings it completes the receive that takes it.
    pub(crate) fn deliver(&self, from: usize, label: Label, data: Data) {
        let mut state = self.state.lock();
        if !matches!(state.phase, Phase::Open) {
            return;
        }
        let delivery = state.mailbox.deliver(label, Letter { from, data });
        drop(state);
        match delivery {
            Delivery::Matched(pending, letter) => {
                pending.received(&letter);
                self.settled.notify_all();
            }
            Delivery::Kept => {
                self.arrived.notify_all();
            }
            Delivery::Full => {
                let what = format!("rank {from} sends messages that nobody receives");
                self.fail(&Error::new(ErrorKind::Backend, what).from_peer(from));
            }
        }
    }

    /// A message has gone out.
    pub(crate) fn sent(&self, ticket: Ticket) {
        let mut state = self.state.lock();
        let landed = state.flying.remove(&ticket).is_some();
        let pending = state.sends.remove(&ticket);
        drop(state);
        if landed {
            self.arrived.notify_all();
        }
        if let Some(pending) = pending {
            pending.sent();
            self.settled.notify_all();
        }
    }

    /// A peer has shut down in order.
    pub(crate) fn said_goodbye(&self, from: usize) {
        let what = format!("rank {from} has shut the group down");
        self.gone(from, Error::new(ErrorKind::PeerLost, what).from_peer(from));
    }

    /// A peer sends nothing more, for the reason in its notice.
    pub(crate) fn left(&self, from: usize, notice: &Notice) {
        self.gone(from, notice.to_error());
    }

    /// Nothing more comes from a peer, for this reason.
    pub(crate) fn lost(&self, from: usize, reason: &str) {
        if self.state.lock().gone[from].is_none() {
            let what = format!("rank {from} is lost: {reason}");
            self.deaf(from);
            self.gone(from, Error::new(ErrorKind::PeerLost, what).from_peer(from));
        }
    }

    fn gone(&self, from: usize, why: Error) {
        let mut state = self.state.lock();
        state.gone[from] = Some(why.clone());
        let nobody = (0..self.size).all(|rank| rank == self.rank || state.gone[rank].is_some());
        let deaf = state.deaf[from];
        // What is on its way to a rank that left in order may have been what it was waiting for.
        let hopeless = |pending: &Pending| match pending.peer {
            Some(peer) => peer == from && (deaf || pending.is_receive()),
            None => nobody || deaf,
        };
        let waited_for = state.pending().any(hopeless);
        drop(state);
        self.arrived.notify_all();
        if waited_for {
            self.fail(&why);
        }
    }

    /// Nothing more goes to a peer. Why not is for those to say who read from it, or have.
    pub(crate) fn deaf(&self, to: usize) {
        let mut state = self.state.lock();
        state.deaf[to] = true;
        state.flying.retain(|_, &mut peer| peer != to);
        let waiting = state.sends.values().any(|send| send.peer == Some(to));
        let gone = state.gone[to].clone().filter(|_| waiting);
        drop(state);
        self.arrived.notify_all();
        if let Some(why) = gone {
            self.fail(&why);
        }
    }

    /// A peer says that the group is broken.
    pub(crate) fn told(&self, notice: &Notice) {
        self.end(notice.to_error(), Farewell::Abort(notice.clone()));
    }
}

/// How it ends.
impl Member {
    /// Breaks the group, here and for everybody. The first cause stays.
    pub(crate) fn fail(&self, cause: &Error) {
        let notice = Notice::of(cause, self.rank);
        // Who needs a rank that has left cannot go on, but others may have all they need.
        let left = |rank: usize| self.state.lock().gone[rank].is_some();
        let farewell = match cause.peer().is_some_and(left) {
            true => Farewell::Left(notice),
            false => Farewell::Abort(notice),
        };
        self.end(cause.clone(), farewell);
    }

    /// Leaves a group that was not shut down. Nothing if it has ended.
    pub(crate) fn leave(&self) {
        let what = format!("rank {} dropped the group without a shutdown", self.rank);
        let cause = Error::new(ErrorKind::Aborted, what);
        let notice = Notice::of(&cause.clone().from_peer(self.rank), self.rank);
        let limit = match self.broken() {
            Some(_) => BRIEFLY,
            None => LINGER,
        };
        self.end(cause, Farewell::Left(notice));
        self.transport().join(limit);
    }

    /// Leaves in order.
    pub(crate) fn say_goodbye(&self) {
        self.end(closed(), Farewell::Goodbye);
        self.transport().join(LINGER);
    }

    /// Why a group of these ranks cannot be split off any more, if it cannot.
    pub(crate) fn hopeless(&self, ranks: &[usize]) -> Option<Error> {
        let state = self.state.lock();
        match &state.phase {
            Phase::Broken(cause) => Some(cause.clone()),
            _ => ranks.iter().find_map(|&rank| state.gone[rank].clone()),
        }
    }

    fn end(&self, cause: Error, farewell: Farewell) {
        let mut state = self.state.lock();
        if !matches!(state.phase, Phase::Open) {
            return;
        }
        tracing::debug!(target: "phalanx::reference", "{:?} ends: {cause}", self.place);
        let cause = cause.at(self.place.clone());
        state.phase = match farewell {
            Farewell::Goodbye => Phase::Closed,
            _ => Phase::Broken(cause.clone()),
        };
        let mut pending = state.mailbox.empty();
        pending.extend(std::mem::take(&mut state.sends).into_values());
        drop(state);
        self.arrived.notify_all();
        self.settled.notify_all();
        self.clock.notify_all();
        self.transport().close(farewell);
        for pending in pending {
            pending.fail(&cause);
        }
    }
}

impl State {
    fn ticket(&mut self) -> Ticket {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        ticket
    }

    fn pending(&self) -> impl Iterator<Item = &Pending> {
        self.mailbox.receives().chain(self.sends.values())
    }

    /// Whether operations may go on; the error is that of one at `place`.
    fn check(&self, place: &Place) -> Result<()> {
        match &self.phase {
            Phase::Open => Ok(()),
            Phase::Closed => Err(closed().at(place.clone())),
            Phase::Broken(cause) => Err(Error::because(cause).at(place.clone())),
        }
    }

    fn take_late(&mut self, now: Instant) -> Option<Pending> {
        let send = self.sends.iter().find(|(_, send)| send.deadline <= now);
        if let Some((&ticket, _)) = send {
            return self.sends.remove(&ticket);
        }
        self.mailbox.withdraw(|receive| receive.deadline <= now)
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the group has been shut down")
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.place)
    }
}

#[cfg(test)]
mod tests;
