//! Groups split from groups, and groups side by side.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{FORMS, Form, Group, all, first_kind, on_each, options};
use phalanx_pg::{ErrorKind, ProcessGroupExt, ReduceOp};
use phalanx_reference::{Options, ReferenceGroup};
use phalanx_store::{HashStore, JobToken, Store, TcpStore, TcpStoreOptions, TcpStoreServer};

fn ranks_summed(group: &Group, own: usize) -> i64 {
    let mut sum = [own as i64];
    group.allreduce_in_place(&mut sum, ReduceOp::Sum).unwrap();
    sum[0]
}

#[test]
fn disjoint_splits_form_at_the_same_time_under_one_name() {
    for form in FORMS {
        form.run(5, |group| {
            let rank = group.rank();
            let ranks: &[usize] = if rank.is_multiple_of(2) {
                &[4, 0, 2]
            } else {
                &[1, 3]
            };
            let half = group.split(ranks, "half").unwrap().unwrap();
            assert_eq!(half.global_ranks(), ranks);
            assert_eq!(half.name(), "world/half");
            assert_eq!(ranks[half.rank()], rank);
            assert_eq!(
                ranks_summed(&half, rank),
                if rank.is_multiple_of(2) { 6 } else { 4 }
            );
            assert_eq!((half.sequence(), group.sequence()), (1, 0));
            let pair = half.split(&[1, 0], "pair").unwrap();
            if let Some(pair) = pair {
                let expected = [ranks[1], ranks[0]];
                assert_eq!(pair.global_ranks(), expected);
                assert_eq!(ranks_summed(&pair, rank), (ranks[0] + ranks[1]) as i64);
                pair.shutdown().unwrap();
            }
            half.shutdown().unwrap();
            assert_eq!(ranks_summed(group, rank), 10);
        });
    }
}

#[test]
fn a_name_serves_one_split() {
    for form in FORMS {
        form.run(2, |group| {
            let first = group.split(&[0, 1], "twin").unwrap().unwrap();
            let err = group.split(&[0, 1], "twin").unwrap_err();
            assert_eq!(err.kind(), ErrorKind::Invalid);
            assert!(group.split(&[0, 0], "double").is_err());
            assert!(group.split(&[2], "outside").is_err());
            let other = 1 - group.rank();
            assert!(group.split(&[other], "other").unwrap().is_none());
            first.shutdown().unwrap();
        });
    }
}

#[test]
fn groups_side_by_side_do_not_wait_for_each_other() {
    for form in FORMS {
        form.run(2, |group| {
            let other = group.split(&[0, 1], "other").unwrap().unwrap();
            let start = |group: &Group| {
                let buf = phalanx_pg::Buffer::from_vec(vec![1i32]);
                group.allreduce(buf, ReduceOp::Sum).unwrap()
            };
            // Issued in different orders, which one group could not bear.
            let works = match group.rank() {
                0 => [start(group), start(&other)],
                _ => {
                    let second = start(&other);
                    [start(group), second]
                }
            };
            for work in works {
                assert_eq!(work.wait().unwrap().as_slice::<i32>().unwrap(), [2]);
            }
            other.shutdown().unwrap();
        });
    }
}

#[test]
fn the_end_of_a_split_is_not_the_end_of_the_whole() {
    for form in FORMS {
        form.run(3, |group| {
            if let Some(part) = group.split(&[0, 1], "part").unwrap() {
                part.abort("enough");
                assert!(part.barrier().is_err());
            }
            group.barrier().unwrap();
        });
    }
}

#[test]
fn a_split_whose_members_do_not_come_ends_with_its_parent() {
    let results = on_each(Form::Tcp.groups(2), |group| match group.rank() {
        0 => {
            let err = group.split(&[0, 1], "alone").map(drop).unwrap_err();
            Some(err)
        }
        _ => {
            std::thread::sleep(Duration::from_millis(100));
            group.abort("no split for me");
            None
        }
    });
    let err = results[0].as_ref().unwrap();
    assert_eq!(first_kind(err), ErrorKind::Aborted, "{err}");
    assert_eq!(err.place().action, Some("split"), "{err}");
    assert!(err.place().elapsed.is_some(), "{err}");
}

#[test]
fn a_rank_that_does_not_join_is_named() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let connect = |rank| {
        let store = Arc::clone(&store);
        move || ReferenceGroup::connect(store, rank, 3, &options(500)).map(drop)
    };
    let results = all(Duration::from_secs(30), [0, 1].map(connect));
    for result in results {
        let err = result.unwrap_err();
        assert_eq!(
            (err.kind(), err.peer()),
            (ErrorKind::Timeout, Some(2)),
            "{err}"
        );
    }
}

#[test]
fn a_rank_cannot_join_twice() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let connect = |_| {
        let store = Arc::clone(&store);
        move || ReferenceGroup::connect(store, 0, 2, &options(500)).map(drop)
    };
    let results = all(Duration::from_secs(30), [0, 1].map(connect));
    let kinds: Vec<ErrorKind> = results
        .iter()
        .map(|r| r.as_ref().unwrap_err().kind())
        .collect();
    assert!(kinds.contains(&ErrorKind::Invalid), "{kinds:?}");
}

#[test]
fn a_group_forms_through_a_tcp_store_with_a_job_token() {
    let token = JobToken::new("secret").unwrap();
    let server =
        TcpStoreServer::start(&["127.0.0.1:0".parse().unwrap()], Some(token.clone())).unwrap();
    let port = server.local_addr().port();
    let connect = |rank| {
        let token = token.clone();
        move || {
            let mut to_store = TcpStoreOptions::new("127.0.0.1", port);
            to_store.token = Some(token.clone());
            let store = TcpStore::connect(&to_store).unwrap();
            let options = Options {
                token: Some(token),
                ..Options::beside(&store).unwrap()
            };
            let group = ReferenceGroup::connect(Arc::new(store), rank, 3, &options).unwrap();
            let pair = group.split(&[2, 0], "pair").unwrap();
            if let Some(pair) = pair {
                assert_eq!(ranks_summed(&pair, rank), 2);
                pair.shutdown().unwrap();
            }
            assert_eq!(ranks_summed(&group, rank), 3);
            group.shutdown().unwrap();
        }
    };
    all(Duration::from_secs(30), [0, 1, 2].map(connect));
}

#[test]
fn ranks_with_different_tokens_do_not_connect() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let connect = |rank| {
        let store = Arc::clone(&store);
        let options = Options {
            token: Some(JobToken::new(format!("token {rank}")).unwrap()),
            ..options(1000)
        };
        move || ReferenceGroup::connect(store, rank, 2, &options).map(drop)
    };
    let results = all(Duration::from_secs(30), [0, 1].map(connect));
    assert!(results[0].is_err());
    let err = results[1].as_ref().unwrap_err();
    assert!(err.to_string().contains("job token"), "{err}");
}

#[test]
fn nothing_is_left_in_the_store() {
    let store = Arc::new(HashStore::new());
    let connect = |rank| {
        let store = Arc::clone(&store);
        move || {
            let group = ReferenceGroup::connect(store, rank, 3, &Options::default()).unwrap();
            group.shutdown().unwrap();
        }
    };
    all(Duration::from_secs(30), [0, 1, 2].map(connect));
    assert_eq!(store.list_keys().unwrap(), Vec::<String>::new());
}
