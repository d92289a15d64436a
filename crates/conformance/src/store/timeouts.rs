//! Running out of time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_store::Store;

use super::{OrSkip, Other, Outcome, assert_timeout, case_list};

case_list![
    timeouts_name_the_operation_and_the_key,
    timeouts_shorter_than_a_second_are_kept,
    a_limit_of_zero_looks_once,
    a_timeout_leaves_the_handle_usable,
    timed_out_waits_leave_nothing_behind,
    any_limit_is_accepted,
];

const SHORT: Duration = Duration::from_millis(40);

fn timeouts_name_the_operation_and_the_key(store: Arc<dyn Store>) -> Outcome {
    assert_timeout(store.get_for("missing-1", SHORT), "get", "missing-1");
    assert_timeout(store.wait_for(&["missing-2"], SHORT), "wait", "missing-2");
    store.set("present", b"").unwrap();
    let keys = ["present", "missing-3"];
    assert_timeout(store.wait_for(&keys, SHORT), "wait", "missing-3");
    assert_timeout(store.multi_get_for(&keys, SHORT), "multi_get", "missing-3");
    assert_timeout(store.barrier_for("gate", 2, SHORT), "barrier", "gate");
    let popped = store.queue_pop_for("queue", SHORT);
    if !matches!(popped, Err(phalanx_store::StoreError::Unsupported { .. })) {
        assert_timeout(popped, "queue_pop", "queue");
    }
    Ok(())
}

fn timeouts_shorter_than_a_second_are_kept(store: Arc<dyn Store>) -> Outcome {
    // PyTorch's FileStore counts in whole seconds. The best of several shows what is intended,
    // whatever else the machine does.
    let waits = (0..5).map(|_| {
        let start = Instant::now();
        assert_timeout(store.wait_for(&["never"], SHORT), "wait", "never");
        start.elapsed()
    });
    let best = waits.min().unwrap();
    assert!(best >= SHORT, "gave up after {best:?}, before its time");
    assert!(
        best < Duration::from_secs(1),
        "took {best:?} instead of {SHORT:?}"
    );
    Ok(())
}

fn a_limit_of_zero_looks_once(store: Arc<dyn Store>) -> Outcome {
    let now = Duration::ZERO;
    assert_timeout(store.get_for("k", now), "get", "k");
    assert_timeout(store.wait_for(&["k"], now), "wait", "k");
    assert_timeout(store.multi_get_for(&["k"], now), "multi_get", "k");
    store.set("k", b"v").unwrap();
    assert_eq!(store.get_for("k", now).unwrap(), b"v");
    store.wait_for(&["k"], now).unwrap();
    assert_eq!(store.multi_get_for(&["k"], now).unwrap(), [b"v"]);
    store.barrier_for("of one", 1, now).unwrap();
    assert_timeout(store.barrier_for("of two", 2, now), "barrier", "of two");
    Ok(())
}

fn a_timeout_leaves_the_handle_usable(store: Arc<dyn Store>) -> Outcome {
    for round in 0..3 {
        assert_timeout(store.wait_for(&["never"], SHORT), "wait", "never");
        assert_timeout(store.get_for("never", Duration::ZERO), "get", "never");
        store.set("k", b"v").unwrap();
        assert_eq!(store.get("k").unwrap(), b"v");
        assert_eq!(store.add("n", 1).unwrap(), round + 1);
    }
    Ok(())
}

fn timed_out_waits_leave_nothing_behind(store: Arc<dyn Store>) -> Outcome {
    // A late wake-up for the first wait must not end the second one.
    let other = Other::start(&store, |handle| {
        assert_timeout(handle.wait_for(&["first"], SHORT), "wait", "first");
        handle.set("timed out", b"").unwrap();
        handle.get("second")
    });
    store.wait(&["timed out"]).unwrap();
    store.set("first", b"late").unwrap();
    std::thread::sleep(SHORT);
    assert!(
        other.is_blocked(),
        "the second wait took the first one's wake-up"
    );
    store.set("second", b"v").unwrap();
    assert_eq!(other.result().unwrap(), b"v");

    // Values that arrive while waits run out: whatever the outcome, the next answer is right.
    let writer = Other::start(&store, |handle| {
        for i in 0..30 {
            handle
                .set(&format!("race/{i}"), format!("{i}").as_bytes())
                .unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    for i in 0..30 {
        let key = format!("race/{i}");
        match store.get_for(&key, Duration::from_millis(1)) {
            Ok(value) => assert_eq!(value, format!("{i}").into_bytes()),
            Err(err) => assert!(err.is_timeout(), "{err}"),
        }
        assert_eq!(store.add("n", 1).unwrap(), i + 1, "answers are out of step");
    }
    writer.result();
    Ok(())
}

fn any_limit_is_accepted(store: Arc<dyn Store>) -> Outcome {
    store.set("k", b"v").unwrap();
    store.wait_for(&["k"], Duration::MAX).unwrap();
    assert_eq!(store.get_for("k", Duration::MAX).unwrap(), b"v");
    store.set_timeout(Duration::MAX);
    assert_eq!(store.get("k").unwrap(), b"v");
    assert_eq!(store.add("n", 1).unwrap(), 1);
    store.barrier("of one", 1).unwrap();
    store.queue_push("q", b"").or_skip()?;
    assert_eq!(store.queue_pop("q").or_skip()?, b"");
    Ok(())
}
