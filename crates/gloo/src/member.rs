//! One rank of one group: what it runs, what it is told, and how it ends.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use phalanx_pg::{
    Call, CallOptions, Done, Engine, Error, ErrorKind, Lane, Notice, Place, PointToPoint, RawWork,
    Result, Turn, Word,
};
use phalanx_store::Store;
use sha2::{Digest, Sha256};

use crate::collective::{Order, Round};
use crate::connect::Keys;
use crate::context::{Context, Device, Ticket};
use crate::frame::GroupId;
use crate::links::Service;
use crate::messages::{Messages, Route, Wanted};

/// How long the news of why gloo's connections have closed may take.
const NEWS: Duration = Duration::from_secs(2);

/// How long those who leave wait for those who are still busy with what was given to them.
const LINGER: Duration = Duration::from_secs(2);

/// One process of a job: what all its groups share.
#[derive(Debug)]
pub(crate) struct Domain {
    /// To the other processes; not in a group with PyTorch, which knows no such thing.
    pub(crate) service: Option<Service>,
    pub(crate) device: Arc<Device>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) order: Order,
}

/// One rank's place in a group that is being formed.
#[derive(Debug)]
pub(crate) struct Seat<'a> {
    pub(crate) name: String,
    /// Tells the group apart from all others of the job.
    pub(crate) identity: String,
    /// Where the group's addresses are in the store.
    pub(crate) prefix: String,
    pub(crate) rank: usize,
    /// The members' ranks in the world.
    pub(crate) members: Vec<usize>,
    /// For the group's operations.
    pub(crate) timeout: Duration,
    /// For its forming.
    pub(crate) limit: Duration,
    /// The group it is split from: if that breaks there is nothing to wait for.
    pub(crate) parent: Option<&'a Member>,
}

pub(crate) struct Member {
    id: GroupId,
    place: Place,
    members: Vec<usize>,
    timeout: Duration,
    context: Arc<Context>,
    domain: Arc<Domain>,
    lane: OnceLock<Weak<Lane>>,
    state: Mutex<State>,
    changed: Condvar,
    issued: PointToPoint,
    messages: Messages,
}

struct State {
    /// The first collective that is not finished here.
    finished: u64,
    /// Later ones that are.
    ahead: BTreeSet<u64>,
    running: BTreeSet<u64>,
    /// From which collective on a rank takes no part, and why.
    left: Vec<Option<(u64, Error)>>,
    /// Who needs nothing more of the connections.
    past: Vec<bool>,
    /// This rank has said that it does not.
    said_past: bool,
    /// Since when something here needs a rank that has left.
    held: Option<Instant>,
    /// What broke the group, as far as this rank was told.
    cause: Option<Error>,
    /// The group is broken.
    interrupted: bool,
    /// The end needs no words any more.
    quiet: bool,
}

impl Member {
    /// Takes a seat in a new group. A collective call of its members.
    pub(crate) fn join(domain: &Arc<Domain>, seat: &Seat<'_>) -> Result<Arc<Self>> {
        let size = seat.members.len();
        let gone = |rank: &&usize| {
            let service = domain.service.as_ref();
            service.is_some_and(|service| service.links().is_gone(**rank))
        };
        let give_up = || {
            if let Some(cause) = seat.parent.and_then(Member::broken) {
                return Some(Error::broken_by(&cause));
            }
            let gone = seat.members.iter().position(|rank| gone(&rank))?;
            let what = format!("rank {gone} is gone: its process has ended");
            Some(Error::new(ErrorKind::PeerLost, what).from_peer(gone))
        };
        let keys = Keys::new(&*domain.store, &seat.prefix, seat.limit, &give_up);
        let context = Self::connect(domain, seat, &keys).map_err(|err| {
            if domain.service.is_some() {
                keys.take_back(seat.rank);
            }
            // Why it was given up is more than what gloo was told of it.
            give_up().unwrap_or(err)
        })?;
        let member = Arc::new(Self {
            id: group_id(&seat.identity),
            place: Place::of_group(&seat.name, seat.rank),
            members: seat.members.clone(),
            timeout: seat.timeout,
            context: Arc::new(context),
            domain: Arc::clone(domain),
            lane: OnceLock::new(),
            state: Mutex::new(State {
                finished: 0,
                ahead: BTreeSet::new(),
                running: BTreeSet::new(),
                left: vec![None; size],
                past: vec![false; size],
                said_past: false,
                held: None,
                cause: None,
                interrupted: false,
                quiet: false,
            }),
            changed: Condvar::new(),
            issued: PointToPoint::new(Place::of_group(&seat.name, seat.rank)),
            messages: Messages::default(),
        });
        Ok(member)
    }

    fn connect(domain: &Domain, seat: &Seat<'_>, keys: &Keys<'_>) -> Result<Context> {
        let (rank, size) = (seat.rank, seat.members.len());
        // PyTorch's ranks say nothing before.
        if domain.service.is_some() {
            keys.meet(rank, size)?;
        }
        let context = Context::connect(&domain.device, rank, size, keys, keys.left());
        context.map_err(|err| keys.explain(err))
    }

    /// The lane is there: from now on the member hears of its peers.
    pub(crate) fn attach(self: &Arc<Self>, lane: &Arc<Lane>) {
        let _ = self.lane.set(Arc::downgrade(lane));
        if let Some(service) = &self.domain.service {
            service.links().register(self);
        }
    }

    pub(crate) fn id(&self) -> GroupId {
        self.id
    }

    pub(crate) fn rank(&self) -> usize {
        self.context.rank()
    }

    pub(crate) fn size(&self) -> usize {
        self.context.size()
    }

    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    pub(crate) fn members(&self) -> &[usize] {
        &self.members
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    pub(crate) fn messages(&self) -> &Messages {
        &self.messages
    }

    /// The numbers of sends and receives.
    pub(crate) fn issued(&self) -> &PointToPoint {
        &self.issued
    }

    /// What broke the group, if it is broken.
    pub(crate) fn broken(&self) -> Option<Error> {
        let lane = self.lane.get().and_then(Weak::upgrade);
        lane.and_then(|lane| lane.broken())
    }

    /// Breaks the group. The first cause stays.
    pub(crate) fn fail(&self, cause: Error) {
        if let Some(lane) = self.lane.get().and_then(Weak::upgrade) {
            lane.fail(cause);
        }
    }

    /// Starts a send, a receive or a batch of them.
    pub(crate) fn point_to_point(
        self: &Arc<Self>,
        call: Call,
        options: &CallOptions,
    ) -> Result<RawWork> {
        let timeout = options.timeout.unwrap_or(self.timeout);
        let deadline = Instant::now() + timeout.min(Duration::from_secs(1 << 30));
        let admit = |calls: &[Call]| self.messages.admit(calls.len());
        let (calls, work) = self.issued.issue(call, admit)?;
        for (call, part) in calls {
            let (wanted, peer, tag) = match call {
                Call::Send { data, peer, tag } => (Wanted::Send(data), Some(peer), tag),
                Call::Recv { buf, peer, tag } => (Wanted::Recv(buf), peer, tag),
                other => {
                    let what = format!("{} is no point-to-point call", other.kind());
                    part.end(Err(Error::invalid(what)));
                    continue;
                }
            };
            let route = Route {
                peer,
                tag,
                deadline,
            };
            self.messages.post(self, wanted, route, part);
        }
        Ok(work)
    }

    /// The error that a failed message ends with, which happened at `place`; it breaks the group.
    pub(crate) fn explain_message(&self, err: Error, place: Place) -> Error {
        if let Some(cause) = self.broken() {
            return Error::because(&cause).at(place);
        }
        let err = self.explain(err, u64::MAX).at(place.clone());
        self.fail(err.clone());
        match self.broken() {
            // Somebody was faster.
            Some(cause) if cause.message() != err.message() => Error::because(&cause).at(place),
            _ => err,
        }
    }

    /// Why gloo failed in collective `seq`: what the other ranks say, or another operation here,
    /// counts more than its words.
    fn explain(&self, err: Error, seq: u64) -> Error {
        let interrupted = || Error::new(ErrorKind::Aborted, "interrupted");
        if self.broken().is_some() {
            return interrupted();
        }
        match err.kind() {
            ErrorKind::PeerLost if self.domain.service.is_some() => {}
            ErrorKind::Backend => {}
            _ => return err,
        }
        let end = Instant::now() + NEWS;
        let mut state = self.state.lock();
        loop {
            if state.interrupted {
                return interrupted();
            }
            let told = state.cause.clone().or_else(|| state.leaver(seq));
            if let Some(told) = told {
                state.quiet |= state.cause.is_none();
                return told;
            }
            if self.changed.wait_until(&mut state, end).timed_out() {
                return err;
            }
        }
    }

    /// A member of the group says something.
    pub(crate) fn told(&self, world_rank: usize, word: Word) {
        let Some(from) = self.rank_of(world_rank) else {
            return;
        };
        let mut state = self.state.lock();
        match word {
            Word::Broken(notice) => {
                let cause = notice.to_error();
                state.cause.get_or_insert(cause.clone());
                state.past[from] = true;
                drop(state);
                self.changed.notify_all();
                self.fail(cause);
            }
            Word::Left(count, notice) => {
                state.left[from] = Some((count, notice.to_error()));
                self.say_past_if_so(state);
                self.changed.notify_all();
                self.look_around();
            }
            Word::Past => {
                state.past[from] = true;
                drop(state);
                self.changed.notify_all();
                self.look_around();
            }
        }
    }

    /// A process of the world has ended.
    pub(crate) fn process_ended(&self, world_rank: usize) {
        let Some(rank) = self.rank_of(world_rank) else {
            return;
        };
        let mut state = self.state.lock();
        let in_order = std::mem::replace(&mut state.past[rank], true);
        if !in_order && state.left[rank].is_none() {
            let what = format!("rank {rank} is gone: its process has ended");
            let cause = Error::new(ErrorKind::PeerLost, what).from_peer(rank);
            state.cause.get_or_insert(cause.clone());
            drop(state);
            self.changed.notify_all();
            return self.fail(cause);
        }
        drop(state);
        self.changed.notify_all();
    }

    fn rank_of(&self, world_rank: usize) -> Option<usize> {
        self.members.iter().position(|&rank| rank == world_rank)
    }

    /// Ends what waits for a rank that has left, once everybody else has what that rank gave:
    /// closing the connections would take it away.
    pub(crate) fn look_around(&self) {
        let mut state = self.state.lock();
        let mut running = state.running.iter();
        let mut needed = running.find_map(|&seq| state.leaver(seq));
        if needed.is_none() {
            let left = state.left.iter().enumerate();
            let mut awaited =
                left.filter(|(rank, left)| left.is_some() && self.messages.waits_for(*rank));
            needed = awaited.find_map(|(_, left)| left.as_ref().map(|(_, err)| err.clone()));
        }
        let Some(cause) = needed else {
            state.held = None;
            return;
        };
        let since = *state.held.get_or_insert_with(Instant::now);
        if !self.all_past(&state) && since.elapsed() < LINGER {
            return;
        }
        tracing::debug!(target: "phalanx::gloo", "{:?} gives up: {cause}", self.place);
        state.quiet = true;
        drop(state);
        self.fail(cause);
    }

    fn all_past(&self, state: &State) -> bool {
        let mut others = (0..self.size()).filter(|&rank| rank != self.rank());
        others.all(|rank| state.past[rank] || state.left[rank].is_some())
    }

    /// Tells the others that they may close their connections, if this rank needs them no more.
    fn say_past_if_so(&self, mut state: MutexGuard<'_, State>) {
        let finished = state.finished;
        if state.said_past || state.leaver(finished).is_none() {
            return;
        }
        state.said_past = true;
        drop(state);
        self.tell_all(&Word::Past);
    }

    fn tell_all(&self, word: &Word) {
        let Some(service) = &self.domain.service else {
            return;
        };
        let others = self.members.iter().enumerate();
        for (_, &world_rank) in others.filter(|(rank, _)| *rank != self.rank()) {
            service.links().tell(world_rank, self.id, word.clone());
        }
    }

    /// Leaves in order, when all ranks have come to the end.
    pub(crate) fn say_goodbye(&self) {
        self.depart(&Word::Past);
    }

    /// Leaves a group that was not shut down; nothing if it is broken.
    pub(crate) fn leave(&self) {
        let rank = self.rank();
        let what = format!("rank {rank} dropped the group without a shutdown");
        let notice = Notice::of(&Error::new(ErrorKind::Aborted, what).from_peer(rank), rank);
        let finished = self.state.lock().finished;
        self.depart(&Word::Left(finished, notice));
    }

    /// Says a last word, and waits for those who still need what was given to them.
    fn depart(&self, word: &Word) {
        self.state.lock().quiet = true;
        self.tell_all(word);
        let end = Instant::now() + LINGER;
        let mut state = self.state.lock();
        while self.domain.service.is_some() && !self.all_past(&state) {
            if self.changed.wait_until(&mut state, end).timed_out() {
                return;
            }
        }
    }

    /// Collectives are over for good: nothing of the group is left to wake.
    pub(crate) fn end_messages(&self) {
        self.messages.abort();
    }
}

impl State {
    /// Collective `seq` is through.
    fn finish(&mut self, seq: u64) {
        self.ahead.insert(seq);
        while self.ahead.remove(&self.finished) {
            self.finished += 1;
        }
    }

    /// Why collective `seq` cannot be, if a rank has left before it.
    fn leaver(&self, seq: u64) -> Option<Error> {
        let mut left = self.left.iter().flatten();
        left.find(|(count, _)| *count <= seq)
            .map(|(_, err)| err.clone())
    }
}

impl Engine for Member {
    fn run(&self, call: Call, turn: &Turn) -> Result<Done> {
        let mut state = self.state.lock();
        if let Some(err) = state.leaver(turn.seq) {
            // Nobody waits for this rank, so nobody need be told.
            state.quiet = true;
            return Err(err);
        }
        state.running.insert(turn.seq);
        drop(state);
        let round = Round {
            context: &self.context,
            ticket: Ticket {
                // Tags may come round: what has the same one is long over.
                tag: turn.seq as u32,
                deadline: turn.deadline,
            },
            order: self.domain.order,
        };
        let result = round.run(call);
        let mut state = self.state.lock();
        state.running.remove(&turn.seq);
        if result.is_ok() {
            state.finish(turn.seq);
            self.say_past_if_so(state);
            return result;
        }
        drop(state);
        result.map_err(|err| self.explain(err, turn.seq))
    }

    fn interrupt(&self, cause: &Error) {
        let mut state = self.state.lock();
        state.interrupted = true;
        let (quiet, running) = (state.quiet, !state.running.is_empty());
        drop(state);
        if !quiet {
            let notice = Notice::of(cause, self.rank());
            self.tell_all(&Word::Broken(notice));
        }
        if !quiet || running {
            self.context.abort();
        }
        self.messages.abort();
        self.changed.notify_all();
    }
}

fn group_id(identity: &str) -> GroupId {
    let digest: [u8; 32] = Sha256::digest(identity.as_bytes()).into();
    digest[..16]
        .try_into()
        .expect("sixteen of thirty-two bytes")
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.place)
    }
}
