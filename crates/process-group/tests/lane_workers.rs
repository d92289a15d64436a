//! A lane that runs several operations at the same time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use phalanx_pg::{
    Buffer, Call, CallKind, CallOptions, DType, Done, Engine, Error, ErrorKind, Lane, Place,
    RawWork, ReduceOp, Result, Turn,
};

/// Long enough that only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(20);

/// Operations that need company: each ends when the other of its pair has begun.
#[derive(Default)]
struct Company {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    begun: Vec<u64>,
    running: Vec<u64>,
    most: usize,
    /// How many of those before it ran when a barrier began.
    before_barriers: Vec<usize>,
    interrupted: bool,
}

impl Engine for Company {
    fn run(&self, _: Call, turn: &Turn) -> Result<Done> {
        let end = Instant::now() + PATIENCE;
        let mut state = self.state.lock();
        state.begun.push(turn.seq);
        if turn.kind == CallKind::Barrier {
            let before = state.running.iter().filter(|&&seq| seq < turn.seq);
            let before = before.count();
            state.before_barriers.push(before);
            return Ok(Done::default());
        }
        state.running.push(turn.seq);
        state.most = state.most.max(state.running.len());
        self.changed.notify_all();
        let other_of_pair = turn.seq ^ 1;
        while !state.begun.contains(&other_of_pair) && !state.interrupted {
            if self.changed.wait_until(&mut state, end).timed_out() {
                return Err(Error::new(ErrorKind::Timeout, "nobody came"));
            }
        }
        state.running.retain(|&seq| seq != turn.seq);
        match state.interrupted {
            true => Err(Error::new(ErrorKind::Aborted, "interrupted")),
            false => Ok(Done::default()),
        }
    }

    fn interrupt(&self, _: &Error) {
        self.state.lock().interrupted = true;
        self.changed.notify_all();
    }
}

fn lane() -> (Lane, Arc<Company>) {
    let company = Arc::new(Company::default());
    let engine = Arc::clone(&company) as Arc<dyn Engine>;
    (
        Lane::with_workers(2, Place::default(), PATIENCE, engine),
        company,
    )
}

fn sum(lane: &Lane) -> RawWork {
    let buf = Buffer::zeroed(DType::F32, 1);
    let call = Call::AllReduce {
        buf,
        op: ReduceOp::Sum,
    };
    lane.submit(call, &CallOptions::default()).unwrap()
}

fn ended(mut work: RawWork) -> Result<Done> {
    work.block(PATIENCE).expect("it ends")
}

#[test]
fn two_operations_overlap_and_are_taken_in_order() {
    let (lane, company) = lane();
    let works: Vec<RawWork> = (0..20).map(|_| sum(&lane)).collect();
    works
        .into_iter()
        .for_each(|work| drop(ended(work).unwrap()));
    lane.close(PATIENCE).unwrap();
    let mut state = company.state.lock();
    // Taken in order; the two of a pair then race to be first.
    state.begun.chunks_mut(2).for_each(|pair| pair.sort());
    assert_eq!(state.begun, (0..20).collect::<Vec<u64>>());
    assert_eq!(state.most, 2);
}

#[test]
fn a_barrier_begins_when_all_before_it_have_ended() {
    let (lane, company) = lane();
    let mut works = Vec::new();
    for _ in 0..5 {
        works.extend([sum(&lane), sum(&lane)]);
        // Two, so that the numbers of sums stay in pairs.
        for _ in 0..2 {
            works.push(lane.submit(Call::Barrier, &CallOptions::default()).unwrap());
        }
    }
    works
        .into_iter()
        .for_each(|work| drop(ended(work).unwrap()));
    assert_eq!(company.state.lock().before_barriers, [0; 10]);
    lane.close(PATIENCE).unwrap();
}

#[test]
fn a_failure_ends_all_that_run() {
    let (lane, company) = lane();
    let [first, second, third] = [sum(&lane), sum(&lane), sum(&lane)];
    ended(first).unwrap();
    ended(second).unwrap();
    // The third waits for a fourth.
    let end = Instant::now() + PATIENCE;
    let mut state = company.state.lock();
    while !state.begun.contains(&2) {
        assert!(!company.changed.wait_until(&mut state, end).timed_out());
    }
    drop(state);
    lane.fail(Error::new(ErrorKind::Aborted, "enough"));
    let err = ended(third).unwrap_err();
    assert_eq!(err.message(), "enough", "{err:?}");
    assert!(lane.close(PATIENCE).is_err());
}
