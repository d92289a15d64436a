//! One rank of one group: what it runs, what it is told, and how it ends.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use phalanx_pg::{
    Call, CallOptions, Done, Engine, Error, ErrorKind, Lane, Notice, Place, PointToPoint, RawWork,
    Result, Turn, Word,
};
use phalanx_store::Store;
use sha2::{Digest, Sha256};

use crate::collective::{Order, Round};
use crate::connect::Keys;
use crate::context::{Context, Device, Ticket};
use crate::frame::{GroupId, Saying};
use crate::links::Service;
use crate::messages::{Messages, Route, Wanted};

/// How long the news of why gloo's connections have closed may take.
const NEWS: Duration = Duration::from_secs(2);

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

pub(crate) struct State {
    /// The first collective that is not finished here.
    pub(crate) finished: u64,
    /// Later ones that are.
    ahead: BTreeSet<u64>,
    pub(crate) running: BTreeSet<u64>,
    /// One more than the last that was begun.
    begun: u64,
    /// From which collective on a rank takes no part, and why.
    pub(crate) left: Vec<Option<(u64, Error)>>,
    /// Who needs nothing more of the connections.
    pub(crate) past: Vec<bool>,
    /// Who closes its connections to this rank, after how many messages that went over them.
    pub(crate) closing: Vec<Option<u64>>,
    /// Whether a rank has come to a collective, where it was asked.
    pub(crate) answers: HashMap<(u64, usize), bool>,
    /// This rank has said that it does not.
    pub(crate) said_past: bool,
    /// Since when something here needs a rank that has left.
    pub(crate) held: Option<Instant>,
    /// What broke the group, as far as this rank was told.
    cause: Option<Error>,
    /// The group is broken.
    interrupted: bool,
    /// The end needs no words any more.
    pub(crate) quiet: bool,
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
            let parent = seat.parent;
            let left = parent.is_some_and(|parent| parent.has_left(seat.members[gone]));
            let (kind, did) = match left {
                true => (ErrorKind::Aborted, "has dropped the group to be split"),
                false => (ErrorKind::PeerLost, "is gone: its process has ended"),
            };
            Some(Error::new(kind, format!("rank {gone} {did}")).from_peer(gone))
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
                begun: 0,
                left: vec![None; size],
                past: vec![false; size],
                closing: vec![None; size],
                answers: HashMap::new(),
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

    /// What is known of the others, and how to hear that it has changed.
    pub(crate) fn state(&self) -> (&Mutex<State>, &Condvar) {
        (&self.state, &self.changed)
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
            ErrorKind::Timeout if seq != u64::MAX => return self.blame(err, seq),
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
    pub(crate) fn told(&self, world_rank: usize, saying: Saying) {
        let Some(from) = self.rank_of(world_rank) else {
            return;
        };
        let mut state = self.state.lock();
        match saying {
            Saying::Word(Word::Broken(notice)) => {
                let cause = notice.to_error();
                state.cause.get_or_insert(cause.clone());
                state.past[from] = true;
                drop(state);
                self.changed.notify_all();
                return self.fail(cause);
            }
            Saying::Word(Word::Left(count, notice)) => {
                state.left[from] = Some((count, notice.to_error()));
                self.say_past_if_so(state);
            }
            Saying::Word(Word::Past) => {
                state.past[from] = true;
                drop(state);
            }
            Saying::Closing(sent) => {
                state.closing[from] = Some(sent);
                drop(state);
            }
            Saying::HasCome(seq) => {
                let come = state.has_come(seq);
                drop(state);
                return self.tell(from, &Saying::Come(seq, come));
            }
            Saying::Come(seq, come) => {
                state.answers.insert((seq, from), come);
                drop(state);
                self.changed.notify_all();
                return;
            }
        }
        self.changed.notify_all();
        self.look_around();
    }

    /// A process of the world has ended.
    pub(crate) fn process_ended(&self, world_rank: usize) {
        let Some(rank) = self.rank_of(world_rank) else {
            return;
        };
        let mut state = self.state.lock();
        let in_order = std::mem::replace(&mut state.past[rank], true);
        // Whatever it sent and this rank has not asked for is lost.
        state.closing[rank].get_or_insert(0);
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

    /// Whether a process has said that it drops the group.
    fn has_left(&self, world_rank: usize) -> bool {
        let rank = self.rank_of(world_rank);
        rank.is_some_and(|rank| self.state.lock().left[rank].is_some())
    }

    fn rank_of(&self, world_rank: usize) -> Option<usize> {
        self.members.iter().position(|&rank| rank == world_rank)
    }

    /// The other ranks.
    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.rank();
        (0..self.size()).filter(move |&rank| rank != own)
    }

    pub(crate) fn tell(&self, rank: usize, saying: &Saying) {
        if let Some(service) = &self.domain.service {
            let world_rank = self.members[rank];
            service.links().tell(world_rank, self.id, saying.clone());
        }
    }

    pub(crate) fn tell_all(&self, saying: &Saying) {
        self.others().for_each(|rank| self.tell(rank, saying));
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

    /// Whether this rank has begun collective `seq`.
    fn has_come(&self, seq: u64) -> bool {
        // Also one that has failed: asking ranks run out of time when this one does.
        seq < self.begun
    }

    /// Why collective `seq` cannot be, if a rank has left before it.
    pub(crate) fn leaver(&self, seq: u64) -> Option<Error> {
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
        state.begun = state.begun.max(turn.seq + 1);
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
        let result = result.map_err(|err| self.explain(err, turn.seq));
        let mut state = self.state.lock();
        state.running.remove(&turn.seq);
        if result.is_ok() {
            state.finish(turn.seq);
            self.say_past_if_so(state);
        }
        result
    }

    fn interrupt(&self, cause: &Error) {
        let mut state = self.state.lock();
        state.interrupted = true;
        let (quiet, running) = (state.quiet, !state.running.is_empty());
        drop(state);
        if !quiet {
            let notice = Notice::of(cause, self.rank());
            self.tell_all(&Saying::Word(Word::Broken(notice)));
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
