//! The flight recorder on groups whose operations end when the test says so.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use phalanx_pg::{
    Buffer, Call, CallOptions, Capabilities, Completer, DType, Done, Error, ErrorKind, FakeGroup,
    Frozen, Pending, ProcessGroup, ProcessGroupExt, RawWork, Recorded, Recorder, RecorderOptions,
    ReduceOp, Result, State, Status, Times, Trace, TraceState, WorkStatus, completion,
    dump_on_sigusr1,
};

const PATIENCE: Duration = Duration::from_secs(20);

/// A group whose operations the test completes.
#[derive(Debug)]
struct Manual {
    fake: FakeGroup,
    pending: Mutex<Vec<Completer>>,
    script: Mutex<Script>,
}

#[derive(Debug, Default)]
enum Script {
    #[default]
    Pending,
    /// Every call is refused with this kind.
    Refuse(ErrorKind),
    /// Every call is an operation of a device that has failed.
    FailOnDevice,
    /// Calls look at the recorder from inside the backend.
    Look(Arc<Recorder>, Option<Trace>),
}

impl Manual {
    fn new(rank: usize, size: usize) -> Arc<Self> {
        Arc::new(Self {
            fake: FakeGroup::new(rank, size),
            pending: Mutex::default(),
            script: Mutex::default(),
        })
    }

    fn oldest(&self) -> Completer {
        self.pending.lock().remove(0)
    }
}

#[derive(Clone)]
struct OnDevice;

impl Status for OnDevice {
    fn state(&self) -> State {
        State::Failed(Error::new(ErrorKind::PeerLost, "the device lost its peer"))
    }
    fn times(&self) -> Times {
        Times::now()
    }
}

impl Pending for OnDevice {
    fn is_done(&self) -> bool {
        true
    }
    fn order(&mut self) -> Result<Done> {
        Ok(Done::default())
    }
    fn block(&mut self, _: Duration) -> Option<Result<Done>> {
        Some(Ok(Done::default()))
    }
    fn wake_by(&mut self, _: &std::task::Waker) {}
    fn status(&self) -> WorkStatus {
        WorkStatus::custom(Arc::new(OnDevice))
    }
}

impl ProcessGroup for Manual {
    fn rank(&self) -> usize {
        self.fake.rank()
    }
    fn size(&self) -> usize {
        self.fake.size()
    }
    fn backend(&self) -> &str {
        "manual"
    }
    fn name(&self) -> &str {
        "world"
    }
    fn global_ranks(&self) -> &[usize] {
        self.fake.global_ranks()
    }
    fn capabilities(&self) -> Capabilities {
        self.fake.capabilities()
    }
    fn timeout(&self) -> Duration {
        Duration::from_secs(7)
    }
    fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        match &mut *self.script.lock() {
            Script::Refuse(kind) => return Err(Error::new(*kind, "refused")),
            Script::FailOnDevice => return Ok(RawWork::custom(Box::new(OnDevice))),
            Script::Look(recorder, seen) => *seen = Some(recorder.trace()),
            Script::Pending => {}
        }
        drop(self.fake.submit(call, options)?);
        let (completer, work) = completion();
        self.pending.lock().push(completer);
        Ok(work)
    }
    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
        self.fake.split(ranks, name)
    }
    fn abort(&self, _: &str) {}
    fn shutdown(&self) -> Result<()> {
        Err(Error::new(ErrorKind::PeerLost, "nobody says goodbye"))
    }
    fn sequence(&self) -> u64 {
        self.fake.sequence()
    }
    fn p2p_sequence(&self) -> u64 {
        self.fake.p2p_sequence()
    }
}

fn recorder(capacity: usize, dump_dir: Option<&Path>) -> Arc<Recorder> {
    let mut options = RecorderOptions::default();
    assert_eq!(options.capacity, 2000);
    options.capacity = capacity;
    options.dump_dir = dump_dir.map(Path::to_owned);
    Arc::new(Recorder::new(options))
}

fn recorded(dump_dir: Option<&Path>) -> (Arc<Manual>, Arc<Recorder>, Arc<Recorded>) {
    let (manual, recorder) = (Manual::new(1, 3), recorder(100, dump_dir));
    let group = Recorded::new(manual.clone(), &recorder);
    (manual, recorder, group)
}

fn floats(len: usize) -> Buffer {
    Buffer::zeroed(DType::F32, len)
}

fn frozen(len: usize) -> Frozen {
    floats(len).freeze()
}

fn read(dir: &Path) -> Option<Trace> {
    let text = fs::read_to_string(dir.join("rank_1.json")).ok()?;
    Some(serde_json::from_str(&text).expect("a whole file"))
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name();
    entries
        .map(|entry| name(entry).to_string_lossy().into_owned())
        .collect()
}

#[test]
fn a_dump_shows_the_present_state_of_each_operation() {
    let (manual, recorder, group) = recorded(None);
    let works: Vec<_> = (0..4)
        .map(|i| group.allreduce(floats(i + 1), ReduceOp::Sum).unwrap())
        .collect();
    let (done, failed, started) = (manual.oldest(), manual.oldest(), manual.oldest());
    done.start();
    done.arrived(2);
    done.complete(Ok(floats(1).into()));
    failed.start();
    failed.complete(Err(Error::new(ErrorKind::Timeout, "too late")));
    started.start();
    drop(works);

    let trace = recorder.trace();
    use TraceState::*;
    let states: Vec<_> = trace.entries.iter().map(|entry| entry.state).collect();
    assert_eq!(states, [Completed, Failed, Started, Scheduled]);
    let retired: Vec<_> = trace.entries.iter().map(|entry| entry.retired).collect();
    assert_eq!(retired, [true, true, false, false]);
    let [first, second, third, fourth] = &trace.entries[..] else {
        panic!("four entries");
    };
    assert!(first.duration_ms.unwrap() >= 0.0);
    assert_eq!(first.arrivals[0].rank, 2);
    assert!(first.arrivals[0].time_ns >= first.time_created_ns);
    let end = first.time_discovered_completed_ns;
    assert!(end >= first.time_discovered_started_ns && end > Some(0));
    assert!(second.error.as_ref().unwrap().contains("too late"));
    assert!(third.time_discovered_started_ns.is_some() && third.duration_ms.is_none());
    assert!(fourth.time_discovered_started_ns.is_none());
    let status = &trace.pg_status[&0];
    assert_eq!(status.last_enqueued_collective, 3);
    assert_eq!(status.last_started_collective, 2);
    assert_eq!(status.last_completed_collective, 0);
    drop(started);
    let third = &recorder.trace().entries[2];
    assert_eq!(third.state, Failed, "dropped by the backend meanwhile");
}

#[test]
fn an_entry_says_what_was_called() {
    let (_, recorder, group) = recorded(None);
    let options = CallOptions::default().with_timeout(Duration::from_millis(1500));
    drop(group.with(options).allgather(frozen(5)).unwrap());
    drop(group.send(frozen(2), 0, 3).unwrap());
    drop(group.recv(Buffer::zeroed(DType::I64, 1), 2, 3).unwrap());
    drop(group.recv_any(floats(1), 3).unwrap());
    let batch = vec![floats(1), Buffer::zeroed(DType::BF16, 2)];
    drop(group.allreduce_coalesced(batch, ReduceOp::Sum).unwrap());
    drop(group.barrier_async().unwrap());

    let trace = recorder.trace();
    let names: Vec<_> = trace
        .entries
        .iter()
        .map(|e| e.profiling_name.as_str())
        .collect();
    let expected = [
        "manual:_all_gather_base",
        "manual:send 1->0",
        "manual:recv 1<-2",
        "manual:recv_any_source",
        "manual:allreduce_coalesced",
        "manual:barrier",
    ];
    assert_eq!(names, expected);
    let numbers: Vec<_> = trace
        .entries
        .iter()
        .map(|e| (e.collective_seq_id, e.p2p_seq_id, e.op_id, e.is_p2p))
        .collect();
    let expected = [
        (0, 0, 1, false),
        (1, 0, 2, true),
        (1, 1, 3, true),
        (1, 2, 4, true),
        (1, 3, 5, false),
        (2, 3, 6, false),
    ];
    assert_eq!(numbers, expected);
    let gather = &trace.entries[0];
    assert_eq!((gather.record_id, gather.pg_id), (0, 0));
    assert_eq!(gather.timeout_ms, 1500);
    assert_eq!(trace.entries[1].timeout_ms, 7000);
    assert_eq!(gather.process_group, ("world".into(), "manual".into()));
    assert_eq!(
        (&*gather.input_sizes, &*gather.output_sizes),
        (&[[5]][..], &[[15]][..])
    );
    let this = std::thread::current();
    assert_eq!(gather.thread_name, this.name().unwrap());
    assert_eq!(trace.entries[2].output_dtypes, ["Long"]);
    assert!(trace.entries[2].input_dtypes.is_empty());
    assert_eq!(trace.entries[4].input_dtypes, ["Float", "BFloat16"]);
    assert_eq!(trace.entries[4].output_sizes, [[1], [2]]);
    assert!(trace.entries[5].input_sizes.is_empty());
}

#[test]
fn the_json_has_pytorchs_names() {
    let (_, recorder, group) = recorded(None);
    drop(group.allreduce(floats(3), ReduceOp::Sum).unwrap());
    let json: serde_json::Value = serde_json::from_str(&recorder.dump()).unwrap();
    let keys = |value: &serde_json::Value| -> BTreeSet<String> {
        value.as_object().unwrap().keys().cloned().collect()
    };
    let set = |names: &[&str]| -> BTreeSet<String> { names.iter().map(|n| (*n).into()).collect() };
    let top = ["version", "pg_config", "pg_status", "entries"];
    let ours = ["rank", "world_size", "hostname", "pid"];
    assert_eq!(keys(&json), &set(&top) | &set(&ours));
    let theirs = [
        "record_id",
        "pg_id",
        "process_group",
        "collective_seq_id",
        "p2p_seq_id",
        "op_id",
        "is_p2p",
        "profiling_name",
        "input_sizes",
        "input_dtypes",
        "output_sizes",
        "output_dtypes",
        "time_created_ns",
        "time_discovered_started_ns",
        "time_discovered_completed_ns",
        "duration_ms",
        "timeout_ms",
        "state",
        "retired",
        "thread_name",
    ];
    let entry = &json["entries"][0];
    assert_eq!(keys(entry), &set(&theirs) | &set(&["error", "arrivals"]));
    assert_eq!(entry["state"], "scheduled");
    assert_eq!(
        entry["process_group"],
        serde_json::json!(["world", "manual"])
    );
    assert_eq!(entry["input_sizes"], serde_json::json!([[3]]));
    assert_eq!(json["pg_config"]["0"]["ranks"], "[0, 1, 2]");
    assert_eq!(json["pg_status"]["0"]["last_enqueued_collective"], 0);
    assert_eq!((&json["rank"], &json["world_size"]), (&1.into(), &3.into()));
    assert_eq!(json["pid"], std::process::id());
}

#[test]
fn the_newest_operations_push_out_the_oldest() {
    let manual = Manual::new(1, 3);
    let recorder = recorder(3, None);
    let group = Recorded::new(manual.clone(), &recorder);
    for _ in 0..5 {
        drop(group.barrier_async().unwrap());
        manual.oldest().complete(Ok(Done::default()));
    }
    drop(group.barrier_async().unwrap());
    let trace = recorder.trace();
    let ids: Vec<_> = trace.entries.iter().map(|entry| entry.record_id).collect();
    assert_eq!(ids, [3, 4, 5]);
    for _ in 0..3 {
        drop(group.send(frozen(1), 0, 0).unwrap());
    }
    let status = recorder.trace().pg_status[&0].clone();
    assert_eq!(status.last_completed_collective, 4, "remembered");
    assert_eq!(status.last_enqueued_collective, 5);
}

#[test]
fn a_capacity_of_zero_records_nothing() {
    let recorder = recorder(0, None);
    let group = Recorded::new(Arc::new(FakeGroup::new(0, 2)), &recorder);
    group.barrier().unwrap();
    assert!(recorder.trace().entries.is_empty());
}

#[test]
fn an_operation_is_there_while_the_backend_still_has_it_in_submit() {
    let (manual, recorder, group) = recorded(None);
    *manual.script.lock() = Script::Look(recorder.clone(), None);
    drop(group.call(Call::Barrier, &CallOptions::blocking()).unwrap());
    let Script::Look(_, Some(seen)) = &*manual.script.lock() else {
        panic!("the call was not submitted");
    };
    assert_eq!(seen.entries[0].state, TraceState::Started);
    assert!(!seen.entries[0].retired);
}

#[test]
fn a_refused_call_is_recorded_with_its_reason_and_is_no_progress() {
    let (manual, recorder, group) = recorded(None);
    *manual.script.lock() = Script::Refuse(ErrorKind::QueueFull);
    assert!(group.barrier_async().is_err());
    let trace = recorder.trace();
    assert_eq!(trace.entries[0].state, TraceState::Failed);
    assert!(trace.entries[0].error.as_ref().unwrap().contains("refused"));
    assert_eq!(trace.pg_status[&0].last_enqueued_collective, -1);
}

#[test]
fn one_recorder_serves_a_group_and_its_splits() {
    let (_, recorder, group) = recorded(None);
    let part = group.split(&[2, 1], "part").unwrap().unwrap();
    assert!(group.split(&[0], "others").unwrap().is_none());
    drop(group.barrier_async().unwrap());
    part.barrier().unwrap();
    let trace = recorder.trace();
    let ids: Vec<_> = trace.entries.iter().map(|entry| entry.pg_id).collect();
    assert_eq!(ids, [0, 1]);
    assert_eq!(trace.pg_config[&1].ranks, "[2, 1]");
    assert_eq!(trace.entries[1].process_group.0, "fake/part");
    assert_eq!((trace.rank, trace.world_size), (1, 3), "of the world");
}

#[test]
fn the_first_error_that_breaks_the_group_is_written_when_it_happens() {
    let dir = tempfile::tempdir().unwrap();
    let (manual, _, group) = recorded(Some(dir.path()));
    let first = group.allreduce(floats(1), ReduceOp::Sum).unwrap();
    let second = group.allreduce(floats(2), ReduceOp::Sum).unwrap();
    assert!(read(dir.path()).is_none(), "nothing is written unasked");
    manual
        .oldest()
        .complete(Err(Error::new(ErrorKind::PeerLost, "rank 2 is gone")));
    let trace = read(dir.path()).expect("written before anybody waits");
    assert!(
        trace.entries[0]
            .error
            .as_ref()
            .unwrap()
            .contains("rank 2 is gone")
    );
    assert_eq!(trace.entries[1].state, TraceState::Scheduled);
    assert_eq!(
        names(dir.path()),
        ["rank_1.json"],
        "no temporary file is left"
    );
    manual
        .oldest()
        .complete(Err(Error::new(ErrorKind::Broken, "a consequence")));
    assert_eq!(read(dir.path()).unwrap(), trace, "the first stays");
    drop((first, second));
}

#[test]
fn errors_that_break_nothing_write_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (manual, _, group) = recorded(Some(dir.path()));
    for kind in [ErrorKind::QueueFull, ErrorKind::Mismatch, ErrorKind::Closed] {
        *manual.script.lock() = Script::Refuse(kind);
        assert!(group.barrier_async().is_err());
    }
    drop(group);
    assert!(names(dir.path()).is_empty());
}

#[test]
fn refusals_aborts_and_failed_shutdowns_are_written_too() {
    type Act = fn(&Manual, &Recorded);
    let acts: [Act; 3] = [
        |manual, group| {
            *manual.script.lock() = Script::Refuse(ErrorKind::Broken);
            assert!(group.barrier_async().is_err());
        },
        |_, group| group.abort("enough is enough"),
        |_, group| assert!(group.shutdown().is_err()),
    ];
    for act in acts {
        let dir = tempfile::tempdir().unwrap();
        let nested = dir.path().join("made/when/needed");
        let (manual, _, group) = recorded(Some(&nested));
        act(&manual, &group);
        assert!(read(&nested).is_some_and(|trace| trace.pg_status[&0].error.is_some()));
    }
}

#[test]
fn a_recording_of_an_abort_has_its_reason() {
    for outstanding in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (_manual, _, group) = recorded(Some(dir.path()));
        let work = outstanding.then(|| group.barrier_async().unwrap());
        group.abort("enough is enough");
        group.abort("a later reason");
        let error = read(dir.path()).expect("written").pg_status[&0]
            .error
            .clone();
        assert_eq!(error.as_deref(), Some("enough is enough"));
        drop(work);
    }
}

#[test]
fn a_failure_on_a_device_is_written_at_the_latest_when_the_group_ends() {
    let dir = tempfile::tempdir().unwrap();
    let (manual, _, group) = recorded(Some(dir.path()));
    *manual.script.lock() = Script::FailOnDevice;
    drop(group.barrier_async().unwrap());
    drop(group);
    let trace = read(dir.path()).expect("written");
    assert!(trace.entries[0].error.as_ref().unwrap().contains("device"));
}

#[test]
fn a_dump_that_cannot_be_written_says_so_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (_, recorder, _group) = recorded(None);
    let target = dir.path().join("target");
    fs::create_dir_all(target.join("not empty")).unwrap();
    assert!(
        recorder.dump_to(&target).is_err(),
        "a directory is in the way"
    );
    assert_eq!(names(dir.path()), ["target"]);
    assert!(recorder.dump_to(Path::new("/")).is_err());
}

/// One test for both: signals are the process's.
#[test]
fn sigusr1_writes_a_recording_only_after_it_was_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (_, recorder, group) = recorded(None);
    drop(group.barrier_async().unwrap());
    let listening = dump_on_sigusr1(&recorder, dir.path()).unwrap();
    let me = rustix::process::getpid();
    for round in 1..=2usize {
        let _ = fs::remove_file(dir.path().join("rank_1.json"));
        rustix::process::kill_process(me, rustix::process::Signal::USR1).unwrap();
        let end = Instant::now() + PATIENCE;
        let trace = loop {
            if let Some(trace) = read(dir.path()) {
                break trace;
            }
            assert!(Instant::now() < end, "no recording");
            std::thread::sleep(Duration::from_millis(5));
        };
        assert_eq!(trace.entries.len(), round);
        drop(group.barrier_async().unwrap());
    }
    drop(listening);
    fs::remove_file(dir.path().join("rank_1.json")).unwrap();
    rustix::process::kill_process(me, rustix::process::Signal::USR1).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert!(names(dir.path()).is_empty(), "nobody listens any more");
}
