use super::*;
use crate::hash::HashStore;

fn guest(rank: usize, world_size: usize) -> Guest {
    Guest {
        rank,
        world_size,
        attempt: 0,
        run_id: None,
        who: Identity::mine(),
        limit: Duration::from_secs(20),
        fresh_store: true,
        serves: false,
        shared: "MASTER_PORT and PHALANX_TOKEN",
    }
}

fn enter(store: &Arc<dyn Store>, guest: &Guest) -> Result<String> {
    meet(store, guest, Deadline::after(guest.limit)).map_err(|err| match err {
        NotMet::Elsewhere(err) | NotMet::Failed(err) => err,
    })
}

/// All guests at once, each on a thread; their results in the same order.
fn enter_all(store: &Arc<dyn Store>, guests: &[Guest]) -> Vec<Result<String>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = guests
            .iter()
            .map(|guest| scope.spawn(|| enter(store, guest)))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn new_store() -> Arc<dyn Store> {
    Arc::new(HashStore::new())
}

fn texts(results: Vec<Result<String>>) -> Vec<String> {
    let text = |result: Result<String>| result.unwrap_err().to_string();
    results.into_iter().map(text).collect()
}

#[test]
fn all_ranks_get_the_same_prefix() {
    let prefixes = enter_all(&new_store(), &[guest(0, 3), guest(1, 3), guest(2, 3)]);
    for prefix in prefixes {
        assert_eq!(prefix.unwrap(), "phalanx/attempt_0/round_0/world_3");
    }
}

#[test]
fn a_run_id_is_part_of_the_prefix() {
    let guest = Guest {
        run_id: Some("job 7".to_owned()),
        ..guest(0, 1)
    };
    let prefix = enter(&new_store(), &guest).unwrap();
    assert_eq!(prefix, "phalanx/run_job 7/attempt_0/round_0/world_1");
}

#[test]
fn an_attempt_reads_nothing_of_the_one_before() {
    let store = new_store();
    // Attempt 0 was left unfinished by rank 0, which is gone.
    let short = Guest {
        limit: Duration::from_millis(50),
        fresh_store: false,
        ..guest(0, 2)
    };
    enter(&store, &short).unwrap_err();
    for attempt in [1, 5] {
        let guests = [0, 1].map(|rank| Guest {
            attempt,
            fresh_store: false,
            ..guest(rank, 2)
        });
        for prefix in enter_all(&store, &guests) {
            let expected = format!("phalanx/attempt_{attempt}/round_0/world_2");
            assert_eq!(prefix.unwrap(), expected);
        }
    }
}

#[test]
fn hosts_that_count_attempts_differently_meet_in_the_newest() {
    let store = new_store();
    let old = [0, 1].map(|rank| Guest {
        fresh_store: false,
        ..guest(rank, 2)
    });
    for result in enter_all(&store, &old) {
        result.unwrap();
    }
    // Rank 0's host saw a failure and counts 1; rank 1's host restarted without counting.
    let counted = Guest {
        attempt: 1,
        fresh_store: false,
        ..guest(0, 2)
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| enter(&store, &counted));
        store.wait(&["phalanx/attempt_1/round_0/rank_0"]).unwrap();
        let prefix = enter(&store, &guest_again(1)).unwrap();
        assert_eq!(prefix, "phalanx/attempt_1/round_0/world_2");
        assert_eq!(first.join().unwrap().unwrap(), prefix);
    });
}

fn guest_again(rank: usize) -> Guest {
    Guest {
        fresh_store: false,
        ..guest(rank, 2)
    }
}

#[test]
fn those_who_wait_in_an_old_attempt_move_to_the_new_one() {
    let store = new_store();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| enter(&store, &guest_again(1)));
        store.wait(&["phalanx/attempt_0/round_0/rank_1"]).unwrap();
        let newer = Guest {
            attempt: 1,
            ..guest_again(0)
        };
        let prefix = enter(&store, &newer).unwrap();
        assert_eq!(prefix, "phalanx/attempt_1/round_0/world_2");
        assert_eq!(waiting.join().unwrap().unwrap(), prefix);
    });
}

#[test]
fn a_change_of_membership_is_a_new_round() {
    let store = new_store();
    for (round, world_size) in [2, 3, 2, 2].into_iter().enumerate() {
        let guests: Vec<Guest> = (0..world_size)
            .map(|rank| Guest {
                fresh_store: false,
                ..guest(rank, world_size)
            })
            .collect();
        for prefix in enter_all(&store, &guests) {
            let expected = format!("phalanx/attempt_0/round_{round}/world_{world_size}");
            assert_eq!(prefix.unwrap(), expected);
        }
    }
}

#[test]
fn a_missing_rank_is_named_to_all() {
    let store = new_store();
    let expected = "rank 3 did not join within 300 ms (joined: 0,1,2); is it started with the \
                    same MASTER_PORT and PHALANX_TOKEN?";
    std::thread::scope(|scope| {
        let patient = scope.spawn(|| enter_all(&store, &[guest(0, 4), guest(1, 4)]));
        let first = [0, 1].map(|rank| format!("phalanx/attempt_0/round_0/rank_{rank}"));
        store.wait(&[&first[0], &first[1]]).unwrap();
        let hasty = Guest {
            limit: Duration::from_millis(300),
            ..guest(2, 4)
        };
        let text = enter(&store, &hasty).unwrap_err().to_string();
        assert_eq!(text, expected);
        assert_eq!(texts(patient.join().unwrap()), [expected; 2]);
    });
    let late = enter(&store, &guest(3, 4)).unwrap_err().to_string();
    assert!(
        late.contains("gave up before rank 3") && late.contains(expected),
        "{late}"
    );
}

#[test]
fn several_missing_ranks_are_named_shortly() {
    let guest = Guest {
        limit: Duration::from_secs(1),
        ..guest(70, 200)
    };
    let text = enter(&new_store(), &guest).unwrap_err().to_string();
    let expected = "ranks 0-69,71-199 did not join within 1 s (joined: 70); are they started";
    assert!(text.starts_with(expected), "{text}");
    assert_eq!(ranks_text(&[]), "none");
    let odd: Vec<usize> = (0..1000).map(|n| 2 * n).collect();
    assert!(
        ranks_text(&odd).ends_with(",60,62,..."),
        "{}",
        ranks_text(&odd)
    );
}

#[test]
fn a_second_process_of_a_rank_fails_everyone_at_once() {
    let store = new_store();
    let guests = [guest(0, 3), guest(1, 3), guest(1, 3)];
    let started = std::time::Instant::now();
    for text in texts(enter_all(&store, &guests)) {
        let (_, text) = text.split_once("rank 1 was started twice: ").unwrap();
        let pid = format!("pid {} on host ", std::process::id());
        assert_eq!(text.matches(&pid).count(), 2, "{text}");
    }
    assert!(started.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_second_process_after_the_meeting_fails_alone() {
    let store = new_store();
    let elsewhere = |rank| Guest {
        who: Identity::from_wire(b"12 34 5 node9").unwrap(),
        ..guest(rank, 1)
    };
    enter(&store, &elsewhere(0)).unwrap();
    let text = enter(&store, &guest(0, 1)).unwrap_err().to_string();
    assert!(
        text.contains("rank 0 was started twice: pid 12 on host node9 and pid"),
        "{text}"
    );
    // On a store that may be older than the job, a process elsewhere may be one of an old round.
    let again = Guest {
        fresh_store: false,
        ..guest(0, 1)
    };
    enter(&store, &again).unwrap();
}

#[test]
fn a_process_may_meet_again_in_a_store_that_outlives_the_meeting() {
    let store = new_store();
    let lasting = Guest {
        fresh_store: false,
        ..guest(0, 1)
    };
    let first = enter(&store, &lasting).unwrap();
    assert_ne!(enter(&store, &lasting).unwrap(), first);
}

#[test]
fn the_store_of_the_meeting_before_is_not_the_place_of_the_next() {
    let store = new_store();
    let first = guest(0, 1);
    enter(&store, &first).unwrap();
    let again = guest(0, 1);
    let err = meet(&store, &again, Deadline::after(again.limit)).unwrap_err();
    let NotMet::Elsewhere(err) = err else {
        panic!("{err:?}");
    };
    let text = err.to_string();
    assert!(
        text.contains("still serves the store of the meeting before"),
        "{text}"
    );
}

#[test]
fn a_rank_too_many_is_told_that_the_others_have_met() {
    let store = new_store();
    enter(&store, &guest(0, 1)).unwrap();
    let text = enter(&store, &guest(1, 2)).unwrap_err().to_string();
    assert!(text.contains("have met already, without rank 1"), "{text}");
}

#[test]
fn left_over_keys_of_a_dead_process_are_called_that() {
    let store = new_store();
    let me = Identity::mine();
    let wire = me.to_wire();
    let host = wire.rsplit(' ').next().unwrap();
    let dead = format!("{} 1 0 {host}", std::process::id());
    store
        .set("phalanx/attempt_0/round_0/rank_0", dead.as_bytes())
        .unwrap();
    let text = enter(&store, &guest(0, 2)).unwrap_err().to_string();
    assert!(
        text.contains("the first is gone") && text.contains("fresh file"),
        "{text}"
    );
}

#[test]
fn ranks_that_disagree_about_the_world_size_learn_it_at_once() {
    let store = new_store();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| enter(&store, &guest(0, 2)));
        store.wait(&["phalanx/attempt_0/round_0/rank_0"]).unwrap();
        let second = enter(&store, &guest(1, 3)).unwrap_err().to_string();
        let first = first.join().unwrap().unwrap_err().to_string();
        assert_eq!(first, second);
        let pid = std::process::id();
        assert!(
            first.contains(&format!("rank 0 (pid {pid} on host ")),
            "{first}"
        );
        assert!(first.contains("has 2, rank 1 (pid"), "{first}");
        assert!(
            first.contains("has 3; start all with the same WORLD_SIZE"),
            "{first}"
        );
    });
}

#[test]
fn keys_of_another_program_are_not_believed() {
    let store = new_store();
    store.set("phalanx/attempt", b"soon").unwrap();
    let text = enter(&store, &guest(0, 1)).unwrap_err().to_string();
    assert!(
        text.contains("\"phalanx/attempt\" holds \"soon\""),
        "{text}"
    );
    let store = new_store();
    store
        .set("phalanx/attempt_0/round_0/verdict", b"yes")
        .unwrap();
    let text = enter(&store, &guest(0, 1)).unwrap_err().to_string();
    assert!(text.contains("another program"), "{text}");
}
