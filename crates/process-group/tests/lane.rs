//! The queue that host backends share: order, inline calls, failures, ends.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use phalanx_pg::{
    Buffer, Call, CallKind, CallOptions, DType, Done, Engine, Error, ErrorKind, Lane,
    MAX_OUTSTANDING, Place, RawWork, ReduceOp, Result, State, Turn,
};

/// Long enough that only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Default)]
struct Script {
    /// (sequence number, running thread, first element) in the order of execution.
    ran: Mutex<Vec<(u64, ThreadId, f32)>>,
    /// Runs wait while it is closed.
    gate: Mutex<Gate>,
    changed: Condvar,
    interrupts: Mutex<Vec<Error>>,
}

#[derive(Default)]
struct Gate {
    closed: bool,
    interrupted: bool,
    waiting: usize,
}

impl Script {
    fn close_gate(&self) {
        self.gate.lock().closed = true;
    }

    fn open_gate(&self) {
        self.gate.lock().closed = false;
        self.changed.notify_all();
    }

    /// Waits until an operation stands at the gate.
    fn someone_waits(&self) {
        let end = Instant::now() + PATIENCE;
        let mut gate = self.gate.lock();
        while gate.waiting == 0 {
            assert!(
                !self.changed.wait_until(&mut gate, end).timed_out(),
                "nothing runs"
            );
        }
    }

    fn order(&self) -> Vec<u64> {
        self.ran.lock().iter().map(|entry| entry.0).collect()
    }
}

impl Engine for Script {
    /// Values below zero are commands.
    fn run(&self, call: Call, turn: &Turn) -> Result<Done> {
        let value = call
            .input()
            .expect("calls here have memory")
            .as_slice::<f32>()?[0];
        let mut gate = self.gate.lock();
        gate.waiting += 1;
        self.changed.notify_all();
        while gate.closed && !gate.interrupted {
            if self
                .changed
                .wait_until(&mut gate, turn.deadline)
                .timed_out()
            {
                return Err(Error::new(ErrorKind::Timeout, "the gate is closed"));
            }
        }
        gate.waiting -= 1;
        if gate.interrupted {
            return Err(Error::new(ErrorKind::Aborted, "interrupted"));
        }
        drop(gate);
        self.ran
            .lock()
            .push((turn.seq, thread::current().id(), value));
        match value {
            -1.0 => Err(Error::new(ErrorKind::PeerLost, "rank 1 is gone").from_peer(1)),
            -2.0 => Err(Error::unsupported("not on a Monday")),
            -3.0 => panic!("scripted panic"),
            _ => match call {
                Call::AllReduce { buf, .. } => Ok(buf.into()),
                _ => Ok(Done::default()),
            },
        }
    }

    fn interrupt(&self, cause: &Error) {
        self.interrupts.lock().push(cause.clone());
        self.gate.lock().interrupted = true;
        self.changed.notify_all();
    }
}

fn lane() -> (Arc<Lane>, Arc<Script>) {
    let script = Arc::new(Script::default());
    let mut place = Place::default();
    place.rank = Some(0);
    place.group = Some("lane".into());
    let lane = Lane::new(place, PATIENCE, script.clone());
    (Arc::new(lane), script)
}

fn call(value: f32) -> Call {
    Call::AllReduce {
        buf: Buffer::from_vec(vec![value]),
        op: ReduceOp::Sum,
    }
}

fn issue(lane: &Lane, value: f32, blocking: bool) -> Result<RawWork> {
    let options = match blocking {
        true => CallOptions::blocking(),
        false => CallOptions::default(),
    };
    lane.submit(call(value), &options)
}

fn finish(mut work: RawWork) -> Result<Done> {
    work.block(PATIENCE).expect("the operation never ended")
}

fn value(done: Done) -> f32 {
    done.buffer.unwrap().as_slice::<f32>().unwrap()[0]
}

/// Fails the test instead of hanging it.
fn within_patience<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, wait): (Sender<T>, Receiver<T>) = channel();
    let runner = thread::spawn(move || {
        let _ = done.send(f());
    });
    match wait.recv_timeout(PATIENCE) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => panic!("hangs"),
        Err(RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(runner.join().unwrap_err())
        }
    }
}

#[test]
fn a_blocking_call_on_an_idle_lane_runs_in_the_callers_thread() {
    let (lane, script) = lane();
    let mut work = issue(&lane, 1.0, true).unwrap();
    assert!(work.is_done(), "finished when submit returns");
    assert_eq!(value(work.block(Duration::ZERO).unwrap().unwrap()), 1.0);
    assert_eq!(script.ran.lock()[0].1, thread::current().id());
    assert!(work.status().times().started.is_some() && work.status().times().done.is_some());
}

#[test]
fn an_asynchronous_call_returns_before_it_runs() {
    let (lane, script) = lane();
    script.close_gate();
    let work = issue(&lane, 1.0, false).unwrap();
    assert!(!work.is_done());
    script.someone_waits();
    assert!(matches!(work.status().state(), State::Started));
    script.open_gate();
    assert_eq!(value(finish(work).unwrap()), 1.0);
    assert_ne!(script.ran.lock()[0].1, thread::current().id());
}

#[test]
fn a_blocking_call_behind_queued_ones_waits_for_its_turn() {
    let (lane, script) = lane();
    script.close_gate();
    let works: Vec<_> = (0..3)
        .map(|i| issue(&lane, i as f32, false).unwrap())
        .collect();
    let last = issue(&lane, 3.0, true).unwrap();
    assert!(!last.is_done(), "three operations are before it");
    script.open_gate();
    assert_eq!(value(finish(last).unwrap()), 3.0);
    assert!(works.iter().all(RawWork::is_done));
    assert_eq!(script.order(), [0, 1, 2, 3]);
}

#[test]
fn mixed_callers_on_several_threads_run_in_the_order_of_their_numbers() {
    let (lane, script) = lane();
    let threads: Vec<_> = (0..4)
        .map(|thread_index| {
            let lane = Arc::clone(&lane);
            thread::spawn(move || {
                for i in 0..200 {
                    let blocking = (i + thread_index) % 3 == 0;
                    let work = issue(&lane, 1.0, blocking).unwrap();
                    if blocking || i % 7 == 0 {
                        finish(work).unwrap();
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    lane.close(PATIENCE).unwrap();
    assert_eq!(script.order(), (0..800).collect::<Vec<u64>>());
    assert_eq!(lane.sequence(), 800);
}

#[test]
fn a_full_queue_is_an_error_that_takes_no_number() {
    let (lane, script) = lane();
    script.close_gate();
    let _running = issue(&lane, 0.0, false).unwrap();
    script.someone_waits();
    let _queued: Vec<_> = (1..MAX_OUTSTANDING)
        .map(|_| issue(&lane, 0.0, false).unwrap())
        .collect();
    let err = issue(&lane, 0.0, false).unwrap_err();
    assert_eq!(err.kind(), ErrorKind::QueueFull);
    assert!(err.leaves_group_usable());
    assert_eq!(lane.sequence(), MAX_OUTSTANDING as u64);
    script.open_gate();
    lane.close(PATIENCE).unwrap();
}

#[test]
fn the_first_cause_breaks_the_group_and_stays() {
    within_patience(|| {
        let (lane, script) = lane();
        let err = finish(issue(&lane, -1.0, true).unwrap()).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::PeerLost);
        let place = err.place();
        assert_eq!(
            (place.rank, place.peer, place.call, place.seq),
            (Some(0), Some(1), Some(CallKind::AllReduce), Some(0))
        );
        assert!(place.elapsed.is_some());
        lane.fail(Error::new(ErrorKind::Aborted, "a second cause"));
        for blocking in [true, false] {
            let later = issue(&lane, 1.0, blocking).unwrap_err();
            assert_eq!(later.kind(), ErrorKind::Broken);
            assert_eq!(later.cause().unwrap().kind(), ErrorKind::PeerLost);
        }
        assert_eq!(lane.broken().unwrap().kind(), ErrorKind::PeerLost);
        assert_eq!(script.interrupts.lock().len(), 1, "interrupted once");
        assert_eq!(
            lane.check_usable().unwrap_err().kind(),
            ErrorKind::Broken,
            "not usable"
        );
    });
}

#[test]
fn a_failure_on_the_lanes_thread_fails_what_is_queued() {
    within_patience(|| {
        let (lane, script) = lane();
        script.close_gate();
        let first = issue(&lane, -1.0, false).unwrap();
        let second = issue(&lane, 1.0, false).unwrap();
        script.open_gate();
        assert_eq!(finish(first).unwrap_err().kind(), ErrorKind::PeerLost);
        let second = finish(second).unwrap_err();
        assert_eq!(second.kind(), ErrorKind::Broken);
        assert_eq!(second.place().seq, Some(1));
        assert_eq!(second.peer(), Some(1), "the cause tells who");
        assert_eq!(script.order(), [0]);
    });
}

#[test]
fn an_error_before_anything_was_sent_leaves_the_lane_usable() {
    within_patience(|| {
        let (lane, _) = lane();
        let err = finish(issue(&lane, -2.0, true).unwrap()).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Unsupported);
        assert!(lane.broken().is_none());
        finish(issue(&lane, 1.0, true).unwrap()).unwrap();
    });
}

#[test]
fn a_panicking_engine_breaks_the_group_and_not_the_process() {
    within_patience(|| {
        for blocking in [true, false] {
            let (lane, _) = lane();
            let err = finish(issue(&lane, -3.0, blocking).unwrap()).unwrap_err();
            assert_eq!(err.kind(), ErrorKind::Backend);
            assert!(err.message().contains("panicked"), "{err}");
            let later = issue(&lane, 1.0, blocking).unwrap_err();
            assert_eq!(later.kind(), ErrorKind::Broken);
        }
    });
}

#[test]
fn failing_the_lane_interrupts_what_runs_and_tells_it_the_reason() {
    within_patience(|| {
        let (lane, script) = lane();
        script.close_gate();
        let running = issue(&lane, 1.0, false).unwrap();
        let queued = issue(&lane, 2.0, false).unwrap();
        script.someone_waits();
        lane.fail(Error::new(ErrorKind::Aborted, "tired of it"));
        let err = finish(running).unwrap_err();
        assert_eq!(
            (err.kind(), err.message()),
            (ErrorKind::Aborted, "tired of it")
        );
        assert_eq!(finish(queued).unwrap_err().kind(), ErrorKind::Broken);
    });
}

#[test]
fn an_operation_that_takes_too_long_fails_at_its_own_timeout() {
    within_patience(|| {
        let (lane, script) = lane();
        script.close_gate();
        let options = CallOptions::default().with_timeout(Duration::from_millis(30));
        let work = lane.submit(call(1.0), &options).unwrap();
        let err = finish(work).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Timeout);
        assert!(err.place().elapsed.unwrap() >= Duration::from_millis(30));
        assert_eq!(lane.broken().unwrap().kind(), ErrorKind::Timeout);
    });
}

#[test]
fn closing_waits_for_what_is_issued_and_refuses_more() {
    let (lane, script) = lane();
    script.close_gate();
    let work = issue(&lane, 1.0, false).unwrap();
    let late = lane.close(Duration::from_millis(20)).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Timeout);
    assert_eq!(
        issue(&lane, 1.0, false).unwrap_err().kind(),
        ErrorKind::Closed
    );
    script.open_gate();
    lane.close(PATIENCE).unwrap();
    assert!(work.is_done());
    drop(lane);
    assert!(script.interrupts.lock().is_empty(), "an orderly end");
}

#[test]
fn dropping_the_lane_aborts_what_is_outstanding() {
    within_patience(|| {
        let (lane, script) = lane();
        script.close_gate();
        let running = issue(&lane, 1.0, false).unwrap();
        let queued = issue(&lane, 2.0, false).unwrap();
        script.someone_waits();
        drop(Arc::into_inner(lane).unwrap());
        assert_eq!(finish(running).unwrap_err().kind(), ErrorKind::Aborted);
        assert_eq!(finish(queued).unwrap_err().kind(), ErrorKind::Broken);
        assert_eq!(script.interrupts.lock().len(), 1);
    });
}

#[test]
fn the_memory_of_a_dropped_work_lives_until_the_operation_ends() {
    let (lane, script) = lane();
    script.close_gate();
    let frozen = Buffer::from_vec(vec![5.0f32]).freeze();
    let gather = Call::AllGather {
        input: frozen.clone(),
        output: Buffer::zeroed(DType::F32, 1),
    };
    drop(lane.submit(gather, &CallOptions::default()).unwrap());
    script.someone_waits();
    let mut frozen = frozen.try_thaw().expect_err("the operation still reads it");
    script.open_gate();
    lane.close(PATIENCE).unwrap();
    assert_eq!(script.ran.lock()[0].2, 5.0);
    let end = Instant::now() + PATIENCE;
    while let Err(shared) = frozen.try_thaw() {
        assert!(Instant::now() < end, "the memory is never let go");
        frozen = shared;
        thread::yield_now();
    }
}

/// Its first operation runs when told to and cannot be settled; the others are settled when they ran.
struct Unsettled(Mutex<Receiver<()>>);

impl Engine for Unsettled {
    fn run(&self, _: Call, turn: &Turn) -> Result<Done> {
        if turn.seq == 0 {
            self.0.lock().recv_timeout(PATIENCE).expect("told to run");
        }
        Ok(Done::default())
    }

    fn interrupt(&self, _: &Error) {}

    fn is_settled(&self, turn: &Turn) -> bool {
        turn.seq > 0
    }

    fn settle(&self, _: &Turn) -> Result<()> {
        Err(Error::new(ErrorKind::PeerLost, "rank 1 is gone").from_peer(1))
    }
}

#[test]
fn nothing_succeeds_after_what_failed() {
    let (go, told) = channel();
    let engine = Arc::new(Unsettled(Mutex::new(told)));
    let lane = Lane::new(Place::default(), PATIENCE, engine);
    let submit = |_| lane.submit(Call::Barrier, &CallOptions::default()).unwrap();
    let works: Vec<RawWork> = (0..3).map(submit).collect();
    go.send(()).unwrap();
    let end = |mut work: RawWork| work.block(PATIENCE).expect("it ends").unwrap_err();
    let kinds: Vec<ErrorKind> = works.into_iter().map(|work| end(work).kind()).collect();
    assert_eq!(
        kinds,
        [ErrorKind::PeerLost, ErrorKind::Broken, ErrorKind::Broken]
    );
}
