//! Errors of what is built on calls: where they happened, and that nothing was sent.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::ranks;
use phalanx_pg::{
    Buffer, Call, CallKind, CallOptions, Checked, DType, Error, ErrorKind, ProcessGroup,
    ProcessGroupExt, Recorded, Recorder, RecorderOptions, Sparse,
};

fn assert_placed(err: &Error) {
    let place = err.place();
    assert!(place.rank.is_some() && place.group.is_some(), "{err:?}");
    assert!(place.call.is_some() || place.action.is_some(), "{err:?}");
}

#[test]
fn wrong_arguments_say_where_and_send_nothing() {
    ranks(2, |_, group| {
        let one = || Buffer::zeroed(DType::U8, 1);
        let reserved = 1 << 31;
        let send = Call::Send {
            data: one().freeze(),
            peer: 0,
            tag: reserved,
        };
        let errors = [
            group.recv_any(one(), reserved).map(drop).unwrap_err(),
            group.batch_p2p(vec![send]).map(drop).unwrap_err(),
            group.batch_p2p(vec![Call::Barrier]).map(drop).unwrap_err(),
            group.gather_object(&1, 99).unwrap_err(),
            group.broadcast_object::<u8>(None, 99).unwrap_err(),
        ];
        for err in &errors {
            assert_eq!(err.kind(), ErrorKind::Invalid, "{err:?}");
            assert_placed(err);
        }
        assert_eq!(group.sequence(), 0);
        group.shutdown().unwrap();
    });
}

#[test]
fn a_message_has_one_number_in_its_error_and_in_the_trace() {
    ranks(2, |rank, group| {
        let word = || Buffer::zeroed(DType::U8, 1);
        if rank == 1 {
            group.send(word().freeze(), 0, 3).unwrap().wait().unwrap();
            // Not there for the second, but alive.
            std::thread::sleep(Duration::from_millis(800));
            return;
        }
        group.recv(word(), 1, 3).unwrap().wait().unwrap();
        // Later than the first message: the numbers are the group's and not the recorder's.
        let recorder = Arc::new(Recorder::new(RecorderOptions::default()));
        let recorded = Recorded::new(group, &recorder);
        let hasty = recorded.with(CallOptions::default().with_timeout(Duration::from_millis(50)));
        let receive = Call::Recv {
            buf: word(),
            peer: Some(1),
            tag: 3,
        };
        let err = hasty.batch_p2p(vec![receive]).unwrap().wait().unwrap_err();
        let place = err.place();
        assert_eq!(place.call, Some(CallKind::Recv), "{err}");
        assert_eq!((place.seq, place.peer), (Some(1), Some(1)), "{err}");
        assert!(place.elapsed.is_some(), "{err}");
        let entry = recorder.trace().entries.pop().unwrap();
        assert_eq!((entry.is_p2p, entry.p2p_seq_id), (true, 1));
    });
}

#[test]
fn a_monitored_barrier_outlasts_the_timeout_of_calls_and_names_all_who_are_missing() {
    ranks(4, |rank, group| {
        let hasty = group.with(CallOptions::default().with_timeout(Duration::from_millis(50)));
        if rank == 1 || rank == 2 {
            // Not there, but alive.
            std::thread::sleep(Duration::from_millis(1500));
            return;
        }
        let err = hasty
            .monitored_barrier(Duration::from_millis(400))
            .unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Timeout, "{err:?}");
        if rank == 0 {
            assert!(
                err.to_string().contains("did not arrive in time: 1, 2"),
                "{err}"
            );
        }
        std::thread::sleep(Duration::from_millis(1500));
    });
}

#[test]
fn rows_without_elements_keep_their_indices() {
    ranks(2, |rank, group| {
        let input = Sparse {
            indices: vec![rank as i64, 7],
            dims: 1,
            values: Buffer::zeroed(DType::F32, 0),
        };
        let sum = group.allreduce_sparse(input).unwrap();
        assert_eq!(sum.indices, [0, 1, 7]);
        group.shutdown().unwrap();
    });
}

#[test]
fn a_checked_group_leaves_all_names_to_its_user() {
    ranks(2, |_, group| {
        let checked = Checked::new(group).unwrap();
        let part = checked.new_group(&[0, 1], "checked").unwrap();
        part.unwrap().shutdown().unwrap();
        checked.shutdown().unwrap();
    });
}
