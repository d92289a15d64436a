//! A thread per group that sees to it that every operation ends.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use phalanx_pg::{Call, Error, ErrorKind, Result};

use crate::channel::{DRAIN, Finding, Line, late};
use crate::core::{Cause, Core};
use crate::op::Op;

/// Between two looks while operations are outstanding: short at first.
const SHORTEST: Duration = Duration::from_micros(500);
const LONGEST: Duration = Duration::from_millis(20);

/// Between two questions to the store while operations are outstanding.
const NEWS: Duration = Duration::from_millis(50);

/// How long telling the others may hold up the end of the group here.
const TELL: Duration = Duration::from_secs(2);

/// How long an abort waits for calls that are in progress before it goes ahead.
const POLITENESS: Duration = Duration::from_millis(500);

/// How long a message from a rank that has left is still waited for: it may be on its way.
const GRACE: Duration = Duration::from_secs(1);

/// Starts the watchdog, which ends with the group.
pub(crate) fn start(core: &Arc<Core>) -> Result<()> {
    let watched = Arc::clone(core);
    let named = std::thread::Builder::new().name("phalanx-nccl-watchdog".into());
    let spawned = named.spawn(move || Watchdog::new(watched).run());
    spawned.map(drop).map_err(|err| {
        let what = format!("starting a thread: {err}");
        Error::new(ErrorKind::Backend, what)
    })
}

struct Watchdog {
    core: Arc<Core>,
    pause: Duration,
    asked: Instant,
    /// When each rank was first seen to have left.
    left: Vec<(usize, u64, Instant)>,
}

impl Watchdog {
    fn new(core: Arc<Core>) -> Self {
        Self {
            core,
            pause: SHORTEST,
            asked: Instant::now(),
            left: Vec::new(),
        }
    }

    fn run(mut self) {
        let core = Arc::clone(&self.core);
        loop {
            let outstanding = self.turn(&core);
            if let Some(cause) = core.cause() {
                tear_down(&core, cause);
            }
            if core.cause().is_some() || core.is_closed() {
                core.fall_silent();
                return;
            }
            match outstanding {
                0 => {
                    self.pause = SHORTEST;
                    core.rest(None);
                }
                _ => {
                    core.rest(Some(self.pause));
                    self.pause = (self.pause * 2).min(LONGEST);
                }
            }
        }
    }

    /// Looks at everything once; the number of operations that are outstanding.
    fn turn(&mut self, core: &Core) -> usize {
        let current = core.device.bind();
        if let Err(err) = &current {
            core.fail(err.clone(), true);
        }
        let mut outstanding = core.submitting();
        for channel in core.channels() {
            let (open, finding) = channel.look();
            outstanding += open;
            match finding {
                None => {}
                Some(Finding::Late(op)) => {
                    let err = late(&op, channel.line).at(op.place_now());
                    core.fail(err, true);
                }
                Some(Finding::Failed(err)) => core.fail(err, true),
            }
        }
        if outstanding > 0 && self.asked.elapsed() >= NEWS {
            self.asked = Instant::now();
            self.hear(core);
        }
        outstanding
    }

    /// What the others have to say.
    fn hear(&mut self, core: &Core) {
        let news = match core.board.news() {
            Ok(news) => news,
            Err(err) => {
                // Without a store operations still end: at their timeouts.
                tracing::debug!("{err}");
                return;
            }
        };
        if let Some(notice) = news.broken {
            core.fail(notice.to_error(), false);
            return;
        }
        for (rank, finished) in news.left {
            if !self.left.iter().any(|(known, ..)| *known == rank) {
                self.left.push((rank, finished, Instant::now()));
            }
        }
        for &(rank, finished, seen) in &self.left {
            // Operations before the first one are over: what it has given stays.
            let needs = |op: &Op, line: Line| match (line.peer(), op.place.seq) {
                (None, Some(seq)) => seq >= finished,
                _ => seen.elapsed() > GRACE,
            };
            let mut channels = core.channels().into_iter();
            let hopeless = channels.any(|channel| {
                let concerned = channel.line.peer().is_none_or(|peer| peer == rank);
                concerned && channel.first().is_some_and(|op| needs(&op, channel.line))
            });
            if hopeless {
                core.fail(gone(rank), true);
            }
        }
    }
}

fn gone(rank: usize) -> Error {
    let what = format!("rank {rank} has dropped the group without a shutdown");
    Error::new(ErrorKind::Aborted, what).from_peer(rank)
}

/// Ends a broken group: the others are told, operations fail, communicators are aborted, memory is
/// freed when the device has let go of it.
fn tear_down(core: &Arc<Core>, cause: &Cause) {
    if cause.own {
        tracing::warn!("{}", cause.error);
        tell(core, &cause.error);
    }
    let _current = core.device.bind();
    let channels = core.channels();
    // All of them first: no operation may end well because of an abort.
    for channel in &channels {
        channel.doom(&|op| because(&cause.error, op));
    }
    let deadline = Instant::now() + POLITENESS;
    channels.iter().for_each(|channel| channel.abort(deadline));
    if core.options.tear_down {
        tracing::error!("ending the process, as the options ask: {}", cause.error);
        std::process::abort();
    }
    bury(core);
}

/// Waits until the device has let go of failed operations' memory, and frees it. What it does not
/// let go of is never freed.
fn bury(core: &Core) {
    let channels = core.channels();
    let memory = channels.iter().flat_map(|channel| channel.take_buried());
    let memory: Vec<Call> = memory.collect();
    if memory.is_empty() {
        return;
    }
    let deadline = Instant::now() + DRAIN;
    // All of them: the memory of a batch is on several streams.
    match channels.iter().all(|channel| channel.drains(deadline)) {
        true => drop(memory),
        false => {
            tracing::warn!(
                "memory of {} failed operations is not freed: the device may still use it",
                memory.len()
            );
            std::mem::forget(memory);
        }
    }
}

/// The store may not answer; that must not keep operations from ending here.
fn tell(core: &Arc<Core>, cause: &Error) {
    let (done, told) = mpsc::channel();
    let (core, cause) = (Arc::clone(core), cause.clone());
    let tell = move || {
        if let Err(err) = core.board.tell(&cause) {
            tracing::debug!("the others could not be told: {err}");
        }
        let _ = done.send(());
    };
    if std::thread::Builder::new().spawn(tell).is_ok() {
        let _ = told.recv_timeout(TELL);
    }
}

/// How `op` fails when `cause` ends the group: with the cause itself if it is the operation's own,
/// or if it concerns all alike; otherwise it is quoted.
pub(crate) fn because(cause: &Error, op: &Op) -> Error {
    let place = cause.place();
    let own = (place.call, place.seq) == (op.place.call, op.place.seq) && place.call.is_some();
    let shared = matches!(cause.kind(), ErrorKind::Aborted | ErrorKind::PeerLost);
    match (own || shared, cause.peer()) {
        (true, Some(peer)) => Error::new(cause.kind(), cause.message()).from_peer(peer),
        (true, None) => Error::new(cause.kind(), cause.message()),
        (false, _) => Error::broken_by(cause),
    }
}
