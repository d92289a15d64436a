//! A communicator with its stream and the operations on it.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use phalanx_pg::{Call, Error, ErrorKind, Result};

use crate::comm::{self, Comm, Patience, Start};
use crate::driver::{Device, Event, Stream};
use crate::op::Op;
use crate::step::Step;
use crate::turn::take_turn;

/// How long memory is kept for a device that does not let go of it, before it is given up.
pub(crate) const DRAIN: Duration = Duration::from_secs(10);

/// Whom a communicator connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Line {
    /// All ranks.
    All,
    /// This rank as rank 0, and the one that it sends to as rank 1.
    To(usize),
    /// The rank that this one receives from as rank 0, and this one as rank 1.
    From(usize),
}

impl Line {
    /// The other end of messages.
    pub(crate) fn peer(self) -> Option<usize> {
        match self {
            Self::All => None,
            Self::To(peer) | Self::From(peer) => Some(peer),
        }
    }
}

/// One communicator: of all ranks, or for messages in one direction. Each has a stream of its own,
/// so that what waits for a peer holds up nothing else, not even an answer to it.
///
/// The communicator is made in a thread of its own when it is first needed. Operations are issued
/// by whoever has the turn: that thread, then callers. What is submitted meanwhile queues up, and
/// whoever has the turn issues it too before giving it back: the library may take its time, and
/// only one has to wait for it.
#[derive(Debug)]
pub(crate) struct Channel {
    pub(crate) line: Line,
    device: Arc<Device>,
    stream: Stream,
    comm: OnceLock<Comm>,
    /// Held while a thread calls the library: calls on a communicator are for one at a time.
    calls: Mutex<()>,
    /// Never held while the library is called, so that operations can be failed whatever it does.
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Somebody has the turn.
    busy: bool,
    /// For whoever has the turn.
    queue: VecDeque<Job>,
    /// On the stream, with the part that each is; the last one may be on its way there.
    flying: VecDeque<(Arc<Op>, usize)>,
    /// Since when the last one is on its way.
    issuing: Option<Instant>,
    /// When the last operation ended: the next one's time begins then.
    last_end: Instant,
    /// The group is broken: nothing may be added.
    doomed: bool,
    /// Memory of failed operations.
    buried: Vec<Call>,
}

/// One part of an operation, ready to be put on the stream.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) op: Arc<Op>,
    pub(crate) part: usize,
    /// What the stream has to wait for.
    pub(crate) ready: Arc<Vec<Event>>,
    pub(crate) steps: Vec<Step>,
}

/// What a look at a channel came to.
#[derive(Debug)]
pub(crate) enum Finding {
    /// An operation has not ended in time.
    Late(Arc<Op>),
    /// The library or the device reports a failure.
    Failed(Error),
}

/// Whether something that began then, and may take so long, is still to be waited for.
pub(crate) type Patient<'a> = &'a dyn Fn(Instant, Duration) -> Result<()>;

impl Channel {
    pub(crate) fn new(line: Line, device: &Arc<Device>, high_priority: bool) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            line,
            device: Arc::clone(device),
            stream: Stream::new(device, high_priority)?,
            comm: OnceLock::new(),
            calls: Mutex::new(()),
            inner: Mutex::new(Inner {
                busy: false,
                queue: VecDeque::new(),
                flying: VecDeque::new(),
                issuing: None,
                last_end: Instant::now(),
                doomed: false,
                buried: Vec::new(),
            }),
        }))
    }

    /// Takes the turn to make the communicator although nothing is queued.
    pub(crate) fn claim(&self) -> bool {
        !std::mem::replace(&mut self.inner.lock().busy, true)
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.comm.get().is_some()
    }

    /// The communicator is there: whoever has made it puts on the stream what has queued up.
    pub(crate) fn connected(&self, comm: Comm, patient: Patient<'_>) -> Result<()> {
        let inner = self.inner.lock();
        if inner.doomed {
            drop(inner);
            return Err(doomed());
        }
        // Before the group can be doomed, so that an abort finds it.
        let comm = self.comm.get_or_init(|| comm);
        drop(inner);
        self.drain(comm, patient)
    }

    /// Issues what has queued up, then gives the turn back.
    fn drain(&self, comm: &Comm, patient: Patient<'_>) -> Result<()> {
        loop {
            let mut inner = self.inner.lock();
            let Some(job) = inner.queue.pop_front() else {
                inner.busy = false;
                return Ok(());
            };
            inner.take_off(&job);
            drop(inner);
            let channel = self;
            let launch = [Launch { channel, comm, job }];
            if issue(&launch, patient)?.is_empty() {
                return Ok(());
            }
        }
    }

    /// A communicator of the same ranks, made from this one together with them.
    pub(crate) fn split(&self, rank: usize, patience: Patience<'_>) -> Result<Comm> {
        let _calls = take_turn(&self.calls, patience)?;
        let comm = self.comm.get();
        let comm = comm.ok_or_else(|| Error::invalid("there is no communicator to split"))?;
        comm.split(rank, patience)
    }

    /// Lets operations end that have, and finds what went wrong. The number of those left.
    pub(crate) fn look(&self) -> (usize, Option<Finding>) {
        let mut inner = self.inner.lock();
        let mut over = Vec::new();
        while let Some((op, part)) = inner.flying.front() {
            match op.is_over(*part) {
                Ok(false) => break,
                Ok(true) => {
                    over.extend(inner.flying.pop_front());
                    inner.last_end = Instant::now();
                }
                Err(err) => {
                    let err = err.at(op.place_now());
                    return (1, Some(Finding::Failed(err)));
                }
            }
        }
        let left = inner.flying.len() + inner.queue.len();
        let first = inner.flying.front().map(|(op, _)| Arc::clone(op));
        let late = inner.late().map(Finding::Late);
        drop(inner);
        // Freeing memory runs others' code.
        over.iter().for_each(|(op, _)| op.release());
        let failed = first.and_then(|op| self.failure(&op));
        (left, failed.or(late))
    }

    /// What the library reports by itself while `op` is the first on the stream. A thread that is
    /// calling it asks for itself.
    fn failure(&self, op: &Op) -> Option<Finding> {
        let _calls = self.calls.try_lock()?;
        let err = self.comm.get()?.broken()?;
        Some(Finding::Failed(err.at(op.place_now())))
    }

    /// Number of operations that have not ended.
    pub(crate) fn outstanding(&self) -> usize {
        let inner = self.inner.lock();
        inner.flying.len() + inner.queue.len()
    }

    /// The first operation that has not ended.
    pub(crate) fn first(&self) -> Option<Arc<Op>> {
        self.inner.lock().first().cloned()
    }

    /// Fails everything, and what is submitted from now on. Before any communicator is aborted:
    /// an abort has the device reach the ends of operations that did not take place.
    pub(crate) fn doom(&self, error: &dyn Fn(&Op) -> Error) {
        let mut inner = self.inner.lock();
        inner.doomed = true;
        let queued: Vec<Job> = inner.queue.drain(..).collect();
        let flying: Vec<_> = inner.flying.drain(..).collect();
        drop(inner);
        let flying = flying.iter().map(|(op, _)| op);
        let all = flying.chain(queued.iter().map(|job| &job.op));
        let memory: Vec<Call> = all.filter_map(|op| op.fail(error(op))).collect();
        self.inner.lock().buried.extend(memory);
    }

    /// Aborts the communicator. Beside a call of another thread only if that has not come back
    /// before the deadline: the abort ends it.
    pub(crate) fn abort(&self, deadline: Instant) {
        if let Some(comm) = self.comm.get() {
            let _calls = self.calls.try_lock_until(deadline);
            comm.abort();
        }
    }

    /// The memory of failed operations.
    pub(crate) fn take_buried(&self) -> Vec<Call> {
        std::mem::take(&mut self.inner.lock().buried)
    }

    /// Waits until no thread is in the library and the stream has nothing to do; whether it has
    /// come to that before the deadline.
    pub(crate) fn drains(&self, deadline: Instant) -> bool {
        let Some(_calls) = self.calls.try_lock_until(deadline) else {
            return false;
        };
        let Ok(_current) = self.device.bind() else {
            return false;
        };
        let end = self.device.mark(self.stream.raw());
        end.is_ok_and(|end| {
            while Instant::now() < deadline {
                match end.is_reached() {
                    Ok(false) => std::thread::sleep(Duration::from_millis(1)),
                    reached => return reached.is_ok(),
                }
            }
            false
        })
    }

    /// Begins an orderly end of the communicator, if there is one.
    pub(crate) fn begin_end(&self, patience: Patience<'_>) -> Result<()> {
        let _calls = take_turn(&self.calls, patience)?;
        self.comm.get().map_or(Ok(()), Comm::begin_end)
    }

    /// Ends it, together with the other ranks.
    pub(crate) fn end(&self, patience: Patience<'_>) -> Result<()> {
        let _calls = take_turn(&self.calls, patience)?;
        self.comm.get().map_or(Ok(()), |comm| comm.end(patience))
    }
}

impl Inner {
    /// An operation whose time is over: the first, or the one that the library does not take.
    fn late(&self) -> Option<Arc<Op>> {
        let issuing = self.issuing.zip(self.flying.back().map(|(op, _)| op));
        let first = self.first().map(|op| (op.enqueued.max(self.last_end), op));
        let late = |(begun, op): &(Instant, &Arc<Op>)| begun.elapsed() > op.timeout;
        let mut both = first.into_iter().chain(issuing);
        both.find(late).map(|(_, op)| Arc::clone(op))
    }

    fn first(&self) -> Option<&Arc<Op>> {
        let flying = self.flying.front().map(|(op, _)| op);
        flying.or(self.queue.front().map(|job| &job.op))
    }

    /// The job is on its way to the stream.
    fn take_off(&mut self, job: &Job) {
        self.flying.push_back((Arc::clone(&job.op), job.part));
        self.issuing = Some(Instant::now());
    }
}

/// A job whose turn it is.
struct Launch<'a> {
    channel: &'a Channel,
    comm: &'a Comm,
    job: Job,
}

/// Puts each job on its channel's stream, or into the queue where somebody else has the turn or
/// there is no communicator yet. Those of a batch whose turn it is are one group call. The channels,
/// which come in the order of their lines, whose communicators the caller has to have made.
pub(crate) fn push<'a>(
    channels: &'a [Arc<Channel>],
    jobs: Vec<Job>,
    patient: Patient<'_>,
) -> Result<Vec<&'a Arc<Channel>>> {
    let (mut ready, mut missing) = (Vec::new(), Vec::new());
    // All at once, so that two batches are in the same order on all of them.
    let mut inners: Vec<_> = channels
        .iter()
        .map(|channel| channel.inner.lock())
        .collect();
    if inners.iter().any(|inner| inner.doomed) {
        return Err(doomed());
    }
    for ((channel, inner), job) in channels.iter().zip(&mut inners).zip(jobs) {
        let busy = std::mem::replace(&mut inner.busy, true);
        match channel.comm.get() {
            Some(comm) if !busy => {
                inner.take_off(&job);
                ready.push(Launch { channel, comm, job });
            }
            _ => {
                inner.queue.push_back(job);
                if !busy {
                    missing.push(channel);
                }
            }
        }
    }
    drop(inners);
    for Launch { channel, comm, .. } in issue(&ready, patient)? {
        channel.drain(comm, patient)?;
    }
    Ok(missing)
}

/// Issues jobs of one operation. Those on whose channels more has queued up meanwhile, and the turn
/// is kept; elsewhere it is given back before anybody can know that the operation was issued. After
/// an error the jobs are still on the channels' lists, as everything that is to be failed.
fn issue<'a, 'b>(launches: &'b [Launch<'a>], patient: Patient<'_>) -> Result<Vec<&'b Launch<'a>>> {
    let Some(Launch { job, .. }) = launches.first() else {
        return Ok(Vec::new());
    };
    let (since, timeout) = (Instant::now(), job.op.timeout);
    let patience = || patient(since, timeout);
    let turns = launches
        .iter()
        .map(|launch| take_turn(&launch.channel.calls, &patience));
    let _turns: Vec<_> = turns.collect::<Result<_>>()?;
    let ends = begin(launches, &patience)?;
    let mut more = Vec::new();
    for launch in launches {
        let mut inner = launch.channel.inner.lock();
        inner.issuing = None;
        inner.busy = !inner.queue.is_empty();
        more.extend(inner.busy.then_some(launch));
    }
    for (Launch { job, .. }, end) in launches.iter().zip(ends) {
        job.op.issued(job.part, end);
    }
    Ok(more)
}

/// Makes the streams wait for the jobs' memory, starts the jobs, and marks where each ends.
fn begin(launches: &[Launch<'_>], patience: Patience<'_>) -> Result<Vec<Event>> {
    patience()?;
    let _current = launches[0].channel.device.bind()?;
    for Launch { channel, job, .. } in launches {
        let stream = channel.stream.raw();
        job.ready.iter().try_for_each(|event| event.hold(stream))?;
    }
    let starts: Vec<Start<'_>> = launches.iter().map(Launch::start).collect();
    comm::start(&starts, patience)?;
    let end = |Launch { channel, .. }: &Launch<'_>| channel.device.mark(channel.stream.raw());
    launches.iter().map(end).collect()
}

impl Launch<'_> {
    fn start(&self) -> Start<'_> {
        Start {
            comm: self.comm,
            steps: &self.job.steps,
            stream: self.channel.stream.raw(),
        }
    }
}

/// Replaced by the cause, which the group knows.
fn doomed() -> Error {
    Error::new(ErrorKind::Aborted, "the group is broken")
}

/// What an operation ends with at its timeout.
pub(crate) fn late(op: &Op, line: Line) -> Error {
    let limit = op.timeout.as_secs_f64();
    let peer = line.peer();
    let what = match line {
        Line::To(peer) => format!("rank {peer} did not receive within {limit:.1} s"),
        Line::From(peer) => format!("rank {peer} did not send within {limit:.1} s"),
        Line::All => format!("not finished within {limit:.1} s; does every rank call it?"),
    };
    let err = Error::new(ErrorKind::Timeout, what);
    match peer {
        Some(peer) => err.from_peer(peer),
        None => err,
    }
}
