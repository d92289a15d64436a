//! What goes wrong without a fault of the libraries': a rank that does not come, or has had enough.

use std::time::Duration;

use phalanx_nccl::Options;
use phalanx_pg::{CallOptions, Error, ErrorKind, ProcessGroup, ProcessGroupExt, ReduceOp, State};
use phalanx_testkit::Rank;

use super::{Group, connect_with, download, try_download, upload};

/// Long for an operation, short for a test.
pub(crate) const LIMIT: Duration = Duration::from_millis(700);

/// Longer than any error may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn connect(rank: &Rank, name: &str) -> Group {
    connect_with(rank, &Options::default(), name, Duration::from_secs(60))
}

pub(crate) fn sum(group: &dyn ProcessGroup, limit: Duration) -> Result<Vec<f32>, Error> {
    let options = CallOptions::default().with_timeout(limit);
    let mine = upload(group, &[1.0f32; 100]);
    let work = group.with(options).allreduce(mine, ReduceOp::Sum)?;
    let sum = work.synchronize()?;
    Ok(download(group, &sum))
}

/// The process goes on: another group of the same ranks works.
pub(crate) fn goes_on(rank: &Rank) {
    let group = connect(rank, "again");
    assert_eq!(
        sum(&*group, PATIENCE).expect("a new group works"),
        [2.0; 100]
    );
    group.shutdown().expect("an orderly end");
    let closed = sum(&*group, PATIENCE).expect_err("it has ended");
    assert_eq!(closed.kind(), ErrorKind::Closed, "{closed}");
    // After the sum and the barrier of the end.
    assert_eq!(closed.place().seq, Some(2), "{closed}");
}

/// One rank aborts; what the others do ends at once, with its reason.
pub(crate) fn abort(rank: &Rank) {
    let group = connect(rank, "world");
    assert_eq!(sum(&*group, PATIENCE).expect("it works"), [2.0; 100]);
    if rank.rank() == 0 {
        group.abort("rank 0 has had enough");
    }
    let err = sum(&*group, PATIENCE).expect_err("aborted");
    assert!(err.to_string().contains("rank 0 has had enough"), "{err}");
    drop(group);
    goes_on(rank);
}

/// A rank that never comes is a timeout of the first operation.
pub(crate) fn never_comes(rank: &Rank) {
    let group = connect(rank, "world");
    if rank.rank() == 0 {
        let err = sum(&*group, LIMIT).expect_err("nobody comes");
        assert_eq!(err.kind(), ErrorKind::Timeout, "{err:?}");
        assert_eq!(err.place().seq, Some(0), "{err}");
        rank.store().set("seen", b"").expect("the store");
    }
    rank.store().wait(&["seen"]).expect("rank 0 has seen it");
}

/// A rank that does not come to the second operation: what `wait` has handed over to the other one
/// does not reach the host.
pub(crate) fn stays_away(rank: &Rank) {
    let group = connect(rank, "world");
    assert_eq!(sum(&*group, PATIENCE).expect("the first works"), [2.0; 100]);
    if rank.rank() == 0 {
        let earlier = upload(&*group, &[7i64]);
        let options = CallOptions::default().with_timeout(LIMIT);
        let mine = upload(&*group, &[1.0f32; 100]);
        let work = group.with(options).allreduce(mine, ReduceOp::Sum);
        let work = work.expect("issued");
        let status = work.status();
        let handed_over = work.wait().expect("ordered, not waited for");
        let err = try_download::<f32>(&*group, &handed_over).expect_err("it has failed");
        assert_eq!(err.kind(), ErrorKind::Broken, "{err}");
        assert_eq!(err.place().rank, Some(0), "{err}");
        assert!(err.to_string().contains("allreduce #1"), "{err}");
        assert!(matches!(status.state(), State::Failed(_)), "{status:?}");
        rank.store().set("seen", b"").expect("the store");
        // What was there before is still there, for a group that works.
        let reader = connect_alone(rank);
        assert_eq!(download::<i64>(&*reader, &earlier), [7]);
    }
    rank.store().wait(&["seen"]).expect("rank 0 has seen it");
    drop(group);
    goes_on(rank);
}

/// A group of this rank alone, on the same device.
fn connect_alone(rank: &Rank) -> Group {
    let mut init = phalanx_pg::registry::GroupInit::new(rank.store(), 0, 1);
    init.name = format!("rank {}", rank.rank());
    let mut options = Options::default();
    options.device = Some(rank.rank() as u32);
    phalanx_nccl::NcclGroup::connect_with(&init, &options).expect("a group")
}
