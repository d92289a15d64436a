//! Faults on purpose, on a group that has no peers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_pg::{
    Buffer, CallKind, CallOptions, ErrorKind, FakeGroup, Fault, FaultPlan, Faulty, ProcessGroup,
    ProcessGroupExt, ReduceOp, Result, State, Work,
};

const PATIENCE: Duration = Duration::from_secs(20);

fn group(plan: FaultPlan) -> Arc<Faulty> {
    Faulty::new(Arc::new(FakeGroup::new(0, 2)), plan)
}

fn allreduce(group: &dyn ProcessGroup) -> Result<Work<Buffer>> {
    group.allreduce(Buffer::from_vec(vec![1.0f32]), ReduceOp::Sum)
}

fn finish<T>(mut work: Work<T>) -> Result<T> {
    work.wait_for(PATIENCE)
        .map(|result| result.expect("never ended"))
}

#[test]
fn without_faults_nothing_changes() {
    let group = group(FaultPlan::new());
    let work = allreduce(&*group).unwrap();
    assert!(work.is_done());
    assert_eq!(finish(work).unwrap().as_slice::<f32>().unwrap(), [1.0]);
    assert_eq!(group.sequence(), 1);
}

#[test]
fn a_late_submission_holds_up_the_caller() {
    let delay = Duration::from_millis(30);
    let group = group(FaultPlan::new().at(1, Fault::DelaySubmit(delay)));
    finish(allreduce(&*group).unwrap()).unwrap();
    let start = Instant::now();
    let work = allreduce(&*group).unwrap();
    assert!(start.elapsed() >= delay);
    assert!(work.is_done());
}

#[test]
fn a_late_completion_does_not_hold_up_the_caller() {
    let delay = Duration::from_millis(200);
    let group = group(FaultPlan::new().at(0, Fault::DelayCompletion(delay)));
    let start = Instant::now();
    let work = allreduce(&*group).unwrap();
    assert!(!work.is_done());
    assert!(matches!(work.status().state(), State::Started));
    assert!(allreduce(&*group).unwrap().is_done(), "only the first");
    assert_eq!(finish(work).unwrap().as_slice::<f32>().unwrap(), [1.0]);
    assert!(start.elapsed() >= delay);
}

#[test]
fn a_lost_collective_times_out_and_takes_the_later_ones_with_it() {
    let group = group(FaultPlan::new().at_kind(CallKind::AllReduce, 0, Fault::Drop));
    let limit = Duration::from_millis(50);
    let start = Instant::now();
    let hasty = group.with(CallOptions::default().with_timeout(limit));
    let lost = allreduce(&hasty).unwrap();
    let behind = allreduce(&*group).unwrap();
    let message = Buffer::from_vec(vec![1u8]).freeze();
    let message = group.send(message, 1, 0).unwrap();
    assert!(message.is_done(), "messages do not wait behind it");
    assert!(!lost.is_done() && !behind.is_done());
    assert_eq!(group.sequence(), 2);
    let err = finish(lost).unwrap_err();
    assert!(start.elapsed() >= limit);
    assert_eq!(
        (err.kind(), err.place().seq, err.place().rank),
        (ErrorKind::Timeout, Some(0), Some(0))
    );
    let err = finish(behind).unwrap_err();
    assert_eq!(err.kind(), ErrorKind::Broken);
    assert_eq!(err.cause().unwrap().kind(), ErrorKind::Timeout);
    assert_eq!(allreduce(&*group).unwrap_err().kind(), ErrorKind::Broken);
    assert_eq!(group.shutdown().unwrap_err().kind(), ErrorKind::Broken);
}

#[test]
fn a_lost_message_does_not_stop_collectives() {
    let group = group(FaultPlan::new().at_kind(CallKind::Send, 1, Fault::Drop));
    let send = || group.send(Buffer::from_vec(vec![1u8]).freeze(), 1, 0);
    assert!(send().unwrap().is_done());
    let lost = send().unwrap();
    assert_eq!(group.p2p_sequence(), 2, "what is lost has a number");
    assert!(allreduce(&*group).unwrap().is_done());
    assert!(!lost.is_done());
    group.abort("over");
    let err = finish(lost).unwrap_err();
    assert_eq!(err.cause().unwrap().message(), "over");
    let place = err.place();
    assert_eq!((place.call, place.seq), (Some(CallKind::Send), Some(1)));
    assert_eq!(send().unwrap_err().place().seq, Some(2));
}

#[test]
fn a_lost_call_ends_with_the_group() {
    let group = group(FaultPlan::new().at(0, Fault::Drop));
    let lost = allreduce(&*group).unwrap();
    drop(group);
    assert_eq!(finish(lost).unwrap_err().kind(), ErrorKind::Broken);
}

#[test]
fn a_failure_breaks_the_group_if_its_kind_does() {
    let lost_peer = Fault::Fail(ErrorKind::PeerLost);
    let full = Fault::Fail(ErrorKind::QueueFull);
    let plan = FaultPlan::new()
        .at(1, full)
        .at_kind(CallKind::AllReduce, 3, lost_peer);
    let group = group(plan);
    let kinds: Vec<_> = (0..5)
        .map(|_| allreduce(&*group).map_err(|err| err.kind()).err())
        .collect();
    use ErrorKind::*;
    assert_eq!(
        kinds,
        [None, Some(QueueFull), None, Some(PeerLost), Some(Broken)]
    );
    let err = allreduce(&*group).unwrap_err();
    assert_eq!(err.cause().unwrap().kind(), PeerLost);
}

#[test]
fn an_abort_breaks_the_group() {
    let group = group(FaultPlan::new().at(0, Fault::Abort));
    assert_eq!(allreduce(&*group).unwrap_err().kind(), ErrorKind::Aborted);
    assert_eq!(allreduce(&*group).unwrap_err().kind(), ErrorKind::Broken);
}

#[test]
fn jitter_delays_and_loses_nothing() {
    let group = group(FaultPlan::new().jitter(1, Duration::from_millis(3)));
    let works: Vec<_> = (0..20).map(|_| allreduce(&*group).unwrap()).collect();
    for work in works {
        assert_eq!(finish(work).unwrap().as_slice::<f32>().unwrap(), [1.0]);
    }
}

#[test]
fn splits_are_free_of_faults() {
    let group = group(FaultPlan::new().at(0, Fault::Abort).at(1, Fault::Abort));
    let part = group.split(&[0], "alone").unwrap().unwrap();
    assert!(allreduce(&*part).is_ok());
    assert_eq!(part.backend(), "fake");
}
