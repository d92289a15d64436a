//! One rank of one group: what it runs, what it is told, and how it ends.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use phalanx_pg::{
    Call, Done, Engine, Error, ErrorKind, Fingerprint, Lane, Notice, Place, PointToPoint, Result,
    Turn, Word,
};

use crate::collective::{Round, by_library, data_for_hello, is_by_library};
use crate::comm::Comm;
use crate::flight::{Flight, take};
use crate::forming::Forming;
use crate::hello::Hello;
use crate::library::Unfinished;
use crate::messages::Messages;

/// Tags of the control communicator; those of hellos come before.
pub(crate) const WORDS: i32 = 64;
/// Data between two ranks, in the order of the collectives.
pub(crate) const EXCHANGE: i32 = 65;
/// About groups that are to be formed.
pub(crate) const FORMING: i32 = 66;
/// Reserved tags of callers, which may be larger than MPI's.
pub(crate) const RESERVED: i32 = 128;

/// Polls between two looks at the clock and at what the others say.
const POLLS: u32 = 64;

/// How long a thread polls without a pause: a message between processes takes microseconds.
const SPIN: Duration = Duration::from_micros(50);
/// Then it lets others run, and after this time it sleeps between polls.
const YIELD: Duration = Duration::from_millis(2);
const NAP: Duration = Duration::from_micros(100);

/// Between the polls of an operation that its caller has given up.
const WITHOUT_CALLER: Duration = Duration::from_millis(1);

/// The groups of this process, for its end.
static GROUPS: Mutex<Vec<Weak<Member>>> = Mutex::new(Vec::new());

/// Tells the members of all groups that are in use that this process has ended.
pub(crate) fn leave_all() {
    let groups = GROUPS.lock().clone();
    for group in groups.iter().filter_map(Weak::upgrade) {
        if group.is_in_use() {
            group.leave("ended its process without a shutdown");
        }
    }
}

pub(crate) struct Member {
    place: Place,
    members: Vec<usize>,
    timeout: Duration,
    /// Collectives and messages of callers.
    comm: Arc<Comm>,
    /// Hellos, exchanges, words about the end, reserved tags.
    control: Arc<Comm>,
    lane: OnceLock<Weak<Lane>>,
    state: Mutex<State>,
    /// What broke the group. Messages may outlive its lane.
    cause: OnceLock<Error>,
    issued: PointToPoint,
    messages: Messages,
    forming: Forming,
}

pub(crate) struct State {
    /// Collectives that this rank has come to.
    pub(crate) begun: u64,
    /// Whether a rank has come to a collective, where it was asked.
    pub(crate) answers: HashMap<(u64, usize), bool>,
    /// Collectives that are finished here.
    finished: u64,
    /// From which collective on a rank takes no part, and why.
    left: Vec<Option<(u64, Error)>>,
    /// The end needs no words any more.
    quiet: bool,
    /// For the next hello.
    room: Vec<u8>,
    /// Words that are going out.
    said: Vec<Flight<Vec<u8>>>,
}

/// Whom something that waits needs.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Needs<'a> {
    /// All ranks, up to this collective.
    All(u64),
    /// These ranks, for something outside the order of collectives.
    Only(&'a [usize]),
}

/// A pause between polls that grows.
#[derive(Debug)]
pub(crate) struct Pace {
    start: Instant,
    polls: u32,
}

impl Pace {
    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
            polls: 0,
        }
    }

    /// Whether to look around this time. Pauses as befits the time that has passed.
    pub(crate) fn step(&mut self) -> bool {
        self.polls += 1;
        if !self.polls.is_multiple_of(POLLS) && self.polls > 1 {
            std::hint::spin_loop();
            return false;
        }
        match self.start.elapsed() {
            waited if waited < SPIN => {}
            waited if waited < YIELD => {
                std::thread::yield_now();
                // Others have run: every poll may find something.
                self.polls = POLLS - 1;
            }
            _ => {
                std::thread::sleep(NAP);
                self.polls = POLLS - 1;
            }
        }
        true
    }
}

impl Member {
    /// Takes its place in a communicator. A collective call.
    pub(crate) fn new(
        comm: Comm,
        name: &str,
        members: Vec<usize>,
        timeout: Duration,
    ) -> Result<Arc<Self>> {
        let control = comm.duplicate()?;
        let size = comm.size();
        Ok(Arc::new(Self {
            issued: PointToPoint::new(Place::of_group(name, comm.rank())),
            messages: Messages::default(),
            forming: Forming::default(),
            place: Place::of_group(name, comm.rank()),
            members,
            timeout,
            comm: Arc::new(comm),
            control: Arc::new(control),
            lane: OnceLock::new(),
            state: Mutex::new(State {
                begun: 0,
                answers: HashMap::new(),
                finished: 0,
                left: vec![None; size],
                quiet: false,
                room: Vec::new(),
                said: Vec::new(),
            }),
            cause: OnceLock::new(),
        }))
    }

    /// The lane is there: from now on the group is in use.
    pub(crate) fn attach(self: &Arc<Self>, lane: &Arc<Lane>) {
        let _ = self.lane.set(Arc::downgrade(lane));
        let mut groups = GROUPS.lock();
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(self));
    }

    /// Neither broken, nor dropped, nor shut down.
    fn is_in_use(&self) -> bool {
        let lane = self.lane.get().and_then(Weak::upgrade);
        let usable = lane.is_some_and(|lane| lane.check_usable().is_ok());
        usable && !self.state.lock().quiet
    }

    pub(crate) fn rank(&self) -> usize {
        self.comm.rank()
    }

    pub(crate) fn size(&self) -> usize {
        self.comm.size()
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

    pub(crate) fn comm(&self) -> &Comm {
        &self.comm
    }

    pub(crate) fn control(&self) -> &Comm {
        &self.control
    }

    pub(crate) fn state(&self) -> &Mutex<State> {
        &self.state
    }

    pub(crate) fn messages(&self) -> &Messages {
        &self.messages
    }

    pub(crate) fn forming(&self) -> &Forming {
        &self.forming
    }

    /// The numbers of sends and receives.
    pub(crate) fn issued(&self) -> &PointToPoint {
        &self.issued
    }

    pub(crate) fn broken(&self) -> Option<Error> {
        let lane = self.lane.get().and_then(Weak::upgrade);
        let cause = lane.and_then(|lane| lane.broken());
        cause.or_else(|| self.cause.get().cloned())
    }

    pub(crate) fn fail(&self, cause: Error) {
        if let Some(lane) = self.lane.get().and_then(Weak::upgrade) {
            lane.fail(cause);
        }
    }

    /// Whether what waits can still come to something; takes in what the others say.
    pub(crate) fn look_around(&self, needs: Needs<'_>) -> Result<()> {
        if self.cause.get().is_some() {
            return Err(Error::new(ErrorKind::Aborted, "interrupted"));
        }
        while let Some((from, bytes)) = take(&self.control, WORDS)? {
            match Word::decode(&bytes, self.size()) {
                Some(Word::Broken(notice)) => {
                    let cause = notice.to_error();
                    self.fail(cause.clone());
                    return Err(cause);
                }
                Some(Word::Left(count, notice)) => {
                    self.state.lock().left[from] = Some((count, notice.to_error()));
                }
                Some(Word::Past) => {}
                None => self.hear_roll(from, &bytes),
            }
        }
        let mut state = self.state.lock();
        match state.leaver(needs) {
            Some(err) => {
                // Everybody has been told already.
                state.quiet = true;
                Err(err)
            }
            None => Ok(()),
        }
    }

    /// Polls until `test` says yes, the deadline has come, or the group has ended. `on` is what is
    /// polled, and what `late` makes its error of.
    pub(crate) fn poll<T>(
        &self,
        needs: Needs<'_>,
        deadline: Instant,
        on: &mut T,
        test: impl Fn(&mut T) -> Result<bool>,
        late: impl Fn(&T) -> Error,
    ) -> Result<()> {
        let mut pace = Pace::new();
        loop {
            if test(on)? {
                return Ok(());
            }
            if pace.step() {
                self.look_around(needs)?;
                if Instant::now() >= deadline {
                    return Err(late(on));
                }
            }
        }
    }

    /// Waits until all have said hello.
    fn wait_for(&self, hello: &mut Hello, seq: u64, deadline: Instant) -> Result<()> {
        let late = |hello: &Hello| self.blame(hello, seq);
        self.poll(Needs::All(seq), deadline, hello, Hello::advance, late)
    }

    /// Sends a few bytes, without waiting until they have come.
    pub(crate) fn say(&self, peer: usize, tag: i32, bytes: Vec<u8>) {
        let mut flight = Flight::new(bytes);
        let said = flight.with_memory(|bytes| (bytes.as_ptr(), bytes.len()));
        // SAFETY: the vector is the flight's, and where it is on the heap it stays.
        let sent = unsafe { flight.send(&self.control, said, peer, tag) };
        match sent.and_then(|()| flight.test()) {
            Ok(true) => {}
            Ok(false) => self.state.lock().said.push(flight),
            Err(err) => {
                tracing::debug!(target: "phalanx::mpi", "rank {peer} was not told: {err}");
            }
        }
    }

    fn tell_all(&self, word: &Word) {
        for peer in (0..self.size()).filter(|&peer| peer != self.rank()) {
            self.say(peer, WORDS, word.encode());
        }
    }

    /// Leaves in order, when all ranks have come to the end.
    pub(crate) fn say_goodbye(&self) -> Result<()> {
        self.state.lock().quiet = true;
        self.forming.close();
        self.control.free()?;
        self.comm.free()
    }

    /// Leaves a group that was not shut down, and says what it did instead.
    pub(crate) fn leave(&self, did: &str) {
        let rank = self.rank();
        let what = format!("rank {rank} {did}");
        let notice = Notice::of(&Error::new(ErrorKind::Aborted, what).from_peer(rank), rank);
        let mut state = self.state.lock();
        state.quiet = true;
        let finished = state.finished;
        drop(state);
        self.tell_all(&Word::Left(finished, notice));
    }

    /// One collective, or one of a batch.
    fn run_one(&self, call: Call, turn: &Turn) -> Result<Done> {
        let round = Round {
            member: self,
            seq: turn.seq,
            deadline: turn.deadline,
        };
        let room = std::mem::take(&mut self.state.lock().room);
        let fingerprint = Fingerprint::of(&call, turn.seq);
        let data = data_for_hello(&call, self.size())?;
        let mut hello = Hello::new(&self.control, fingerprint, &data, room);
        if let Err(err) = self.wait_for(&mut hello, turn.seq, turn.deadline) {
            self.go_on_without_caller(hello, call);
            return Err(err);
        }
        let (heard, room) = hello.end();
        self.state.lock().room = room;
        round.run(call, &heard?)
    }

    /// That all ranks have the same batch, before any of its calls.
    fn agree_on(&self, batch: Fingerprint, turn: &Turn) -> Result<()> {
        let room = std::mem::take(&mut self.state.lock().room);
        let mut hello = Hello::new(&self.control, batch, &[], room);
        self.wait_for(&mut hello, turn.seq, turn.deadline)?;
        let (heard, room) = hello.end();
        self.state.lock().room = room;
        heard.map(drop)
    }

    fn run_batch(&self, batch: Call, turn: &Turn) -> Result<Done> {
        self.agree_on(Fingerprint::of(&batch, turn.seq), turn)?;
        let Call::Batch(calls) = batch else {
            return self.run_one(batch, turn);
        };
        let parts = calls.into_iter().map(|call| self.run_one(call, turn));
        Ok(Done {
            parts: parts.collect::<Result<_>>()?,
            ..Done::default()
        })
    }

    /// Another rank may have heard from everybody and be in MPI's collective, which it cannot
    /// leave. So what this rank has given up goes on, in a thread that nobody waits for, and keeps
    /// its memory.
    fn go_on_without_caller(&self, mut hello: Hello, call: Call) {
        if !is_by_library(&call, self.size()) {
            return;
        }
        let comm = Arc::clone(&self.comm);
        let unfinished = Unfinished::new();
        let go_on = move || {
            let _unfinished = unfinished;
            while let Ok(false) = hello.advance() {
                std::thread::sleep(WITHOUT_CALLER);
            }
            if hello.is_over() && hello.end().0.is_ok() {
                // Nobody is left to be told how it ended.
                let _ = by_library(&comm, call);
            }
        };
        let thread = std::thread::Builder::new().name("phalanx-mpi-rest".into());
        if let Err(err) = thread.spawn(go_on) {
            tracing::warn!(target: "phalanx::mpi", "others may hang: starting a thread: {err}");
        }
    }
}

impl State {
    /// Why something cannot be, if a rank that it needs has left before it.
    fn leaver(&self, needs: Needs<'_>) -> Option<Error> {
        let mut left = (0..).zip(&self.left).filter_map(|(rank, left)| {
            let (count, err) = left.as_ref()?;
            Some((rank, *count, err))
        });
        let needed = left.find(|(rank, count, _)| match needs {
            Needs::All(seq) => *count <= seq,
            Needs::Only(ranks) => ranks.contains(rank),
        });
        needed.map(|(_, _, err)| err.clone())
    }
}

impl Engine for Member {
    fn run(&self, call: Call, turn: &Turn) -> Result<Done> {
        self.state.lock().begun = turn.seq + 1;
        let result = match call {
            Call::Batch(_) => self.run_batch(call, turn),
            call => self.run_one(call, turn),
        };
        // After a mismatch the ranks are in step: the number is over for all.
        if result.as_ref().err().is_none_or(Error::leaves_group_usable) {
            self.state.lock().finished = turn.seq + 1;
        }
        result
    }

    fn interrupt(&self, cause: &Error) {
        let _ = self.cause.set(cause.clone());
        if !self.state.lock().quiet {
            let notice = Notice::of(cause, self.rank());
            self.tell_all(&Word::Broken(notice));
        }
        self.messages.wake();
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.place)
    }
}
