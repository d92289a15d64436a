//! The flight recorder: the last operations of a process, for when something went wrong.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;

use crate::call::{Call, CallKind, CallOptions, Mode};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind};
use crate::group::ProcessGroup;
use crate::trace::{
    Arrival, GroupConfig, GroupStatus, TRACE_VERSION, Trace, TraceEntry, TraceState, torch_batch,
    torch_dtype, torch_operation,
};
use crate::work::{State, Times, WorkStatus};

/// How a [`Recorder`] records.
#[derive(Debug, Clone)]
pub struct RecorderOptions {
    /// Most operations kept; the oldest make room. Zero records nothing.
    pub capacity: usize,
    /// Where to write `rank_{rank}.json` on the first error that breaks a group; `None` writes
    /// nothing unasked.
    pub dump_dir: Option<PathBuf>,
}

impl Default for RecorderOptions {
    fn default() -> Self {
        Self {
            capacity: 2000,
            dump_dir: None,
        }
    }
}

/// The last operations of a process, on any number of groups.
///
/// Groups are recorded by wrapping them in [`Recorded`](crate::Recorded). Recording an operation
/// costs an entry in a ring: how it stands is asked only when a dump is made, so a dump shows the
/// present, also of what hangs.
///
/// # Threads
///
/// May be used and dumped from many threads, also while operations run.
#[derive(Debug)]
pub struct Recorder {
    options: RecorderOptions,
    /// One moment by both clocks, to tell the time of an instant.
    epoch: (SystemTime, Instant),
    ring: Mutex<Ring>,
    dumped: AtomicBool,
    /// Held while a file is written, so that dumps do not write to one another's.
    writing: Mutex<()>,
}

#[derive(Debug, Default)]
struct Ring {
    groups: Vec<Group>,
    entries: VecDeque<Entry>,
    next_id: u64,
}

#[derive(Debug)]
struct Group {
    config: GroupConfig,
    rank: usize,
    global_rank: usize,
    size: usize,
    /// Of the entries that are gone.
    status: GroupStatus,
}

#[derive(Debug)]
struct Entry {
    group: usize,
    issued: Issued,
    kind: CallKind,
    peer: Option<usize>,
    memory: Memory,
    created: Instant,
    timeout: Duration,
    thread: Thread,
    watch: Watch,
}

/// The numbers of an operation in its group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Issued {
    pub(crate) seq: u64,
    pub(crate) p2p_seq: u64,
    pub(crate) op_id: u64,
    pub(crate) is_p2p: bool,
}

type Shape = (DType, usize);

/// What an operation reads and writes. Only batches allocate.
#[derive(Debug)]
enum Memory {
    One(Option<Shape>, Option<Shape>),
    Batch(CallKind, Vec<Shape>, Vec<Shape>),
}

#[derive(Debug)]
enum Watch {
    /// Inside the backend's `submit`.
    Entered(Mode),
    Submitted(WorkStatus),
    Refused(Error, Instant),
}

/// An entry in the ring; `None` if nothing is recorded.
pub(crate) type Ticket = Option<u64>;

impl Recorder {
    /// A recorder for the groups of this process.
    pub fn new(options: RecorderOptions) -> Self {
        Self {
            options,
            epoch: (SystemTime::now(), Instant::now()),
            ring: Mutex::default(),
            dumped: AtomicBool::new(false),
            writing: Mutex::new(()),
        }
    }

    pub(crate) fn dumps_on_failure(&self) -> bool {
        self.options.dump_dir.is_some()
    }

    /// Makes a group known; the answer is its id.
    pub(crate) fn add_group(&self, group: &dyn ProcessGroup) -> usize {
        let config = GroupConfig {
            name: group.name().to_owned(),
            desc: group.backend().to_owned(),
            ranks: format!("{:?}", group.global_ranks()),
        };
        let rank = group.rank();
        let groups = &mut self.ring.lock().groups;
        groups.push(Group {
            config,
            rank,
            global_rank: group.global_ranks().get(rank).copied().unwrap_or(rank),
            size: group.size(),
            status: GroupStatus::default(),
        });
        groups.len() - 1
    }

    /// Records an operation before the backend sees it, so that one that never returns is there.
    pub(crate) fn enter(
        &self,
        group: usize,
        call: &Call,
        options: &CallOptions,
        timeout: Duration,
        issued: Issued,
    ) -> Ticket {
        if self.options.capacity == 0 {
            return None;
        }
        let entry = Entry {
            group,
            issued,
            kind: call.kind(),
            peer: call.root_or_peer(),
            memory: Memory::of(call),
            created: Instant::now(),
            timeout,
            thread: std::thread::current(),
            watch: Watch::Entered(options.mode),
        };
        let mut ring = self.ring.lock();
        if ring.entries.len() >= self.options.capacity {
            ring.forget_oldest();
        }
        ring.entries.push_back(entry);
        ring.next_id += 1;
        Some(ring.next_id - 1)
    }

    pub(crate) fn submitted(&self, ticket: Ticket, status: WorkStatus) {
        self.update(ticket, Watch::Submitted(status));
    }

    pub(crate) fn refused(&self, ticket: Ticket, err: &Error) {
        self.update(ticket, Watch::Refused(err.clone(), Instant::now()));
    }

    fn update(&self, ticket: Ticket, watch: Watch) {
        let mut ring = self.ring.lock();
        let oldest = ring.next_id - ring.entries.len() as u64;
        let index = ticket.and_then(|id| id.checked_sub(oldest));
        if let Some(index) = index
            && let Some(entry) = ring.entries.get_mut(index as usize)
        {
            entry.watch = watch;
        }
    }

    /// Remembers what broke a group, the first time.
    pub(crate) fn broken(&self, group: usize, err: &Error) {
        let status = &mut self.ring.lock().groups[group].status;
        status.error.get_or_insert_with(|| err.to_string());
    }

    /// An operation failed: the first time that this breaks a group, the recording is written to
    /// the dump directory, if there is one.
    pub(crate) fn failed(&self, group: usize, err: &Error) {
        if !breaks_a_group(err) {
            return;
        }
        self.broken(group, err);
        let Some(dir) = &self.options.dump_dir else {
            return;
        };
        if self.dumped.swap(true, Ordering::AcqRel) {
            return;
        }
        match self.dump_in(dir) {
            Ok(path) => tracing::info!("flight recording of the failure: {}", path.display()),
            Err(err) => tracing::warn!("flight recording in {}: {err}", dir.display()),
        }
    }

    /// Looks for failures of a group that did not announce themselves.
    pub(crate) fn look_for_failures(&self, group: usize) {
        let failure = {
            let ring = self.ring.lock();
            let own = ring.entries.iter().filter(|entry| entry.group == group);
            own.filter_map(|entry| entry.progress().error)
                .find(breaks_a_group)
        };
        if let Some(err) = failure {
            self.failed(group, &err);
        }
    }

    /// What has been recorded, with the present state of each operation.
    pub fn trace(&self) -> Trace {
        let ring = self.ring.lock();
        let mut pg_status: Vec<GroupStatus> = ring
            .groups
            .iter()
            .map(|group| group.status.clone())
            .collect();
        let mut entries = Vec::with_capacity(ring.entries.len());
        let oldest = ring.next_id - ring.entries.len() as u64;
        for (entry, record_id) in ring.entries.iter().zip(oldest..) {
            let progress = entry.progress();
            let status = &mut pg_status[entry.group];
            entry.count(&progress, status);
            if let Some(err) = progress.error.as_ref().filter(|err| breaks_a_group(err)) {
                status.error.get_or_insert_with(|| err.to_string());
            }
            let group = &ring.groups[entry.group];
            entries.push(self.trace_entry(entry, record_id, group, progress));
        }
        let configs = ring.groups.iter().map(|group| group.config.clone());
        let world = ring.groups.first();
        Trace {
            version: TRACE_VERSION.into(),
            rank: world.map_or(0, |group| group.global_rank),
            world_size: world.map_or(0, |group| group.size),
            hostname: hostname(),
            pid: std::process::id(),
            pg_config: configs.enumerate().collect(),
            pg_status: pg_status.into_iter().enumerate().collect(),
            entries,
        }
    }

    fn trace_entry(
        &self,
        entry: &Entry,
        record_id: u64,
        group: &Group,
        progress: Progress,
    ) -> TraceEntry {
        let (inputs, outputs) = entry.memory.shapes();
        let sizes = |shapes: &[Shape]| shapes.iter().map(|&(_, len)| [len]).collect();
        let dtypes = |shapes: &[Shape]| {
            let names = shapes.iter().map(|&(dtype, _)| torch_dtype(dtype));
            names.map(str::to_owned).collect()
        };
        let (started, done) = (progress.started, progress.done);
        let duration = started.zip(done).map(|(from, to)| to.duration_since(from));
        let arrivals = progress.arrivals.iter();
        TraceEntry {
            record_id,
            pg_id: entry.group,
            process_group: (group.config.name.clone(), group.config.desc.clone()),
            collective_seq_id: entry.issued.seq,
            p2p_seq_id: entry.issued.p2p_seq,
            op_id: entry.issued.op_id,
            is_p2p: entry.issued.is_p2p,
            profiling_name: format!("{}:{}", group.config.desc, entry.operation(group.rank)),
            input_sizes: sizes(&inputs),
            input_dtypes: dtypes(&inputs),
            output_sizes: sizes(&outputs),
            output_dtypes: dtypes(&outputs),
            time_created_ns: self.nanos(entry.created),
            time_discovered_started_ns: started.map(|at| self.nanos(at)),
            time_discovered_completed_ns: done.map(|at| self.nanos(at)),
            duration_ms: duration.map(|took| took.as_secs_f64() * 1e3),
            timeout_ms: u64::try_from(entry.timeout.as_millis()).unwrap_or(u64::MAX),
            state: progress.state,
            retired: done.is_some(),
            thread_name: entry.thread.name().unwrap_or_default().to_owned(),
            error: progress.error.map(|err| err.to_string()),
            arrivals: arrivals
                .map(|&(rank, at)| Arrival::new(rank, self.nanos(at)))
                .collect(),
        }
    }

    fn nanos(&self, at: Instant) -> u64 {
        let (wall, instant) = self.epoch;
        let wall = match at.checked_duration_since(instant) {
            Some(later) => wall + later,
            None => wall - instant.duration_since(at),
        };
        let since = wall.duration_since(SystemTime::UNIX_EPOCH);
        since.map_or(0, |since| since.as_nanos() as u64)
    }

    /// The recording as JSON.
    pub fn dump(&self) -> String {
        serde_json::to_string(&self.trace()).expect("plain data with text keys is valid JSON")
    }

    /// Writes the recording to `path`. Readers see the old file or the whole new one.
    pub fn dump_to(&self, path: &Path) -> io::Result<()> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(name);
        temporary.push(format!(".{}.tmp", std::process::id()));
        let temporary = path.with_file_name(temporary);
        let _writing = self.writing.lock();
        fs::write(&temporary, self.dump())
            .and_then(|()| fs::rename(&temporary, path))
            .inspect_err(|_| {
                let _ = fs::remove_file(&temporary);
            })
    }

    /// Writes the recording to `rank_{rank}.json` in `dir`, which is created if need be.
    pub fn dump_in(&self, dir: &Path) -> io::Result<PathBuf> {
        fs::create_dir_all(dir)?;
        let rank = self
            .ring
            .lock()
            .groups
            .first()
            .map_or(0, |group| group.global_rank);
        let path = dir.join(format!("rank_{rank}.json"));
        self.dump_to(&path)?;
        Ok(path)
    }
}

impl Ring {
    fn forget_oldest(&mut self) {
        if let Some(entry) = self.entries.pop_front() {
            let status = &mut self.groups[entry.group].status;
            entry.count(&entry.progress(), status);
        }
    }
}

/// How an entry stands now.
struct Progress {
    state: TraceState,
    started: Option<Instant>,
    done: Option<Instant>,
    error: Option<Error>,
    arrivals: Vec<(usize, Instant)>,
}

impl Entry {
    fn progress(&self) -> Progress {
        let mut progress = Progress {
            state: TraceState::Scheduled,
            started: None,
            done: None,
            error: None,
            arrivals: Vec::new(),
        };
        match &self.watch {
            Watch::Entered(Mode::Async) => {}
            // As far as can be told from outside: the caller's thread is at it.
            Watch::Entered(Mode::Blocking) => {
                progress.state = TraceState::Started;
                progress.started = Some(self.created);
            }
            Watch::Refused(err, at) => {
                progress.state = TraceState::Failed;
                progress.error = Some(err.clone());
                progress.done = Some(*at);
            }
            Watch::Submitted(status) => {
                let Times {
                    started,
                    done,
                    arrivals,
                    ..
                } = status.times();
                (progress.started, progress.done) = (started, done);
                progress.arrivals = arrivals;
                progress.state = match status.state() {
                    State::Enqueued => TraceState::Scheduled,
                    State::Started => TraceState::Started,
                    State::Succeeded => TraceState::Completed,
                    State::Failed(err) => {
                        progress.error = Some(err);
                        TraceState::Failed
                    }
                };
            }
        }
        progress
    }

    /// Takes the entry into account in its group's status.
    fn count(&self, progress: &Progress, status: &mut GroupStatus) {
        if self.issued.is_p2p || matches!(self.watch, Watch::Refused(..)) {
            return;
        }
        let seq = i64::try_from(self.issued.seq).unwrap_or(i64::MAX);
        let newest = |slot: &mut i64| *slot = seq.max(*slot);
        newest(&mut status.last_enqueued_collective);
        let completed = progress.state == TraceState::Completed;
        if progress.started.is_some() || completed {
            newest(&mut status.last_started_collective);
        }
        if completed {
            newest(&mut status.last_completed_collective);
        }
    }
}

impl Entry {
    fn operation(&self, rank: usize) -> String {
        match (self.kind, self.peer, &self.memory) {
            (CallKind::Send, Some(peer), _) => format!("send {rank}->{peer}"),
            (CallKind::Recv, Some(peer), _) => format!("recv {rank}<-{peer}"),
            (_, _, Memory::Batch(kind, ..)) => torch_batch(*kind).into(),
            (kind, ..) => torch_operation(kind).into(),
        }
    }
}

impl Memory {
    fn of(call: &Call) -> Self {
        let input = |call: &Call| call.input().map(|buffer| (buffer.dtype(), buffer.len()));
        let output = |call: &Call| call.output().map(|buffer| (buffer.dtype(), buffer.len()));
        match call {
            Call::Batch(calls) => Self::Batch(
                calls.first().map_or(CallKind::Batch, Call::kind),
                calls.iter().filter_map(input).collect(),
                calls.iter().filter_map(output).collect(),
            ),
            one => Self::One(input(one), output(one)),
        }
    }

    fn shapes(&self) -> (Vec<Shape>, Vec<Shape>) {
        match self {
            Self::One(input, output) => {
                let list = |shape: &Option<Shape>| shape.iter().copied().collect();
                (list(input), list(output))
            }
            Self::Batch(_, inputs, outputs) => (inputs.clone(), outputs.clone()),
        }
    }
}

fn breaks_a_group(err: &Error) -> bool {
    !err.leaves_group_usable() && err.kind() != ErrorKind::Closed
}

fn hostname() -> String {
    let uname = rustix::system::uname();
    uname.nodename().to_string_lossy().into_owned()
}
