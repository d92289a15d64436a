//! Who is woken by what.

use std::sync::Arc;
use std::time::Duration;

use phalanx_store::Store;

use super::{MOMENT, Other, Outcome, case_list, second};

case_list![
    a_blocked_get_is_woken_by_every_way_to_write,
    a_blocked_wait_is_woken_by_every_way_to_write,
    a_blocked_multi_get_waits_for_the_last_key,
    a_wait_for_repeated_keys_is_woken_once,
    keys_may_arrive_in_any_order,
    keys_that_come_and_go_count_as_having_come,
    a_compare_set_that_writes_nothing_wakes_nobody,
    deleting_wakes_nobody,
    everyone_who_waits_is_woken,
    waiters_of_other_keys_sleep_on,
    dropping_a_waiting_handle_disturbs_nobody,
];

/// Each creates `key` in its own way; with the value that results.
type Write = (&'static str, fn(&dyn Store, &str), &'static [u8]);

const WRITES: [Write; 5] = [
    ("set", |s, k| s.set(k, b"5").unwrap(), b"5"),
    ("add", |s, k| assert_eq!(s.add(k, 5).unwrap(), 5), b"5"),
    ("append", |s, k| s.append(k, b"5").unwrap(), b"5"),
    (
        "compare_set",
        |s, k| assert_eq!(s.compare_set(k, b"", b"5").unwrap(), b"5"),
        b"5",
    ),
    (
        "multi_set",
        |s, k| s.multi_set(&[("unrelated", b""), (k, b"5")]).unwrap(),
        b"5",
    ),
];

fn a_blocked_get_is_woken_by_every_way_to_write(store: Arc<dyn Store>) -> Outcome {
    for (name, write, value) in WRITES {
        let key = format!("written by {name}");
        let other = Other::start(&store, {
            let key = key.clone();
            move |handle| handle.get(&key)
        });
        assert!(other.is_blocked(), "get returned before {name}");
        write(&*store, &key);
        assert_eq!(other.result().unwrap(), value, "after {name}");
    }
    Ok(())
}

fn a_blocked_wait_is_woken_by_every_way_to_write(store: Arc<dyn Store>) -> Outcome {
    for (name, write, _) in WRITES {
        let key = format!("written by {name}");
        let other = Other::start(&store, {
            let key = key.clone();
            move |handle| handle.wait(&[&key])
        });
        assert!(other.is_blocked(), "wait returned before {name}");
        write(&*store, &key);
        other.result().unwrap();
    }
    Ok(())
}

fn a_blocked_multi_get_waits_for_the_last_key(store: Arc<dyn Store>) -> Outcome {
    store.set("a", b"1").unwrap();
    let other = Other::start(&store, |handle| handle.multi_get(&["c", "a", "b"]));
    store.set("b", b"2").unwrap();
    std::thread::sleep(MOMENT);
    assert!(other.is_blocked(), "c is still missing");
    store.set("c", b"3").unwrap();
    assert_eq!(other.result().unwrap(), [b"3", b"1", b"2"]);
    Ok(())
}

fn a_wait_for_repeated_keys_is_woken_once(store: Arc<dyn Store>) -> Outcome {
    let other = Other::start(&store, |handle| {
        handle.wait(&["a", "a", "b", "a"])?;
        // A surplus wake-up would end this one early.
        handle.wait_for(&["c"], 2 * MOMENT)
    });
    store.set("a", b"").unwrap();
    std::thread::sleep(MOMENT);
    assert!(other.is_blocked(), "b is still missing");
    store.set("b", b"").unwrap();
    super::assert_timeout(other.result(), "wait", "c");
    Ok(())
}

fn keys_may_arrive_in_any_order(store: Arc<dyn Store>) -> Outcome {
    let other = Other::start(&store, |handle| handle.wait(&["a", "b", "c", "d"]));
    for key in ["d", "b", "a"] {
        store.set(key, b"").unwrap();
        store.set(key, b"again").unwrap();
    }
    std::thread::sleep(MOMENT);
    assert!(other.is_blocked(), "c is still missing");
    store.set("c", b"").unwrap();
    other.result().unwrap();
    Ok(())
}

fn keys_that_come_and_go_count_as_having_come(store: Arc<dyn Store>) -> Outcome {
    // Nothing tells whether the other thread has seen the early key before it goes, so a slow
    // machine gets further chances with more time.
    for moments in [1, 10, 100] {
        let keys = [format!("early {moments}"), format!("late {moments}")];
        store.set(&keys[0], b"").unwrap();
        let waiter = Other::start(&store, {
            let keys = keys.clone();
            move |handle| handle.wait_for(&[&keys[0], &keys[1]], 100 * MOMENT)
        });
        std::thread::sleep(moments * MOMENT);
        assert!(store.delete_key(&keys[0]).unwrap());
        store.set(&keys[1], b"").unwrap();
        if waiter.result().is_ok() {
            return Ok(());
        }
    }
    panic!("a key that was there during the wait does not count");
}

fn a_compare_set_that_writes_nothing_wakes_nobody(store: Arc<dyn Store>) -> Outcome {
    let getter = Other::start(&store, |handle| handle.get("k"));
    let waiter = Other::start(&store, |handle| handle.wait(&["k"]));
    assert_eq!(
        store.compare_set("k", b"expected", b"x").unwrap(),
        b"expected"
    );
    std::thread::sleep(2 * MOMENT);
    assert!(getter.is_blocked(), "get returned, but there is no value");
    assert!(waiter.is_blocked(), "wait returned, but there is no key");
    store.set("k", b"real").unwrap();
    assert_eq!(getter.result().unwrap(), b"real");
    waiter.result().unwrap();
    Ok(())
}

fn deleting_wakes_nobody(store: Arc<dyn Store>) -> Outcome {
    let getter = Other::start(&store, |handle| handle.get("k"));
    assert!(!store.delete_key("k").unwrap());
    std::thread::sleep(MOMENT);
    assert!(getter.is_blocked(), "get returned, but there is no value");
    store.set("k", b"v").unwrap();
    assert_eq!(getter.result().unwrap(), b"v");
    Ok(())
}

fn everyone_who_waits_is_woken(store: Arc<dyn Store>) -> Outcome {
    let others: Vec<_> = (0..16)
        .map(|_| {
            let handle = second(&store);
            std::thread::spawn(move || handle.get("k"))
        })
        .collect();
    std::thread::sleep(MOMENT);
    store.set("k", b"v").unwrap();
    for other in others {
        assert_eq!(other.join().unwrap().unwrap(), b"v");
    }
    Ok(())
}

fn waiters_of_other_keys_sleep_on(store: Arc<dyn Store>) -> Outcome {
    let other = Other::start(&store, |handle| handle.get("mine"));
    for key in ["min", "mine/", "Mine", "mine2", ""] {
        store.set(key, b"not this").unwrap();
    }
    std::thread::sleep(MOMENT);
    assert!(other.is_blocked());
    store.set("mine", b"this").unwrap();
    assert_eq!(other.result().unwrap(), b"this");
    Ok(())
}

fn dropping_a_waiting_handle_disturbs_nobody(store: Arc<dyn Store>) -> Outcome {
    let stayer = Other::start(&store, |handle| handle.get("k"));
    for _ in 0..5 {
        let leaver = second(&store);
        assert!(leaver.get_for("k", Duration::from_millis(1)).is_err());
        drop(leaver);
    }
    store.set("k", b"v").unwrap();
    assert_eq!(stayer.result().unwrap(), b"v");
    Ok(())
}
