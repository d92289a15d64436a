//! Queues.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use phalanx_store::{PrefixStore, Store};

use super::{MOMENT, OrSkip, Other, Outcome, assert_timeout, case_list, eventually, second};

case_list![
    a_queue_is_first_in_first_out,
    an_empty_queue_has_nothing_to_pop,
    queues_and_keys_of_one_name_are_independent,
    a_queue_with_elements_counts_as_existing,
    a_blocked_pop_is_woken_by_a_push,
    each_element_goes_to_exactly_one_of_many_poppers,
    a_popper_that_gave_up_loses_nothing,
    a_wait_takes_no_element,
    a_wait_for_a_queue_and_a_key_needs_both,
    queues_of_different_names_are_apart,
];

fn a_queue_is_first_in_first_out(store: Arc<dyn Store>) -> Outcome {
    for element in [&b"a"[..], b"", b"ccc", b"a"] {
        store.queue_push("q", element).or_skip()?;
    }
    assert_eq!(store.queue_len("q").or_skip()?, 4);
    let other = second(&store);
    assert_eq!(store.queue_pop("q").or_skip()?, b"a");
    assert_eq!(other.queue_try_pop("q").or_skip()?.unwrap(), b"");
    store.queue_push("q", &[0, 255]).or_skip()?;
    assert_eq!(store.queue_pop("q").or_skip()?, b"ccc");
    assert_eq!(store.queue_pop("q").or_skip()?, b"a");
    assert_eq!(other.queue_pop("q").or_skip()?, [0, 255]);
    assert_eq!(store.queue_len("q").or_skip()?, 0);
    Ok(())
}

fn an_empty_queue_has_nothing_to_pop(store: Arc<dyn Store>) -> Outcome {
    assert_eq!(store.queue_len("q").or_skip()?, 0);
    assert_eq!(store.queue_try_pop("q").or_skip()?, None);
    let popped = store.queue_pop_for("q", Duration::ZERO);
    assert_timeout(popped, "queue_pop", "q");
    store.queue_push("q", b"x").or_skip()?;
    assert_eq!(store.queue_pop_for("q", Duration::ZERO).or_skip()?, b"x");
    assert_eq!(store.queue_try_pop("q").or_skip()?, None);
    assert!(!store.check(&["q"]).unwrap());
    Ok(())
}

fn queues_and_keys_of_one_name_are_independent(store: Arc<dyn Store>) -> Outcome {
    let base = store.num_keys().unwrap();
    store.queue_push("both", b"element").or_skip()?;
    assert_eq!(store.num_keys().unwrap(), base, "a queue is no key");
    assert!(store.list_keys().unwrap().is_empty());
    assert!(!store.delete_key("both").unwrap(), "delete_key is for keys");
    store.set("both", b"value").unwrap();
    assert_eq!(store.queue_len("both").or_skip()?, 1);
    assert_eq!(store.get("both").unwrap(), b"value");
    assert!(store.delete_key("both").unwrap());
    assert_eq!(store.queue_pop("both").or_skip()?, b"element");
    assert!(!store.check(&["both"]).unwrap());
    Ok(())
}

fn a_queue_with_elements_counts_as_existing(store: Arc<dyn Store>) -> Outcome {
    store.set("k", b"").unwrap();
    assert!(!store.check(&["k", "q"]).unwrap());
    store.queue_push("q", b"").or_skip()?;
    assert!(store.check(&["k", "q"]).unwrap());
    store.wait_for(&["q", "k"], Duration::ZERO).unwrap();
    Ok(())
}

fn a_blocked_pop_is_woken_by_a_push(store: Arc<dyn Store>) -> Outcome {
    store.queue_len("q").or_skip()?;
    let other = Other::start(&store, |handle| handle.queue_pop("q"));
    assert!(other.is_blocked(), "popped from an empty queue");
    store.queue_push("q", b"x").or_skip()?;
    assert_eq!(other.result().unwrap(), b"x");
    assert_eq!(store.queue_len("q").or_skip()?, 0);
    Ok(())
}

fn each_element_goes_to_exactly_one_of_many_poppers(store: Arc<dyn Store>) -> Outcome {
    const POPPERS: usize = 4;
    const EACH: usize = 25;
    store.queue_len("q").or_skip()?;
    let poppers: Vec<_> = (0..POPPERS)
        .map(|_| {
            let handle = second(&store);
            std::thread::spawn(move || -> Vec<Vec<u8>> {
                (0..EACH).map(|_| handle.queue_pop("q").unwrap()).collect()
            })
        })
        .collect();
    std::thread::sleep(MOMENT);
    let pushed: BTreeSet<Vec<u8>> = (0..POPPERS * EACH)
        .map(|i| format!("{i}").into_bytes())
        .collect();
    for element in &pushed {
        store.queue_push("q", element).or_skip()?;
    }
    let popped: Vec<Vec<u8>> = poppers
        .into_iter()
        .flat_map(|popper| popper.join().expect("a popper failed"))
        .collect();
    assert_eq!(popped.len(), pushed.len());
    assert_eq!(popped.into_iter().collect::<BTreeSet<_>>(), pushed);
    assert_eq!(store.queue_len("q").or_skip()?, 0);
    Ok(())
}

fn a_popper_that_gave_up_loses_nothing(store: Arc<dyn Store>) -> Outcome {
    store.queue_len("q").or_skip()?;
    let stayer = Other::start(&store, |handle| handle.queue_pop("q"));
    let leaver = second(&store);
    let popped = leaver.queue_pop_for("q", Duration::from_millis(5));
    assert_timeout(popped, "queue_pop", "q");
    store.queue_push("q", b"1").or_skip()?;
    assert_eq!(stayer.result().unwrap(), b"1");

    // Elements that come just as poppers give up: each is popped or still there.
    let popper = Other::start(&store, |handle| {
        let mut popped = 0;
        for _ in 0..40 {
            match handle.queue_pop_for("race", Duration::from_millis(1)) {
                Ok(_) => popped += 1,
                Err(err) => assert!(err.is_timeout(), "{err}"),
            }
        }
        popped
    });
    for _ in 0..40 {
        store.queue_push("race", b"x").or_skip()?;
        std::thread::sleep(Duration::from_millis(1));
    }
    let popped: usize = popper.result();
    eventually("every element was popped or is there", || {
        store.queue_len("race").unwrap() + popped == 40
    });
    Ok(())
}

fn a_wait_takes_no_element(store: Arc<dyn Store>) -> Outcome {
    store.queue_len("q").or_skip()?;
    let waiter = Other::start(&store, |handle| handle.wait(&["q"]));
    store.queue_push("q", b"x").or_skip()?;
    waiter.result().unwrap();
    assert_eq!(store.queue_len("q").or_skip()?, 1);

    // One who only wants to know of an element does not keep it from one who wants to have it.
    // Who hears of it first is open, so a second one lets the watcher go if it missed the first.
    assert_eq!(store.queue_pop("q").or_skip()?, b"x");
    let watcher = Other::start(&store, |handle| {
        handle.wait(&["q"])?;
        handle.num_keys()
    });
    let popper = Other::start(&store, |handle| handle.queue_pop("q"));
    store.queue_push("q", b"y").or_skip()?;
    assert_eq!(popper.result().unwrap(), b"y");
    store.queue_push("q", b"z").or_skip()?;
    watcher.result().unwrap();
    assert_eq!(store.queue_pop("q").or_skip()?, b"z");
    Ok(())
}

fn a_wait_for_a_queue_and_a_key_needs_both(store: Arc<dyn Store>) -> Outcome {
    store.queue_push("ready", b"").or_skip()?;
    let waiter = Other::start(&store, |handle| handle.wait(&["ready", "late"]));
    assert!(waiter.is_blocked());
    store.set("late", b"").unwrap();
    waiter.result().unwrap();

    let waiter = Other::start(&store, |handle| handle.wait(&["q", "k"]));
    store.queue_push("q", b"").or_skip()?;
    std::thread::sleep(MOMENT);
    assert!(waiter.is_blocked(), "k is still missing");
    store.set("k", b"").unwrap();
    waiter.result().unwrap();

    let waiter = Other::start(&store, |handle| handle.wait(&["q2", "k2"]));
    store.set("k2", b"").unwrap();
    std::thread::sleep(MOMENT);
    assert!(waiter.is_blocked(), "q2 is still empty");
    store.queue_push("q2", b"").or_skip()?;
    waiter.result().unwrap();
    Ok(())
}

fn queues_of_different_names_are_apart(store: Arc<dyn Store>) -> Outcome {
    let prefixed = PrefixStore::new("p", Arc::clone(&store));
    store.queue_push("q", b"outside").or_skip()?;
    prefixed.queue_push("q", b"inside").or_skip()?;
    store.queue_push("", b"no name").or_skip()?;
    assert_eq!(prefixed.queue_len("q").or_skip()?, 1);
    assert_eq!(prefixed.queue_pop("q").or_skip()?, b"inside");
    assert_eq!(prefixed.queue_try_pop("q").or_skip()?, None);
    assert_eq!(store.queue_pop("q").or_skip()?, b"outside");
    assert_eq!(store.queue_pop("").or_skip()?, b"no name");
    Ok(())
}
