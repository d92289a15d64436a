//! Wrappers around a real group, several ranks, one on top of the other.

mod common;

use std::path::Path;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use common::{Group, assert_usable, floats, ranks};
use phalanx_pg::{
    Buffer, CallKind, CallOptions, Checked, ErrorKind, Fault, FaultPlan, Faulty, ProcessGroup,
    ProcessGroupExt, Recorded, Recorder, RecorderOptions, ReduceOp, Trace, TraceState,
};

const SHORT: Duration = Duration::from_millis(300);

fn recorder(dump_dir: Option<&Path>) -> Arc<Recorder> {
    Arc::new(Recorder::new(RecorderOptions {
        dump_dir: dump_dir.map(Path::to_owned),
        ..RecorderOptions::default()
    }))
}

fn read(dir: &Path, rank: usize) -> Trace {
    let text = std::fs::read_to_string(dir.join(format!("rank_{rank}.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn all_wrappers_together_change_no_result() {
    ranks(3, |rank, group| {
        let jitter = FaultPlan::new().jitter(rank as u64, Duration::from_millis(3));
        let recorder = recorder(None);
        let group: Group = Faulty::new(group, jitter);
        let group: Group = Checked::new(group).unwrap();
        let group: Group = Recorded::new(group, &recorder);
        for _ in 0..10 {
            assert_usable(&*group);
        }
        let objects = group.allgather_object(&format!("rank {rank}")).unwrap();
        assert_eq!(objects, ["rank 0", "rank 1", "rank 2"]);
        group.monitored_barrier(Duration::from_secs(30)).unwrap();
        let part = group.new_group(&[0, 2], "ends").unwrap();
        if let Some(part) = part {
            assert_usable(&*part);
            part.shutdown().unwrap();
        }
        group.shutdown().unwrap();
        let trace = recorder.trace();
        let states: Vec<_> = trace.entries.iter().map(|entry| entry.state).collect();
        assert!(
            states.iter().all(|&state| state == TraceState::Completed),
            "{states:?}"
        );
        assert_eq!(trace.pg_config.len(), if rank == 1 { 1 } else { 2 });
    });
}

#[test]
fn a_lost_call_breaks_all_ranks_and_each_writes_its_recording() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    ranks(2, move |rank, group| {
        let plan = match rank {
            1 => FaultPlan::new().at_kind(CallKind::AllReduce, 1, Fault::Drop),
            _ => FaultPlan::new(),
        };
        let group: Group = Faulty::new(group, plan);
        let group = Recorded::new(group, &recorder(Some(&path)));
        assert_usable(&*group);
        let hasty = group.with(CallOptions::default().with_timeout(SHORT));
        let start = Instant::now();
        let work = hasty.allreduce(floats(1), ReduceOp::Sum).unwrap();
        let err = work.wait().unwrap_err();
        assert!(start.elapsed() >= SHORT / 2);
        assert!(!err.leaves_group_usable(), "{err}");
        // Both have failed before either leaves.
        thread::sleep(SHORT);
    });
    for rank in 0..2 {
        let trace = read(dir.path(), rank);
        assert_eq!((trace.rank, trace.world_size), (rank, 2));
        let states: Vec<_> = trace.entries.iter().map(|entry| entry.state).collect();
        assert_eq!(states, [TraceState::Completed, TraceState::Failed]);
        let status = &trace.pg_status[&0];
        assert_eq!(status.last_enqueued_collective, 1);
        assert_eq!(status.last_completed_collective, 0);
    }
}

#[test]
fn an_injected_failure_reaches_the_others() {
    for fault in [Fault::Fail(ErrorKind::PeerLost), Fault::Abort] {
        let all_done = Arc::new(Barrier::new(3));
        ranks(3, move |rank, group| {
            let plan = match rank {
                2 => FaultPlan::new().at(1, fault),
                _ => FaultPlan::new(),
            };
            let group = Faulty::new(group, plan);
            assert_usable(&*group);
            all_done.wait();
            let work = group.allreduce(floats(1), ReduceOp::Sum);
            let err = work.and_then(|work| work.wait()).unwrap_err();
            assert!(err.to_string().contains("injected fault"), "{err}");
            // Nobody leaves before all have been told.
            thread::sleep(SHORT);
        });
    }
}

#[test]
fn a_slow_rank_is_waited_for() {
    let start = Instant::now();
    ranks(2, move |rank, group| {
        let plan = match rank {
            1 => FaultPlan::new().at(0, Fault::DelaySubmit(SHORT)),
            _ => FaultPlan::new(),
        };
        let group = Faulty::new(group, plan);
        let buf = Buffer::from_vec(vec![rank as f32]);
        let sum = group.allreduce(buf, ReduceOp::Sum).unwrap().wait().unwrap();
        assert_eq!(sum.as_slice::<f32>().unwrap(), [1.0]);
        assert!(start.elapsed() >= SHORT);
        group.shutdown().unwrap();
    });
}

#[test]
fn a_check_names_the_rank_whose_call_never_came() {
    ranks(2, |rank, group| {
        let recorder = recorder(None);
        let checked = Checked::new(group).unwrap();
        let group = Recorded::new(checked, &recorder);
        if rank == 1 {
            thread::sleep(SHORT * 3);
            return;
        }
        let hasty = group.with(CallOptions::default().with_timeout(SHORT));
        assert!(hasty.barrier_async().is_err());
        let error = recorder.trace().entries[0].error.clone().unwrap();
        assert!(error.contains("rank 1 (it has called nothing"), "{error}");
    });
}
