//! What a group's callers, its watchdog and its connecting threads share.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nccl_sys::Nccl;
use parking_lot::{Condvar, Mutex, MutexGuard};
use phalanx_pg::{
    Buffer, Call, CallKind, CallOptions, DType, Error, ErrorKind, MAX_OUTSTANDING, Place,
    PointToPoint, RawStream, RawWork, Result,
};

use crate::board::Board;
use crate::channel::{self, Channel, Job, Line};
use crate::driver::{Device, Event};
use crate::memory::{self, Home};
use crate::op::{Op, buffers};
use crate::options::Options;
use crate::step::{Step, Translator};
use crate::turn::take_turn;
use crate::watchdog::because;

/// One rank of a group.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) place: Place,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) timeout: Duration,
    pub(crate) options: Options,
    pub(crate) nccl: &'static Nccl,
    pub(crate) device: Arc<Device>,
    pub(crate) home: Arc<Home>,
    pub(crate) board: Board,
    translator: Translator,
    /// Held while a collective is issued, so that all are in order.
    order: Mutex<()>,
    /// The number of the next collective.
    next: AtomicU64,
    /// What barriers reduce.
    token: OnceLock<Buffer>,
    pub(crate) collectives: Arc<Channel>,
    messages: PointToPoint,
    /// For messages.
    lines: Mutex<BTreeMap<Line, Arc<Channel>>>,
    /// The first cause.
    broken: OnceLock<Cause>,
    closed: AtomicBool,
    submitting: AtomicUsize,
    bell: Mutex<Bell>,
    rung: Condvar,
}

/// Why the group is broken.
#[derive(Debug, Clone)]
pub(crate) struct Cause {
    pub(crate) error: Error,
    /// Whether the others have to be told: not what they told us.
    pub(crate) own: bool,
}

#[derive(Debug, Default)]
struct Bell {
    /// An operation was submitted since the watchdog last had nothing to do.
    work: bool,
    /// The group broke or was closed.
    alarm: bool,
    /// The watchdog has nothing to do.
    idle: bool,
    /// The watchdog has ended.
    silent: bool,
}

impl Core {
    pub(crate) fn new(
        seat: Seat,
        options: &Options,
        nccl: &'static Nccl,
        device: &Arc<Device>,
        board: Board,
    ) -> Result<Arc<Self>> {
        let Seat {
            place,
            rank,
            size,
            timeout,
        } = seat;
        Ok(Arc::new(Self {
            messages: PointToPoint::new(place.clone()),
            place,
            rank,
            size,
            timeout,
            options: options.clone(),
            nccl,
            device: Arc::clone(device),
            home: Home::new(device, options.stream)?,
            board,
            translator: Translator::new(nccl, size),
            order: Mutex::new(()),
            next: AtomicU64::new(0),
            token: OnceLock::new(),
            collectives: Channel::new(Line::All, device, options.high_priority)?,
            lines: Mutex::default(),
            broken: OnceLock::new(),
            closed: AtomicBool::new(false),
            submitting: AtomicUsize::new(0),
            bell: Mutex::default(),
            rung: Condvar::new(),
        }))
    }

    /// All channels there are.
    pub(crate) fn channels(&self) -> Vec<Arc<Channel>> {
        let lines = self.lines.lock();
        let all = std::iter::once(&self.collectives).chain(lines.values());
        all.cloned().collect()
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.next.load(Ordering::Acquire)
    }

    pub(crate) fn p2p_sequence(&self) -> u64 {
        self.messages.sequence()
    }

    /// Number of collectives that have ended here.
    pub(crate) fn finished(&self) -> u64 {
        // Before the number is read: what is submitted meanwhile has not ended.
        let (outstanding, _) = self.collectives.look();
        self.sequence().saturating_sub(outstanding as u64)
    }

    pub(crate) fn cause(&self) -> Option<&Cause> {
        self.broken.get()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.ring();
    }

    /// Whether the group may still be used.
    pub(crate) fn check_usable(&self) -> Result<()> {
        if self.is_closed() {
            let closed = "the group has been shut down";
            return Err(Error::new(ErrorKind::Closed, closed));
        }
        match self.cause() {
            Some(cause) => Err(Error::broken_by(&cause.error)),
            None => Ok(()),
        }
    }

    /// Breaks the group; the first cause stays. The watchdog does the rest.
    pub(crate) fn fail(&self, error: Error, own: bool) {
        if self.is_closed() {
            return;
        }
        let error = error.at(self.place.clone());
        let _ = self.broken.set(Cause { error, own });
        self.ring();
    }

    /// Has the watchdog look at once.
    fn ring(&self) {
        self.bell.lock().alarm = true;
        self.rung.notify_all();
    }

    /// Has the watchdog look again, if it had nothing to do.
    fn announce(&self) {
        let mut bell = self.bell.lock();
        bell.work = true;
        if bell.idle {
            self.rung.notify_all();
        }
    }

    /// The watchdog's rest: until there is an alarm, or until `pause` is over. Without operations
    /// there is no pause to end, and it rests until one is submitted.
    pub(crate) fn rest(&self, pause: Option<Duration>) {
        let mut bell = self.bell.lock();
        match pause {
            Some(pause) if !bell.alarm => {
                self.rung.wait_for(&mut bell, pause);
            }
            Some(_) => {}
            None => {
                bell.idle = true;
                while !bell.alarm && !bell.work {
                    self.rung.wait(&mut bell);
                }
                bell.idle = false;
            }
        }
        (bell.alarm, bell.work) = (false, false);
    }

    /// Number of threads that call the library, and may not come back.
    pub(crate) fn submitting(&self) -> usize {
        self.submitting.load(Ordering::Acquire)
    }

    /// The watchdog has ended.
    pub(crate) fn fall_silent(&self) {
        self.bell.lock().silent = true;
        self.rung.notify_all();
    }

    /// Waits until the watchdog has ended, for `limit` at most.
    pub(crate) fn await_silence(&self, limit: Duration) {
        let end = Instant::now() + limit;
        let mut bell = self.bell.lock();
        while !bell.silent {
            if self.rung.wait_until(&mut bell, end).timed_out() {
                return;
            }
        }
    }

    /// Fails what goes on after the group broke or its time was over.
    pub(crate) fn patience(&self, since: Instant, timeout: Duration) -> Result<()> {
        if let Some(cause) = self.cause() {
            return Err(Error::broken_by(&cause.error));
        }
        match since.elapsed() > timeout {
            true => Err(Error::new(
                ErrorKind::Timeout,
                "the library did not take the call in time",
            )),
            false => Ok(()),
        }
    }

    pub(crate) fn submit(self: &Arc<Self>, call: Call, options: &CallOptions) -> Result<RawWork> {
        if call.is_point_to_point() {
            let refused = self.messages.refused(&call);
            let submitted = self.submit_messages(call, options);
            return submitted.map_err(|err| err.at(refused));
        }
        let mut place = self.place.clone();
        place.call = Some(call.kind());
        let submitted = self.submit_collective(call, options, place.clone());
        submitted.map_err(|err| {
            // The number that a refused call does not take.
            place.seq = Some(self.sequence());
            err.at(place)
        })
    }

    fn submit_collective(
        self: &Arc<Self>,
        call: Call,
        options: &CallOptions,
        mut place: Place,
    ) -> Result<RawWork> {
        self.check_usable()?;
        let (ready, streams) = self.mark_streams(&call)?;
        let steps = match call.kind() {
            CallKind::Barrier => self.barrier_steps()?,
            _ => self.translator.steps(&call)?,
        };
        let timeout = options.timeout.unwrap_or(self.timeout);
        let _order = self.take_order(timeout)?;
        self.check_room(&self.collectives)?;
        place.seq = Some(self.next.fetch_add(1, Ordering::AcqRel));
        let op = Op::new(call, 1, place, timeout, &self.device, streams);
        let job = Job {
            op: Arc::clone(&op),
            part: 0,
            ready,
            steps,
        };
        self.push(std::slice::from_ref(&self.collectives), &op, vec![job])?;
        Ok(op.work())
    }

    fn submit_messages(self: &Arc<Self>, call: Call, options: &CallOptions) -> Result<RawWork> {
        self.check_usable()?;
        let (ready, streams) = self.mark_streams(&call)?;
        let single = std::slice::from_ref(&call);
        let messages = match &call {
            Call::Batch(calls) => calls.as_slice(),
            _ => single,
        };
        let mut by_line: BTreeMap<Line, Vec<Step>> = BTreeMap::new();
        for message in messages {
            let (line, step) = self.translator.message(message)?;
            if let Some(step) = step {
                by_line.entry(line).or_default().push(step);
            }
        }
        let channels: Result<Vec<_>> = by_line.keys().map(|&line| self.line(line)).collect();
        let channels = channels?;
        channels
            .iter()
            .try_for_each(|channel| self.check_room(channel))?;
        let timeout = options.timeout.unwrap_or(self.timeout);
        let parts = by_line.len();
        let place = self.messages.number(&call);
        let op = Op::new(call, parts, place, timeout, &self.device, streams);
        let jobs = by_line.into_values().enumerate().map(|(part, steps)| Job {
            op: Arc::clone(&op),
            part,
            ready: Arc::clone(&ready),
            steps,
        });
        self.push(&channels, &op, jobs.collect())?;
        Ok(op.work())
    }

    fn check_room(&self, channel: &Channel) -> Result<()> {
        match channel.outstanding() < MAX_OUTSTANDING {
            true => Ok(()),
            false => {
                let full = format!("{MAX_OUTSTANDING} operations are outstanding, wait for some");
                Err(Error::new(ErrorKind::QueueFull, full))
            }
        }
    }

    /// Marks where the call's memory is ready, on the streams that it is used on: by the calling
    /// thread, since a stream may be the thread's own.
    fn mark_streams(&self, call: &Call) -> Result<(Arc<Vec<Event>>, Vec<RawStream>)> {
        let mut streams = Vec::new();
        for buffer in buffers(call) {
            memory::check_own(&self.device, buffer)?;
            if !streams.contains(&buffer.stream()) {
                streams.push(buffer.stream());
            }
        }
        let _current = self.device.bind()?;
        let ready: Result<Vec<Event>> = streams.iter().map(|&s| self.device.mark(s)).collect();
        Ok((Arc::new(ready?), streams))
    }

    fn barrier_steps(&self) -> Result<Vec<Step>> {
        if self.token.get().is_none() {
            let token = memory::allocate(&self.device, DType::F32, 1, &self.home)?;
            // It must be there before another stream uses it; this happens once.
            let mut host = Buffer::zeroed(DType::F32, 1);
            memory::copy(&self.device, &token, 0..1, &mut host, 0)?;
            let _ = self.token.set(token);
        }
        let token = self.token.get().expect("just set");
        self.translator.in_place_sum(token)
    }

    /// The channel for messages to or from a rank.
    fn line(&self, line: Line) -> Result<Arc<Channel>> {
        let mut lines = self.lines.lock();
        if let Some(channel) = lines.get(&line) {
            return Ok(Arc::clone(channel));
        }
        // Whoever breaks the group sees to the channels that there are by then.
        self.check_usable()?;
        let channel = Channel::new(line, &self.device, self.options.high_priority)?;
        lines.insert(line, Arc::clone(&channel));
        Ok(channel)
    }

    /// Keeps others from issuing collectives. Whoever has that may be inside the library: like an
    /// operation, waiting for it breaks the group when it takes too long.
    pub(crate) fn take_order(&self, timeout: Duration) -> Result<MutexGuard<'_, ()>> {
        let since = Instant::now();
        let taken = take_turn(&self.order, &|| self.patience(since, timeout));
        taken.inspect_err(|err| self.fail(err.clone(), true))
    }

    /// Calls the library while the watchdog is awake: only it can end a call that does not come
    /// back.
    pub(crate) fn while_submitting<T>(&self, call: impl FnOnce() -> T) -> T {
        self.submitting.fetch_add(1, Ordering::AcqRel);
        self.announce();
        let result = call();
        self.submitting.fetch_sub(1, Ordering::AcqRel);
        result
    }

    /// Starts the jobs of an operation, each on its channel.
    fn push(self: &Arc<Self>, channels: &[Arc<Channel>], op: &Op, jobs: Vec<Job>) -> Result<()> {
        let patient = |since, timeout| self.patience(since, timeout);
        let pushed = self.while_submitting(|| channel::push(channels, jobs, &patient));
        let started = pushed.and_then(|missing| {
            let mut missing = missing.into_iter();
            missing.try_for_each(|channel| self.start_connecting(channel))
        });
        started.map_err(|err| {
            let err = err.at(op.place_now());
            self.fail(err.clone(), true);
            // What the library says when it is aborted is not why.
            let why = self.cause().map(|cause| because(&cause.error, op));
            why.unwrap_or(err).at(op.place_now())
        })
    }

    /// Ends all communicators in order, together with the other ranks.
    pub(crate) fn finalize(&self, deadline: Instant) -> Result<()> {
        let patience = || match Instant::now() > deadline {
            true => Err(Error::new(
                ErrorKind::Timeout,
                "a rank does not end its part",
            )),
            false => Ok(()),
        };
        // All are begun before any is waited for: ranks list their communicators in other orders.
        let channels = self.channels();
        channels
            .iter()
            .try_for_each(|channel| channel.begin_end(&patience))?;
        channels
            .iter()
            .try_for_each(|channel| channel.end(&patience))
    }

    /// Waits until nothing is outstanding.
    pub(crate) fn settle(&self, deadline: Instant) -> Result<()> {
        loop {
            self.check_usable()?;
            if self.channels().iter().all(|channel| channel.look().0 == 0) {
                return Ok(());
            }
            if Instant::now() > deadline {
                let late = "work is outstanding, wait for it before the shutdown";
                return Err(Error::new(ErrorKind::Timeout, late));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Who a rank is.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) place: Place,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) timeout: Duration,
}
