//! One operation, from its submission to its end.

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use phalanx_pg::{
    Buffer, Call, Done, Error, Payload, Pending, Place, RawStream, RawWork, Result, State, Status,
    Times, WorkStatus,
};

use crate::driver::{Device, Event};

/// Pauses between two looks at a device's progress: short at first, for short operations.
const FIRST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// An operation. It owns its memory until its end events have been reached, or until the caller's
/// streams have been made to wait for them.
///
/// | state | events | memory |
/// |---|---|---|
/// | submitted | none | here |
/// | issued | one per part | here |
/// | ordered: `wait` was called | one per part | the caller's, on streams that wait |
/// | ended well | reached | here until it is taken |
/// | failed | | given to whoever failed it, to be kept until the device has let go |
#[derive(Debug)]
pub(crate) struct Op {
    /// Where it happens: group, rank, call, number, peer.
    pub(crate) place: Place,
    pub(crate) enqueued: Instant,
    pub(crate) timeout: Duration,
    device: Arc<Device>,
    /// The streams of its buffers.
    streams: Vec<RawStream>,
    /// Whether `wait` is for the host: a barrier.
    for_host: bool,
    cell: Mutex<Cell>,
    changed: Condvar,
}

#[derive(Debug)]
struct Cell {
    parts: Vec<Part>,
    call: Option<Call>,
    end: Option<Result<()>>,
    detached: bool,
    waker: Option<Waker>,
    times: Times,
}

/// What one communicator does for the operation.
#[derive(Debug)]
enum Part {
    Waiting,
    Issued(Event),
    Reached,
}

impl Op {
    pub(crate) fn new(
        call: Call,
        parts: usize,
        place: Place,
        timeout: Duration,
        device: &Arc<Device>,
        streams: Vec<RawStream>,
    ) -> Arc<Self> {
        let times = Times::now();
        Arc::new(Self {
            place,
            enqueued: times.enqueued,
            timeout: timeout.min(Duration::from_secs(1 << 30)),
            device: Arc::clone(device),
            streams,
            for_host: matches!(call, Call::Barrier),
            cell: Mutex::new(Cell {
                parts: (0..parts).map(|_| Part::Waiting).collect(),
                call: Some(call),
                end: None,
                detached: false,
                waker: None,
                times,
            }),
            changed: Condvar::new(),
        })
    }

    /// The caller's handle on it; one per operation.
    pub(crate) fn work(self: &Arc<Self>) -> RawWork {
        RawWork::custom(Box::new(Handle(Arc::clone(self))))
    }

    /// The part is on its stream, and `end` marks where it ends.
    pub(crate) fn issued(&self, part: usize, end: Event) {
        let mut cell = self.cell.lock();
        cell.times.started.get_or_insert_with(Instant::now);
        cell.parts[part] = Part::Issued(end);
        drop(cell);
        self.changed.notify_all();
    }

    /// Whether the part has ended, well or not.
    pub(crate) fn is_over(&self, part: usize) -> Result<bool> {
        let mut cell = self.cell.lock();
        if cell.end.is_some() {
            return Ok(true);
        }
        let over = cell.parts[part].look()?;
        self.end_if_reached(cell);
        Ok(over)
    }

    /// Looks at all parts; whether the operation has ended.
    fn look(&self) -> bool {
        let mut cell = self.cell.lock();
        if cell.end.is_some() {
            return true;
        }
        for part in &mut cell.parts {
            // What is wrong with the device is for the watchdog to find and to tell.
            let _ = part.look();
        }
        self.end_if_reached(cell)
    }

    fn end_if_reached(&self, cell: MutexGuard<'_, Cell>) -> bool {
        let reached = cell.parts.iter().all(|part| matches!(part, Part::Reached));
        if reached {
            self.finish(cell, Ok(()));
        }
        reached
    }

    fn finish(&self, mut cell: MutexGuard<'_, Cell>, end: Result<()>) {
        cell.end = Some(end);
        cell.times.done = Some(Instant::now());
        // The events are not needed any more, and others are.
        cell.parts.iter_mut().for_each(|part| *part = Part::Reached);
        let waker = cell.waker.take();
        drop(cell);
        self.changed.notify_all();
        // Outside the lock: it runs others' code, which may ask how the operation ended.
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Where it happens, and how long it takes by now.
    pub(crate) fn place_now(&self) -> Place {
        let mut place = self.place.clone();
        place.elapsed = Some(self.enqueued.elapsed());
        place
    }

    /// Fails it unless it has ended; the memory that it still had must be kept until the device
    /// has let go of it.
    pub(crate) fn fail(&self, err: Error) -> Option<Call> {
        let mut cell = self.cell.lock();
        if cell.end.is_some() {
            return None;
        }
        let memory = cell.call.take();
        self.finish(cell, Err(err.at(self.place_now())));
        memory
    }

    /// Lets go of memory that nobody will ask for. Outside the lock: freeing runs others' code.
    pub(crate) fn release(&self) {
        let unclaimed = {
            let mut cell = self.cell.lock();
            match cell.detached && cell.end.is_some() {
                true => cell.call.take(),
                false => None,
            }
        };
        drop(unclaimed);
    }

    /// What is handed to the caller, once.
    fn take(&self, cell: &mut Cell) -> Result<Done> {
        if let Some(Err(err)) = &cell.end {
            return Err(err.clone());
        }
        let call = cell.call.take().expect("a result is taken once");
        Ok(done(call))
    }

    /// Makes the buffers' streams wait for the operation and hands the memory over.
    fn order(&self) -> Result<Done> {
        let mut cell = self.cell.lock();
        let waiting = |cell: &Cell| {
            cell.end.is_none() && cell.parts.iter().any(|part| matches!(part, Part::Waiting))
        };
        while waiting(&cell) {
            // Ends: the watchdog fails what is not issued in time.
            self.changed.wait(&mut cell);
        }
        if cell.end.is_none() {
            let _current = self.device.bind()?;
            for part in &cell.parts {
                let Part::Issued(end) = part else { continue };
                self.streams
                    .iter()
                    .try_for_each(|&stream| end.hold(stream))?;
            }
        }
        self.take(&mut cell)
    }

    fn block(&self, limit: Duration) -> Option<Result<Done>> {
        let end = Instant::now().checked_add(limit);
        let mut pause = FIRST_PAUSE;
        let _current = match self.device.bind() {
            Ok(current) => current,
            Err(err) => return Some(Err(err)),
        };
        while !self.look() {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return None;
            }
            let mut cell = self.cell.lock();
            if cell.end.is_none() {
                let pause = left.map_or(pause, |left| left.min(pause));
                self.changed.wait_for(&mut cell, pause);
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        Some(self.take(&mut self.cell.lock()))
    }
}

impl Part {
    fn look(&mut self) -> Result<bool> {
        if let Self::Issued(end) = self
            && end.is_reached()?
        {
            *self = Self::Reached;
        }
        Ok(matches!(self, Self::Reached))
    }
}

/// What a call hands back.
fn done(call: Call) -> Done {
    match call {
        Call::AllReduce { buf, .. } | Call::Reduce { buf, .. } => buf.into(),
        Call::Broadcast { data, .. } => match data {
            Payload::Writable(buf) => buf.into(),
            Payload::ReadOnly(_) => Done::default(),
        },
        Call::AllGather { output, .. }
        | Call::Scatter { output, .. }
        | Call::ReduceScatter { output, .. }
        | Call::AllToAll { output, .. } => output.into(),
        Call::Gather { output, .. } => output.map(Done::from).unwrap_or_default(),
        Call::Recv { buf, peer, .. } => Done {
            source: peer,
            ..buf.into()
        },
        Call::Batch(calls) => Done {
            parts: calls.into_iter().map(done).collect(),
            ..Done::default()
        },
        _ => Done::default(),
    }
}

/// Every buffer of a call.
pub(crate) fn buffers(call: &Call) -> Vec<&Buffer> {
    match call {
        Call::Batch(calls) => calls.iter().flat_map(buffers).collect(),
        call => call.input().into_iter().chain(call.output()).collect(),
    }
}

/// The caller's end of an operation.
struct Handle(Arc<Op>);

impl Pending for Handle {
    fn is_done(&self) -> bool {
        self.0.look()
    }

    fn order(&mut self) -> Result<Done> {
        match self.0.for_host {
            true => self.0.block(Duration::MAX).expect("an operation ends"),
            false => self.0.order(),
        }
    }

    fn block(&mut self, limit: Duration) -> Option<Result<Done>> {
        self.0.block(limit)
    }

    fn wake_by(&mut self, waker: &Waker) {
        let mut cell = self.0.cell.lock();
        if cell.end.is_none() {
            cell.waker = Some(waker.clone());
            return;
        }
        drop(cell);
        waker.wake_by_ref();
    }

    fn status(&self) -> WorkStatus {
        WorkStatus::custom(Arc::clone(&self.0) as _)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.cell.lock().detached = true;
        self.0.release();
    }
}

impl Status for Op {
    fn state(&self) -> State {
        let cell = self.cell.lock();
        match (&cell.end, cell.times.started) {
            (Some(Ok(())), _) => State::Succeeded,
            (Some(Err(err)), _) => State::Failed(err.clone()),
            (None, Some(_)) => State::Started,
            (None, None) => State::Enqueued,
        }
    }

    fn times(&self) -> Times {
        self.cell.lock().times.clone()
    }
}
