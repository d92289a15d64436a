//! Barriers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use phalanx_store::Store;

use super::{MOMENT, Other, Outcome, assert_timeout, case_list, second};

case_list![
    nobody_passes_a_barrier_before_the_last_arrives,
    a_barrier_that_is_not_full_times_out_and_is_named,
    an_arrival_is_not_taken_back,
    later_arrivals_pass_at_once,
    a_barrier_of_nobody_is_open,
    barriers_of_different_names_are_apart,
];

fn nobody_passes_a_barrier_before_the_last_arrives(store: Arc<dyn Store>) -> Outcome {
    const N: usize = 6;
    let arrived = AtomicUsize::new(0);
    let handles: Vec<_> = (0..N).map(|_| second(&store)).collect();
    for round in 0..5 {
        let gate = format!("gate {round}");
        std::thread::scope(|scope| {
            for handle in &handles {
                scope.spawn(|| {
                    arrived.fetch_add(1, Ordering::SeqCst);
                    handle.barrier(&gate, N).unwrap();
                    assert!(arrived.load(Ordering::SeqCst) >= N * (round + 1));
                });
            }
        });
    }
    Ok(())
}

fn a_barrier_that_is_not_full_times_out_and_is_named(store: Arc<dyn Store>) -> Outcome {
    let other = Other::start(&store, |handle| handle.barrier_for("gate", 3, 2 * MOMENT));
    assert_timeout(store.barrier_for("gate", 3, MOMENT), "barrier", "gate");
    assert_timeout(other.result(), "barrier", "gate");
    store.set("k", b"v").unwrap();
    assert_eq!(store.get("k").unwrap(), b"v", "the handle is usable");
    Ok(())
}

fn an_arrival_is_not_taken_back(store: Arc<dyn Store>) -> Outcome {
    assert_timeout(
        store.barrier_for("gate", 2, Duration::ZERO),
        "barrier",
        "gate",
    );
    second(&store).barrier("gate", 2).unwrap();
    Ok(())
}

fn later_arrivals_pass_at_once(store: Arc<dyn Store>) -> Outcome {
    let other = Other::start(&store, |handle| handle.barrier("gate", 2));
    assert!(other.is_blocked());
    store.barrier("gate", 2).unwrap();
    other.result().unwrap();
    for _ in 0..3 {
        store.barrier_for("gate", 2, Duration::ZERO).unwrap();
    }
    Ok(())
}

fn a_barrier_of_nobody_is_open(store: Arc<dyn Store>) -> Outcome {
    store.barrier_for("gate", 0, Duration::ZERO).unwrap();
    store.barrier_for("gate of one", 1, Duration::ZERO).unwrap();
    Ok(())
}

fn barriers_of_different_names_are_apart(store: Arc<dyn Store>) -> Outcome {
    let other = Other::start(&store, |handle| handle.barrier("a", 2));
    assert_timeout(store.barrier_for("b", 2, MOMENT), "barrier", "b");
    assert!(other.is_blocked(), "an arrival at b let a go");
    store.barrier("a", 2).unwrap();
    other.result().unwrap();
    Ok(())
}
