//! One rank of one group: what has come for it, what waits, and how it ends.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use phalanx_pg::{Error, ErrorKind, Place, Result};

use crate::connect::Seat;
use crate::mailbox::{Data, Delivery, Label, Letter, Mailbox};
use crate::notice::Notice;
use crate::pending::{Pending, because};
use crate::transport::{Farewell, Ticket, Transport};

mod point_to_point;
mod round;

/// The meeting point of three parties: the caller who submits, the transport that delivers, and
/// the clock. None of them waits for another with the lock held.
pub(crate) struct Member {
    place: Place,
    rank: usize,
    size: usize,
    timeout: Duration,
    state: Mutex<State>,
    /// A message for a collective came, or the group ended.
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
    next_ticket: Ticket,
    /// Who has shut the group down on its side.
    gone: Vec<bool>,
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
            next_ticket: 0,
            gone: vec![false; size],
            next_look: None,
        };
        Arc::new(Self {
            place: seat.place_of(rank),
            rank,
            size,
            timeout: seat.timeout,
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
                pending.received(&letter, &self.place);
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
        let pending = self.state.lock().sends.remove(&ticket);
        if let Some(pending) = pending {
            pending.sent();
            self.settled.notify_all();
        }
    }

    /// A peer has shut down in order.
    pub(crate) fn said_goodbye(&self, from: usize) {
        let mut state = self.state.lock();
        state.gone[from] = true;
        let waited_for = state.pending().any(|pending| pending.peer == Some(from));
        drop(state);
        self.arrived.notify_all();
        if waited_for {
            self.fail(&has_left(from));
        }
    }

    /// Nothing more comes from a peer, for this reason.
    pub(crate) fn lost(&self, from: usize, reason: &str) {
        if !self.state.lock().gone[from] {
            let what = format!("rank {from} is lost: {reason}");
            self.fail(&Error::new(ErrorKind::PeerLost, what).from_peer(from));
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
        self.end(cause.clone(), Farewell::Abort(notice));
    }

    /// Leaves without a word; the others take it for dead. Nothing if the group has ended.
    pub(crate) fn leave(&self) {
        let what = "the group was dropped without a shutdown";
        self.end(Error::new(ErrorKind::Aborted, what), Farewell::Silent);
        self.transport().join();
    }

    /// Leaves in order.
    pub(crate) fn say_goodbye(&self) {
        self.end(closed(), Farewell::Goodbye);
        self.transport().join();
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
            pending.fail(&cause, &self.place);
        }
    }
}

impl State {
    fn pending(&self) -> impl Iterator<Item = &Pending> {
        self.mailbox.receives().chain(self.sends.values())
    }

    /// Whether operations may go on; the error is that of one at `place`.
    fn check(&self, place: &Place) -> Result<()> {
        match &self.phase {
            Phase::Open => Ok(()),
            Phase::Closed => Err(closed().at(place.clone())),
            Phase::Broken(cause) => Err(because(cause, place.clone())),
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

fn has_left(peer: usize) -> Error {
    let what = format!("rank {peer} has shut the group down");
    Error::new(ErrorKind::PeerLost, what).from_peer(peer)
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the group has been shut down")
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.place)
    }
}
