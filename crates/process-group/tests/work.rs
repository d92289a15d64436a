//! Operations in progress: waiting, polling, mapping, detaching, losing them.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use phalanx_pg::{
    Buffer, Completer, Done, Error, ErrorKind, RawWork, Result, State, Times, Work, completion,
};

const PATIENCE: Duration = Duration::from_secs(20);

fn answer(value: i32) -> Done {
    Buffer::from_vec(vec![value]).into()
}

fn number(done: Done) -> Result<i32> {
    Ok(done.buffer.expect("has a buffer").as_slice::<i32>()?[0])
}

fn pending() -> (Completer, Work<i32>) {
    let (completer, raw) = completion();
    (completer, Work::new(raw, number))
}

struct Unpark(Thread, AtomicUsize);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0.unpark();
    }
}

/// The smallest executor: polls when woken, and gives up rather than hang.
fn block_on<F: Future>(future: F) -> F::Output {
    let wakes = Arc::new(Unpark(thread::current(), AtomicUsize::new(0)));
    let waker = Waker::from(Arc::clone(&wakes));
    let mut future = pin!(future);
    let end = Instant::now() + PATIENCE;
    let mut polls = 0;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        polls += 1;
        while wakes.1.load(Ordering::SeqCst) < polls {
            assert!(Instant::now() < end, "never woken");
            thread::park_timeout(Duration::from_millis(100));
        }
    }
}

#[test]
fn waiting_blocks_until_another_thread_completes() {
    let (completer, work) = pending();
    let other = thread::spawn(move || {
        thread::sleep(Duration::from_millis(10));
        completer.start();
        completer.complete(Ok(answer(7)));
    });
    assert_eq!(work.wait().unwrap(), 7);
    other.join().unwrap();
}

#[test]
fn running_out_of_patience_fails_nothing() {
    let (completer, mut work) = pending();
    let limit = Duration::from_millis(15);
    let start = Instant::now();
    assert!(work.wait_for(limit).unwrap().is_none());
    assert!(start.elapsed() >= limit);
    assert!(work.wait_for(Duration::ZERO).unwrap().is_none());
    assert!(!work.is_done());
    completer.complete(Ok(answer(3)));
    assert!(work.is_done());
    assert_eq!(work.wait_for(Duration::ZERO).unwrap(), Some(3));
}

#[test]
#[should_panic(expected = "handed out")]
fn a_result_is_handed_out_once() {
    let (completer, mut work) = pending();
    completer.complete(Ok(answer(3)));
    work.wait_for(Duration::ZERO).unwrap();
    let _ = work.wait_for(Duration::ZERO);
}

#[test]
fn map_runs_in_the_waiting_thread_and_only_on_success() {
    let waiter = thread::current().id();
    let (completer, work) = pending();
    let work = work
        .map(move |n| (n + 1, thread::current().id() == waiter))
        .map(|(n, here)| (n * 2, here));
    thread::spawn(move || completer.complete(Ok(answer(1))));
    assert_eq!(work.wait().unwrap(), (4, true));

    let (completer, work) = pending();
    let work = work.map(|_| panic!("there is no value to map"));
    completer.complete(Err(Error::new(ErrorKind::PeerLost, "gone")));
    assert_eq!(work.wait().unwrap_err().kind(), ErrorKind::PeerLost);
}

#[test]
fn a_work_is_a_future_that_wakes_its_task() {
    let (completer, work) = pending();
    let other = thread::spawn(move || {
        thread::sleep(Duration::from_millis(10));
        completer.complete(Ok(answer(9)));
    });
    assert_eq!(block_on(work).unwrap(), 9);
    other.join().unwrap();
    let ready = RawWork::ready(Ok(answer(2)), Times::now());
    assert_eq!(block_on(Work::new(ready, number)).unwrap(), 2);
}

#[test]
fn the_newest_task_is_the_one_that_is_woken() {
    let (completer, mut work) = pending();
    let wakes = || Arc::new(Unpark(thread::current(), AtomicUsize::new(0)));
    let (old, new) = (wakes(), wakes());
    for task in [&old, &new] {
        let waker = Waker::from(Arc::clone(task));
        let polled = pin!(&mut work).poll(&mut Context::from_waker(&waker));
        assert!(polled.is_pending());
    }
    completer.complete(Ok(answer(1)));
    assert_eq!(new.1.load(Ordering::SeqCst), 1);
    assert_eq!(old.1.load(Ordering::SeqCst), 0);
}

#[test]
fn an_operation_that_the_backend_loses_is_an_error() {
    let (completer, work) = pending();
    let status = work.status();
    drop(completer);
    let err = work.wait().unwrap_err();
    assert_eq!(err.kind(), ErrorKind::Backend);
    assert!(matches!(status.state(), State::Failed(_)));
}

#[test]
fn a_panic_in_the_completing_thread_is_an_error_of_the_work() {
    let (completer, work) = pending();
    let other = thread::spawn(move || {
        let _owned = completer;
        panic!("scripted panic");
    });
    assert!(other.join().is_err());
    assert_eq!(work.wait().unwrap_err().kind(), ErrorKind::Backend);
}

#[test]
fn dropping_a_work_detaches_it_and_its_status_goes_on() {
    let (completer, work) = pending();
    let status = work.status();
    drop(work);
    assert!(matches!(status.state(), State::Enqueued));
    completer.start();
    completer.arrived(1);
    assert!(matches!(status.state(), State::Started));
    completer.complete(Ok(answer(1)));
    assert!(matches!(status.state(), State::Succeeded));
    let times = status.times();
    assert!(times.started >= Some(times.enqueued) && times.done >= times.started);
    assert_eq!(times.arrivals[0].0, 1);
}

#[test]
fn a_failure_stays_visible_after_its_error_was_handed_out() {
    let failed = || Err(Error::new(ErrorKind::Timeout, "late"));
    let mut ready = RawWork::ready(failed(), Times::now());
    let (completer, mut host) = completion();
    completer.complete(failed());
    for work in [&mut ready, &mut host] {
        assert!(work.block(Duration::ZERO).unwrap().is_err());
        let state = work.status().state();
        assert!(matches!(state, State::Failed(_)), "{state:?}");
        assert!(work.status().times().done.is_some());
    }
}

#[test]
fn synchronize_takes_the_result_too() {
    let (completer, work) = pending();
    completer.complete(Ok(answer(5)));
    assert_eq!(work.synchronize().unwrap(), 5);
}
