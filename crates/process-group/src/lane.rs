//! Where the operations of a host backend queue up.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::call::{Call, CallKind, CallOptions, Mode};
use crate::error::{Error, ErrorKind, Place, Result};
use crate::work::{Completer, Done, RawWork, Times, completion};

/// Most operations that may be outstanding; one more is [`ErrorKind::QueueFull`].
pub const MAX_OUTSTANDING: usize = 64 << 10;

/// What a host backend does with one collective, in the thread that runs it.
///
/// [`run`](Engine::run) is called by one thread at a time, not always the same, or by as many as the
/// lane has [workers](Lane::with_workers); [`interrupt`](Engine::interrupt) by any thread, also while
/// it runs.
pub trait Engine: Send + Sync {
    /// Runs the call to its end. Must return by `turn.deadline`, or when interrupted.
    fn run(&self, call: Call, turn: &Turn) -> Result<Done>;

    /// The group broke for the given reason: makes a running [`run`](Engine::run) return soon and
    /// tells peers, without blocking. Called once.
    fn interrupt(&self, cause: &Error);

    /// The call has been issued, maybe long before it runs: a backend may let its peers start on
    /// it. In issue order, under the lane's lock, so without blocking.
    fn announce(&self, _call: &Call, _seq: u64) {}

    /// As [`announce`](Engine::announce), for an all-reduce that the caller waits for and that
    /// nothing is before: tries to finish it within microseconds, in place. If that does not work,
    /// it is announced and will run. What fails does not work.
    fn quick(&self, call: &Call, seq: u64) -> bool {
        self.announce(call, seq);
        false
    }

    /// Whether the result of an operation that ran may be handed out.
    ///
    /// A backend whose peers still work on the memory when its own part is done says no, and the
    /// lane runs the next operation meanwhile.
    fn is_settled(&self, _turn: &Turn) -> bool {
        true
    }

    /// Waits until [`is_settled`](Engine::is_settled), under the same rules as
    /// [`run`](Engine::run).
    fn settle(&self, _turn: &Turn) -> Result<()> {
        Ok(())
    }
}

/// The circumstances of one operation.
#[derive(Debug, Clone)]
pub struct Turn {
    /// Its number in the group, equal on all ranks.
    pub seq: u64,
    /// Which operation it is.
    pub kind: CallKind,
    /// Who runs it: the caller's thread if blocking, else one beside it.
    pub mode: Mode,
    /// When it fails.
    pub deadline: Instant,
    /// When it began to run.
    pub started: Instant,
}

/// One group's collectives in the order of their issue.
///
/// Numbers them, runs them one at a time, remembers the first failure and fails everything after
/// it. A blocking call that finds nothing before it runs in the caller's thread, without a queue
/// or an allocation; everything else runs in one thread of the lane's, made when first needed.
/// Backends whose operations are host code put one of these around their [`Engine`]. One whose
/// operations may overlap, because their messages carry their numbers, gives it more
/// [workers](Lane::with_workers): operations still begin in order.
///
/// | idle | queued | a blocking call | an asynchronous call |
/// |---|---|---|---|
/// | yes | none | runs in the caller | queued, wakes the thread |
/// | no | any | queued, waited for | queued |
///
/// May be used from many threads: whoever submits first has the lower number. Nothing blocks in
/// `submit` but a call that runs in the caller's thread.
#[derive(Debug)]
pub struct Lane {
    shared: Arc<Shared>,
}

struct Shared {
    place: Place,
    timeout: Duration,
    engine: Arc<dyn Engine>,
    /// How many operations may run at the same time.
    workers: usize,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    next_seq: u64,
    /// How many run an operation.
    busy: usize,
    /// How many threads of the lane's exist.
    threads: usize,
    closed: bool,
    broken: Option<Error>,
}

struct Job {
    call: Call,
    seq: u64,
    timeout: Duration,
    completer: Completer,
}

/// An operation whose own part is done.
struct Ran {
    turn: Turn,
    done: Done,
    completer: Completer,
}

/// What the lane's thread does next.
enum Step {
    Run(Job),
    /// Waits for the oldest operation that ran.
    Settle,
    End,
}

impl Queue {
    /// Closed, and nothing is left that could still go wrong.
    fn is_over(&self) -> bool {
        self.closed && self.jobs.is_empty() && self.busy == 0
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.place)
    }
}

impl Lane {
    /// A lane for the group and rank in `place`, whose operations take `timeout` at most unless
    /// they say otherwise.
    pub fn new(place: Place, timeout: Duration, engine: Arc<dyn Engine>) -> Self {
        Self::with_workers(1, place, timeout, engine)
    }

    /// As [`new`](Lane::new), with up to `workers` operations at the same time. A barrier begins when
    /// all before it have ended.
    pub fn with_workers(
        workers: usize,
        place: Place,
        timeout: Duration,
        engine: Arc<dyn Engine>,
    ) -> Self {
        let queue = Mutex::new(Queue::default());
        let shared = Shared {
            place,
            timeout,
            engine,
            workers,
            queue,
            changed: Condvar::new(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Issues a collective.
    pub fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        let shared = &self.shared;
        let kind = call.kind();
        let mut queue = shared.queue.lock();
        shared
            .usable(&queue)
            .map_err(|err| err.at(shared.place(kind, queue.next_seq)))?;
        if queue.jobs.len() + queue.busy >= MAX_OUTSTANDING {
            let full = format!("{MAX_OUTSTANDING} operations are outstanding, wait for some");
            let err = Error::new(ErrorKind::QueueFull, full);
            return Err(err.at(shared.place(kind, queue.next_seq)));
        }
        let seq = queue.next_seq;
        queue.next_seq += 1;
        let timeout = options.timeout.unwrap_or(shared.timeout);
        if options.mode == Mode::Blocking && queue.busy == 0 && queue.jobs.is_empty() {
            if kind != CallKind::AllReduce {
                shared.engine.announce(&call, seq);
            } else if shared.engine.quick(&call, seq)
                && let Call::AllReduce { buf, .. } = call
            {
                // Who waits for the lock gets it, before this caller comes with the next operation.
                MutexGuard::unlock_fair(queue);
                return Ok(RawWork::quick(buf));
            }
            queue.busy = 1;
            drop(queue);
            let mut times = Times::now();
            times.started = Some(times.enqueued);
            let turn = Turn::new(kind, seq, Mode::Blocking, timeout, times.enqueued);
            let result = shared.attempt(&turn, times.enqueued, || {
                let done = shared.engine.run(call, &turn)?;
                shared.engine.settle(&turn)?;
                Ok(done)
            });
            shared.release();
            return Ok(RawWork::ready(result, times));
        }
        shared.engine.announce(&call, seq);
        let (completer, work) = completion();
        queue.jobs.push_back(Job {
            call,
            seq,
            timeout,
            completer,
        });
        let wanted = shared.workers.min(queue.busy + queue.jobs.len());
        let spawn = queue.threads < wanted;
        queue.threads += usize::from(spawn);
        drop(queue);
        match spawn {
            true => self.spawn()?,
            false => {
                shared.changed.notify_all();
            }
        }
        Ok(work)
    }

    fn spawn(&self) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let name = "phalanx-lane".to_owned();
        let spawned = std::thread::Builder::new()
            .name(name)
            .spawn(move || shared.work());
        match spawned {
            Ok(_) => Ok(()),
            Err(err) => {
                let err = Error::new(ErrorKind::Backend, format!("starting a thread: {err}"));
                self.fail(err.clone());
                Err(err)
            }
        }
    }

    /// Number of collectives issued.
    pub fn sequence(&self) -> u64 {
        self.shared.queue.lock().next_seq
    }

    /// Whether nothing is outstanding.
    pub fn is_idle(&self) -> bool {
        let queue = self.shared.queue.lock();
        queue.jobs.is_empty() && queue.busy == 0
    }

    /// What broke the group, if it is broken.
    pub fn broken(&self) -> Option<Error> {
        self.shared.queue.lock().broken.clone()
    }

    /// Fails what is outstanding and everything later. The first cause stays, and a lane that has
    /// been [closed](Lane::close) stays so.
    pub fn fail(&self, cause: Error) {
        self.shared.fail(cause);
    }

    /// Whether the group may still be used; the error says why not.
    pub fn check_usable(&self) -> Result<()> {
        self.shared.usable(&self.shared.queue.lock())
    }

    /// Takes no more operations and waits until those issued have ended, or the group broke.
    pub fn close(&self, limit: Duration) -> Result<()> {
        let end = Instant::now() + limit.min(Duration::from_secs(1 << 30));
        let mut queue = self.shared.queue.lock();
        queue.closed = true;
        let outstanding = |queue: &Queue| queue.busy > 0 || !queue.jobs.is_empty();
        let open = |queue: &Queue| outstanding(queue) && queue.broken.is_none();
        while open(&queue) {
            let timed_out = self.shared.changed.wait_until(&mut queue, end).timed_out();
            // The last operation may have ended just when the time did.
            if timed_out && open(&queue) {
                let late = format!("work is outstanding after {:.1} s", limit.as_secs_f64());
                let err = Error::new(ErrorKind::Timeout, late).during("shutdown");
                return Err(err.at(self.shared.place.clone()));
            }
        }
        self.shared.changed.notify_all();
        match &queue.broken {
            Some(cause) => Err(Error::broken_by(cause).at(self.shared.place.clone())),
            None => Ok(()),
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Nothing happens to a lane that was closed in order.
        let dropped = "the group was dropped with work outstanding or without a shutdown";
        self.shared.fail(Error::new(ErrorKind::Aborted, dropped));
        self.shared.queue.lock().closed = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn place(&self, kind: CallKind, seq: u64) -> Place {
        Place {
            call: Some(kind),
            seq: Some(seq),
            ..self.place.clone()
        }
    }

    fn usable(&self, queue: &Queue) -> Result<()> {
        if let Some(cause) = &queue.broken {
            return Err(Error::broken_by(cause).at(self.place.clone()));
        }
        match queue.closed {
            true => Err(Error::new(
                ErrorKind::Closed,
                "the group has been shut down",
            )),
            false => Ok(()),
        }
    }

    /// Does a part of an operation, which is counted among the busy ones. An error breaks the group.
    fn attempt<T>(
        &self,
        turn: &Turn,
        enqueued: Instant,
        part: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let result = catch_unwind(AssertUnwindSafe(part)).unwrap_or_else(|_| {
            let what = "the backend panicked, see its message";
            Err(Error::new(ErrorKind::Backend, what))
        });
        result.map_err(|err| {
            let place = self.place(turn.kind, turn.seq);
            let err = err.at(Place {
                elapsed: Some(enqueued.elapsed()),
                ..place
            });
            // Apart from the match, which would hold the lock that `fail` takes.
            let broken = self.queue.lock().broken.clone();
            match broken {
                // Interrupted: what broke the group is the reason.
                Some(cause) if err.kind() == ErrorKind::Aborted => {
                    Error::because(&cause).at(err.place().clone())
                }
                _ => {
                    if !err.leaves_group_usable() {
                        self.fail(err.clone());
                    }
                    err
                }
            }
        })
    }

    fn release(&self) {
        self.queue.lock().busy -= 1;
        self.changed.notify_all();
    }

    fn fail(&self, cause: Error) {
        let mut queue = self.queue.lock();
        if queue.broken.is_some() || queue.is_over() {
            return;
        }
        let cause = cause.at(self.place.clone());
        queue.broken = Some(cause.clone());
        let jobs = std::mem::take(&mut queue.jobs);
        drop(queue);
        self.changed.notify_all();
        self.engine.interrupt(&cause);
        for job in jobs {
            let place = self.place(job.call.kind(), job.seq);
            let place = Place {
                elapsed: Some(job.completer.enqueued().elapsed()),
                ..place
            };
            job.completer
                .complete(Err(Error::broken_by(&cause).at(place)));
        }
    }

    /// The lane's thread.
    fn work(&self) {
        // Those that ran; while there are any, this thread counts as busy.
        let mut unsettled: VecDeque<Ran> = VecDeque::new();
        let mut busy = false;
        loop {
            while let Some(ran) = unsettled.pop_front_if(|ran| self.engine.is_settled(&ran.turn)) {
                ran.completer.complete(Ok(ran.done));
            }
            if std::mem::replace(&mut busy, !unsettled.is_empty()) && unsettled.is_empty() {
                self.release();
            }
            match self.next_step(&unsettled) {
                Step::Run(job) => unsettled.extend(self.start(job)),
                Step::Settle => {
                    let ran = unsettled.pop_front().expect("there is one to settle");
                    let enqueued = ran.completer.enqueued();
                    let settled =
                        self.attempt(&ran.turn, enqueued, || self.engine.settle(&ran.turn));
                    let failed = settled.is_err();
                    ran.completer.complete(settled.map(|()| ran.done));
                    if failed {
                        // Nothing succeeds after what failed, on whatever rank.
                        unsettled.drain(..).for_each(|ran| self.refuse(ran));
                    }
                }
                Step::End => return,
            }
            busy = true;
        }
    }

    /// Waits until there is something for the lane's thread to do.
    fn next_step(&self, unsettled: &VecDeque<Ran>) -> Step {
        let mut queue = self.queue.lock();
        loop {
            let own = usize::from(!unsettled.is_empty());
            let others = queue.busy - own;
            let may_begin = |job: &mut Job| job.call.kind() != CallKind::Barrier || others == 0;
            if others < self.workers
                && let Some(job) = queue.jobs.pop_front_if(may_begin)
            {
                queue.busy = others + 1;
                return Step::Run(job);
            }
            if !unsettled.is_empty() {
                return Step::Settle;
            }
            if queue.busy == 0 && (queue.closed || queue.broken.is_some()) {
                return Step::End;
            }
            self.changed.wait(&mut queue);
        }
    }

    /// Fails an operation that ran after one that broke the group.
    fn refuse(&self, ran: Ran) {
        let cause = self.queue.lock().broken.clone();
        let cause = cause.unwrap_or_else(|| Error::new(ErrorKind::Aborted, "the group is broken"));
        let place = Place {
            elapsed: Some(ran.completer.enqueued().elapsed()),
            ..self.place(ran.turn.kind, ran.turn.seq)
        };
        ran.completer
            .complete(Err(Error::broken_by(&cause).at(place)));
    }

    /// Runs a job; what is left to do if it went well.
    fn start(&self, job: Job) -> Option<Ran> {
        job.completer.start();
        let kind = job.call.kind();
        let turn = Turn::new(kind, job.seq, Mode::Async, job.timeout, Instant::now());
        let enqueued = job.completer.enqueued();
        match self.attempt(&turn, enqueued, || self.engine.run(job.call, &turn)) {
            Ok(done) => Some(Ran {
                turn,
                done,
                completer: job.completer,
            }),
            Err(err) => {
                job.completer.complete(Err(err));
                None
            }
        }
    }
}

impl Turn {
    fn new(kind: CallKind, seq: u64, mode: Mode, timeout: Duration, started: Instant) -> Self {
        Self {
            seq,
            kind,
            mode,
            deadline: started + timeout.min(Duration::from_secs(1 << 30)),
            started,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Failing;

    impl Engine for Failing {
        fn run(&self, _: Call, _: &Turn) -> Result<Done> {
            Err(Error::new(ErrorKind::PeerLost, "rank 1 is gone").from_peer(1))
        }

        fn interrupt(&self, _: &Error) {}
    }

    #[test]
    fn an_operation_that_fails_by_itself_breaks_the_lane() {
        for options in [CallOptions::blocking(), CallOptions::default()] {
            let lane = Lane::new(Place::default(), Duration::from_secs(9), Arc::new(Failing));
            let mut work = lane.submit(Call::Barrier, &options).unwrap();
            let first = work.block(Duration::from_secs(9)).expect("no deadlock");
            let first = first.unwrap_err();
            assert_eq!(
                (first.kind(), first.place().seq),
                (ErrorKind::PeerLost, Some(0))
            );
            let later = lane.submit(Call::Barrier, &options).unwrap_err();
            assert_eq!((later.kind(), later.peer()), (ErrorKind::Broken, Some(1)));
        }
    }
}
