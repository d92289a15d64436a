//! One rank of one group: where callers, peers and the clock meet.

mod ending;
mod messages;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use phalanx_pg::mesh::{Meeting, Stream, Way};
use phalanx_pg::{
    Buffer, Call, CallOptions, Done, Engine, Error, ErrorKind, Frozen, Lane, MAX_OUTSTANDING,
    Notice, Part, Place, RawWork, Result, Turn,
};
use sha2::{Digest, Sha256};

use crate::between::Between;
use crate::domain::frame::{GroupId, Head, Kind};
use crate::domain::outbox::Outgoing;
use crate::domain::{Domain, os_error};
use crate::host::{Control, Local, Seat as LocalSeat};
use crate::message::{EAGER_LOCAL, EAGER_REMOTE, Inbound, Letter, Messages, Outbound};
use crate::shm::Block;

/// Bytes of a chunk in the staging rings when every rank has a core.
const CHUNK: usize = 128 << 10;
/// The same when ranks share cores: fewer hand-overs.
const CHUNK_SHARED: usize = 256 << 10;

/// How long a process that runs takes to answer at most, however busy the machine.
const ANSWER: Duration = Duration::from_millis(500);

/// How long it may take until a rank that is dead is known to be.
const NEWS: Duration = Duration::from_millis(200);

/// A rank's place in a group that is being formed.
pub(crate) struct Seat<'a> {
    pub(crate) name: String,
    /// Tells the group apart from all others of the world.
    pub(crate) identity: String,
    pub(crate) rank: usize,
    /// The members' ranks in the world.
    pub(crate) members: Vec<usize>,
    pub(crate) timeout: Duration,
    /// The group it is split from: if that breaks, there is nothing to wait for.
    pub(crate) parent: Option<&'a Member>,
}

impl Seat<'_> {
    fn id(&self) -> GroupId {
        let digest = Sha256::digest(self.identity.as_bytes());
        digest[..16].try_into().expect("a digest is longer")
    }

    pub(crate) fn place(&self) -> Place {
        Place::of_group(&self.name, self.rank)
    }
}

/// One rank of one group.
pub(crate) struct Member {
    place: Place,
    id: GroupId,
    rank: usize,
    members: Vec<usize>,
    timeout: Duration,
    domain: Arc<Domain>,
    local: Local,
    messages: Messages,
    /// Who has shut the group down, by rank.
    left: Vec<AtomicBool>,
    /// Who takes no part any more, by rank, and why.
    gone: Vec<OnceLock<Error>>,
    /// The first who died, until it has broken the group.
    death: OnceLock<Error>,
    /// What a peer said when it broke the group: passed on in its words.
    told: OnceLock<Notice>,
    /// The last question whether the others are there, and by rank the last one answered.
    asked: AtomicU64,
    answered: Vec<AtomicU64>,
    /// The question asked because messages are late, and until when to wait for answers.
    inquiry: Mutex<Option<(u64, Instant)>>,
    lane: OnceLock<Weak<Lane>>,
    /// If there are ranks on other hosts.
    between: OnceLock<Between>,
}

impl Member {
    /// Takes the seat; waits for the other members.
    pub(crate) fn join(domain: &Arc<Domain>, seat: &Seat<'_>) -> Result<Arc<Self>> {
        Local::check_size(seat.members.len())?;
        let deadline = Instant::now() + seat.timeout.min(Duration::from_secs(300));
        let own = domain.rank;
        let on_host = |rank: &usize| domain.hosts.together(own, seat.members[*rank]);
        let ranks: Vec<usize> = (0..seat.members.len()).filter(on_host).collect();
        let world: Vec<usize> = ranks.iter().map(|&rank| seat.members[rank]).collect();
        let me = ranks.iter().position(|&rank| rank == seat.rank);
        let me = me.expect("a member is on its own host");
        let cores_suffice = domain.hosts.cores_suffice(own);
        let control = Self::control(domain, seat, &world, deadline)?;
        let local_seat = LocalSeat {
            me,
            ranks,
            world,
            size: seat.members.len(),
            arenas: Arc::clone(&domain.arenas),
            maps: Arc::clone(&domain.maps),
            kernels: domain.kernels,
            cores_suffice,
        };
        let member = Arc::new(Self {
            place: seat.place(),
            id: seat.id(),
            rank: seat.rank,
            members: seat.members.clone(),
            timeout: seat.timeout,
            domain: Arc::clone(domain),
            local: Local::new(local_seat, control),
            messages: Messages::new(seat.id(), seat.place()),
            left: seat
                .members
                .iter()
                .map(|_| AtomicBool::new(false))
                .collect(),
            gone: seat.members.iter().map(|_| OnceLock::new()).collect(),
            death: OnceLock::new(),
            told: OnceLock::new(),
            asked: AtomicU64::new(0),
            answered: seat.members.iter().map(|_| AtomicU64::new(0)).collect(),
            inquiry: Mutex::default(),
            lane: OnceLock::new(),
            between: OnceLock::new(),
        });
        // First, since peers may send as soon as they see this rank.
        domain.links().register(seat.id(), &member);
        member.local.join(deadline, &|| seat.hopeless(domain))?;
        if member.local.spans_hosts() {
            let between = Self::reach_hosts(domain, seat, deadline)?;
            let fresh = member.between.set(between).is_ok();
            debug_assert!(fresh, "set once");
        }
        Ok(member)
    }

    /// Connects with the members on other hosts.
    fn reach_hosts(domain: &Arc<Domain>, seat: &Seat<'_>, deadline: Instant) -> Result<Between> {
        let mut hosts: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (rank, &member) in seat.members.iter().enumerate() {
            hosts
                .entry(domain.hosts.host(member))
                .or_default()
                .push(rank);
        }
        // In order of their lowest ranks in this group, which is its own.
        let mut hosts: Vec<Vec<usize>> = hosts.into_values().collect();
        hosts.sort();
        let here = hosts.iter().position(|ranks| ranks.contains(&seat.rank));
        let meeting = Meeting {
            store: domain.store.second_handle()?,
            prefix: format!("phalanx/native{}/wire", seat.identity),
            name: &seat.name,
            rank: seat.rank,
            size: seat.members.len(),
            bind: domain.bind,
            token: domain.token.as_ref(),
            limit: deadline.saturating_duration_since(Instant::now()),
            give_up: &|| seat.hopeless(domain),
        };
        let way = |&member: &usize| match domain.hosts.together(domain.rank, member) {
            true => Way::None,
            false => Way::Tcp,
        };
        let ways = seat.members.iter().map(way).collect();
        let streams = meeting.connect_streams(domain.cut.streams, &[], |_| Ok(ways));
        let streams = streams.map_err(|err| seat.reason_for(domain, err))?;
        let tcp = |stream: Stream| match stream {
            Stream::Tcp(stream) => {
                let set = stream.set_nonblocking(true);
                Some(set.map(|()| stream))
            }
            Stream::Unix(_) => None,
        };
        let streams = streams
            .into_iter()
            .map(|all| all.into_iter().filter_map(tcp));
        let streams = streams
            .map(Iterator::collect)
            .collect::<std::io::Result<_>>();
        let streams = streams.map_err(|err| os_error("setting up a socket", &err))?;
        let here = here.expect("a member has a host");
        Ok(Between::new(hosts, here, domain.cut, streams))
    }

    /// The control segment: the lowest rank on a host makes it and hands it to the others.
    fn control(
        domain: &Domain,
        seat: &Seat<'_>,
        world: &[usize],
        deadline: Instant,
    ) -> Result<Control> {
        let chunk = match domain.hosts.cores_suffice(domain.rank) {
            true => CHUNK.max(world.len() * 128),
            false => CHUNK_SHARED,
        };
        let maker = world[0];
        if maker == domain.rank {
            let control = Control::create(world.len(), chunk)?;
            for &peer in &world[1..] {
                let head = Head {
                    b: control.segment().len() as u64,
                    ..Head::new(Kind::Control, seat.id())
                };
                let segment = Arc::clone(control.segment());
                domain
                    .links()
                    .send(peer, Outgoing::new(head, &[]).with_segment(segment));
            }
            return Ok(control);
        }
        let glance = Duration::from_millis(100);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if let Some((segment, from)) =
                domain.links().await_control(&seat.id(), glance.min(left))
                && from == maker
            {
                return Control::open(segment, world.len(), chunk);
            }
            if let Some(err) = seat.hopeless(domain) {
                return Err(err);
            }
            if left.is_zero() {
                let rank = seat.members.iter().position(|&member| member == maker);
                return Err(did_not_join(rank.unwrap_or(0), seat.timeout));
            }
        }
    }

    /// The lane that runs its collectives, once there is one.
    pub(crate) fn attach(&self, lane: &Arc<Lane>) {
        let fresh = self.lane.set(Arc::downgrade(lane)).is_ok();
        debug_assert!(fresh, "a member has one lane");
    }

    /// Whether large private memory is best left where it is: the staging rings take it through the
    /// cache in one pass. Between hosts it is brought together first.
    pub(crate) fn works_on_scattered_memory(&self) -> bool {
        !self.local.spans_hosts()
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn members(&self) -> &[usize] {
        &self.members
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    pub(crate) fn messages(&self) -> &Messages {
        &self.messages
    }

    /// What a rank of the world that is gone has said about another, for which it went.
    fn last_word_of(&self, world: usize) -> Option<Error> {
        let rank = self.rank_of(world)?;
        let word = self.gone[rank].get()?;
        (word.peer() != Some(rank)).then(|| word.clone())
    }

    /// The rank in the group of a rank of the world.
    pub(crate) fn rank_of(&self, world: usize) -> Option<usize> {
        self.members.iter().position(|&member| member == world)
    }
}

impl Seat<'_> {
    /// Why there is nothing to wait for any more, if so.
    fn hopeless(&self, domain: &Domain) -> Option<Error> {
        if let Some(cause) = self.parent.and_then(Member::broken) {
            return Some(Error::broken_by(&cause));
        }
        let gone = |rank: &usize| domain.links().is_gone(self.members[*rank]);
        let rank = (0..self.members.len()).find(gone)?;
        let word = |parent: &Member| parent.last_word_of(self.members[rank]);
        if let Some(cause) = self.parent.and_then(word) {
            return Some(Error::broken_by(&cause));
        }
        let what = format!("rank {rank} is lost, and with it the group that was to be formed");
        Some(Error::new(ErrorKind::PeerLost, what).from_peer(rank))
    }
}

impl Seat<'_> {
    /// Why the group could not be formed: a rank that dies meanwhile breaks connections, and is
    /// soon known to be lost.
    fn reason_for(&self, domain: &Domain, err: Error) -> Error {
        let end = Instant::now() + NEWS;
        loop {
            if let Some(lost) = self.hopeless(domain) {
                return lost;
            }
            if Instant::now() >= end {
                return err;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

pub(crate) fn did_not_join(rank: usize, limit: Duration) -> Error {
    let limit = limit.min(Duration::from_secs(300)).as_secs_f64();
    let what = format!("rank {rank} did not join the group within {limit:.1} s");
    Error::new(ErrorKind::Timeout, what).from_peer(rank)
}

/// Collectives.
impl Engine for Member {
    fn run(&self, call: Call, turn: &Turn) -> Result<Done> {
        self.run_call(call, turn)
            .map_err(|err| self.find_silent(turn, err))
    }

    fn interrupt(&self, cause: &Error) {
        let told = self.told.get();
        let told = told.filter(|told| told.to_error().message() == cause.message());
        let notice = told.cloned();
        let notice = notice.unwrap_or_else(|| Notice::of(cause, self.rank));
        match self.local.is_quiet() {
            true => {
                self.local.depart(&notice);
                self.tell_all(Kind::Dropped, &notice.encode());
            }
            false => {
                self.local.break_for(&notice);
                self.tell_all(Kind::Broken, &notice.encode());
            }
        }
        self.messages.fail(cause);
    }

    fn announce(&self, call: &Call, seq: u64) {
        self.local.announce(call, seq);
    }

    fn quick(&self, call: &Call, seq: u64) -> bool {
        self.local.quick(call, seq)
    }

    fn is_settled(&self, turn: &Turn) -> bool {
        self.local.is_settled(turn)
    }

    fn settle(&self, turn: &Turn) -> Result<()> {
        let settled = self.local.settle(turn);
        settled.map_err(|err| self.find_silent(turn, err))
    }
}

impl Member {
    fn run_call(&self, call: Call, turn: &Turn) -> Result<Done> {
        let local = &self.local;
        let Some(between) = self.between.get() else {
            let as_it_is = |call| Ok((call, None));
            return local.run_each(call, turn, as_it_is, |current, call| match call {
                Call::AllReduce { buf, op } => local.run_reduce(current, buf, op, None),
                Call::Reduce { buf, op, root } => local.run_reduce(current, buf, op, Some(root)),
                other => local.run_pull(current, other),
            });
        };
        let share = |call| between.share(local, call);
        let broken = |rank: usize| {
            let gone = || {
                let err = self.gone[rank].get().cloned();
                err.inspect(|_| self.local.be_quiet())
            };
            self.broken().or_else(gone)
        };
        local.run_each(call, turn, share, |current, call| {
            between.run(local, current, call, &broken)
        })
    }

    /// The error of an operation that took too long. A rank waits for one that may itself wait for
    /// another, and so on: whoever does not even answer is the one that all wait for.
    fn find_silent(&self, turn: &Turn, err: Error) -> Error {
        if err.kind() != ErrorKind::Timeout {
            return err;
        }
        let ticket = self.ask_all();
        let end = Instant::now() + ANSWER;
        while self.silent(ticket).next().is_some() {
            if let Some(cause) = self.broken() {
                return cause;
            }
            if Instant::now() >= end {
                let awaited = |&rank: &usize| err.peer() == Some(rank);
                let awaited = self.silent(ticket).find(awaited);
                return match awaited.or_else(|| self.silent(ticket).next()) {
                    Some(rank) if err.peer() != Some(rank) => self.local.late(turn, rank, "finish"),
                    _ => err,
                };
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        err
    }

    /// Asks all others whether they are there.
    fn ask_all(&self) -> u64 {
        let ticket = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        for rank in (0..self.size()).filter(|&rank| rank != self.rank) {
            self.post(Some((rank, self.question(Kind::Ping, ticket))));
        }
        ticket
    }

    /// Who has not answered.
    fn silent(&self, ticket: u64) -> impl Iterator<Item = usize> {
        let is_silent = move |&rank: &usize| {
            rank != self.rank && self.answered[rank].load(Ordering::Acquire) < ticket
        };
        (0..self.size()).filter(is_silent)
    }

    fn question(&self, kind: Kind, ticket: u64) -> Outgoing {
        let head = Head {
            a: ticket,
            ..Head::new(kind, self.id)
        };
        Outgoing::new(head, &[])
    }

    /// A rank asks whether this one is there.
    pub(crate) fn answer(&self, rank: usize, ticket: u64) {
        self.post(Some((rank, self.question(Kind::Pong, ticket))));
    }

    /// A rank is there.
    pub(crate) fn answered(&self, rank: usize, ticket: u64) {
        self.answered[rank].fetch_max(ticket, Ordering::AcqRel);
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.place)
    }
}
