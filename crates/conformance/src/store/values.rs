//! Keys, values, lists of keys, name spaces.

use std::sync::Arc;
use std::time::Duration;

use phalanx_store::{PrefixStore, Store, StoreError};

use super::{Outcome, Skip, case_list, second};

case_list![
    a_value_comes_back_and_is_replaced,
    an_empty_value_is_a_value,
    any_bytes_are_a_value,
    odd_keys_are_keys,
    eight_mebibytes_are_a_value,
    a_second_handle_sees_the_same_data,
    data_outlive_the_handle_that_wrote_them,
    a_handle_serves_many_threads,
    compare_set_follows_its_table,
    compare_set_lets_one_of_many_win,
    check_needs_all_keys,
    an_empty_list_of_keys_is_there,
    keys_may_repeat_in_a_list,
    delete_says_whether_the_key_was_there,
    append_creates_and_extends,
    concurrent_appends_lose_nothing,
    multi_set_then_multi_get_keeps_the_order,
    the_last_pair_of_a_multi_set_wins,
    num_keys_counts_keys,
    list_keys_lists_what_exists,
    prefixes_do_not_see_each_other,
    prefixes_nest_with_the_outermost_last,
    set_timeout_is_the_handles_own_default,
];

fn a_value_comes_back_and_is_replaced(store: Arc<dyn Store>) -> Outcome {
    store.set("k", b"first").unwrap();
    assert_eq!(store.get("k").unwrap(), b"first");
    store.set("k", b"2").unwrap();
    assert_eq!(store.get("k").unwrap(), b"2");
    store.set("k", b"longer than before").unwrap();
    assert_eq!(store.get("k").unwrap(), b"longer than before");
    Ok(())
}

fn an_empty_value_is_a_value(store: Arc<dyn Store>) -> Outcome {
    assert!(!store.check(&["e"]).unwrap());
    store.set("e", b"").unwrap();
    assert!(store.check(&["e"]).unwrap());
    store.wait(&["e"]).unwrap();
    assert_eq!(store.get("e").unwrap(), b"");
    assert_eq!(store.multi_get(&["e", "e"]).unwrap(), [b"", b""]);
    assert!(store.delete_key("e").unwrap());
    assert!(!store.check(&["e"]).unwrap());
    Ok(())
}

fn any_bytes_are_a_value(store: Arc<dyn Store>) -> Outcome {
    let all: Vec<u8> = (0..=255).cycle().take(1000).collect();
    store.set("b", &all).unwrap();
    assert_eq!(store.get("b").unwrap(), all);
    store.append("b", &[0, 0xff, b'\n', 0]).unwrap();
    assert_eq!(store.get("b").unwrap()[1000..], [0, 0xff, b'\n', 0]);
    let swapped = store.compare_set("b2", b"", &all).unwrap();
    assert_eq!(swapped, all);
    store.multi_set(&[("b3", &all), ("b4", &[0])]).unwrap();
    assert_eq!(store.multi_get(&["b4", "b3"]).unwrap(), [vec![0], all]);
    Ok(())
}

fn odd_keys_are_keys(store: Arc<dyn Store>) -> Outcome {
    let long = "k".repeat(1000);
    let keys = [
        "",
        "/",
        "//",
        "a/b",
        "a//b/",
        " ",
        "two words",
        "tab\tnewline\n",
        "nul\0byte",
        "-",
        "-a",
        "schlüssel",
        "鍵",
        "🔑",
        "init/",
        "%s%n",
        "..",
        &long,
    ];
    for (i, key) in keys.iter().enumerate() {
        assert!(!store.check(&[key]).unwrap(), "{key:?} exists already");
        store.set(key, format!("value {i}").as_bytes()).unwrap();
    }
    for (i, key) in keys.iter().enumerate() {
        let value = store.get(key).unwrap();
        assert_eq!(value, format!("value {i}").into_bytes(), "under {key:?}");
    }
    let mut listed = store.list_keys().unwrap();
    let mut expected = keys.map(str::to_owned).to_vec();
    listed.sort();
    expected.sort();
    assert_eq!(listed, expected);
    for key in keys {
        assert!(store.delete_key(key).unwrap(), "{key:?} was not deleted");
        assert!(!store.check(&[key]).unwrap(), "{key:?} is still there");
    }
    Ok(())
}

fn eight_mebibytes_are_a_value(store: Arc<dyn Store>) -> Outcome {
    let large: Vec<u8> = (0..8 << 20).map(|i: u32| (i % 251) as u8).collect();
    match store.set("large", &large) {
        Err(err @ StoreError::TooLarge { .. }) => return Err(Skip(err.to_string())),
        other => other.unwrap(),
    }
    assert!(store.get("large").unwrap() == large, "the value changed");
    store.append("large", b"tail").unwrap();
    let value = second(&store).get("large").unwrap();
    assert_eq!(value.len(), large.len() + 4);
    assert!(value.ends_with(b"tail"));
    Ok(())
}

fn a_second_handle_sees_the_same_data(store: Arc<dyn Store>) -> Outcome {
    let other = second(&store);
    store.set("from first", b"1").unwrap();
    assert_eq!(other.get("from first").unwrap(), b"1");
    other.set("from second", b"2").unwrap();
    assert_eq!(store.get("from second").unwrap(), b"2");
    assert_eq!(second(&other).add("from second", 3).unwrap(), 5);
    assert_eq!(store.get("from second").unwrap(), b"5");
    Ok(())
}

fn data_outlive_the_handle_that_wrote_them(store: Arc<dyn Store>) -> Outcome {
    let other = second(&store);
    other.set("k", b"v").unwrap();
    // An answered call shows that the one before it has arrived.
    assert_eq!(other.add("n", 1).unwrap(), 1);
    drop(other);
    assert_eq!(store.get("k").unwrap(), b"v");
    assert_eq!(store.add("n", 1).unwrap(), 2);
    Ok(())
}

fn a_handle_serves_many_threads(store: Arc<dyn Store>) -> Outcome {
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let store = &store;
            scope.spawn(move || {
                for round in 0..20 {
                    let key = format!("{thread}/{round}");
                    store.set(&key, key.as_bytes()).unwrap();
                    assert_eq!(store.get(&key).unwrap(), key.as_bytes());
                    store.add("all", 1).unwrap();
                }
            });
        }
    });
    assert_eq!(store.add("all", 0).unwrap(), 160);
    Ok(())
}

fn compare_set_follows_its_table(store: Arc<dyn Store>) -> Outcome {
    let swap = |key, expected: &[u8], desired: &[u8]| store.compare_set(key, expected, desired);
    // Missing, something expected: nothing is written, what was expected is returned.
    assert_eq!(swap("k", b"something", b"new").unwrap(), b"something");
    assert!(!store.check(&["k"]).unwrap());
    // Missing, nothing expected: created.
    assert_eq!(swap("k", b"", b"first").unwrap(), b"first");
    assert_eq!(store.get("k").unwrap(), b"first");
    // Present and different: the present value is returned and stays.
    assert_eq!(swap("k", b"other", b"new").unwrap(), b"first");
    assert_eq!(swap("k", b"", b"new").unwrap(), b"first");
    assert_eq!(swap("k", b"firs", b"new").unwrap(), b"first");
    assert_eq!(store.get("k").unwrap(), b"first");
    // Present and equal: replaced, also by an empty value.
    assert_eq!(swap("k", b"first", b"second").unwrap(), b"second");
    assert_eq!(swap("k", b"second", b"").unwrap(), b"");
    assert!(store.check(&["k"]).unwrap(), "an empty value still exists");
    // Present and empty, nothing expected: equal, so replaced.
    assert_eq!(swap("k", b"x", b"y").unwrap(), b"");
    assert_eq!(swap("k", b"", b"third").unwrap(), b"third");
    assert_eq!(store.get("k").unwrap(), b"third");
    Ok(())
}

fn compare_set_lets_one_of_many_win(store: Arc<dyn Store>) -> Outcome {
    let contenders: Vec<_> = (0..8).map(|i| (format!("{i}"), second(&store))).collect();
    let winners: Vec<bool> = std::thread::scope(|scope| {
        let threads: Vec<_> = contenders
            .iter()
            .map(|(name, handle)| {
                scope.spawn(move || {
                    let value = handle.compare_set("leader", b"", name.as_bytes()).unwrap();
                    value == name.as_bytes()
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(winners.iter().filter(|won| **won).count(), 1);
    let leader = store.get("leader").unwrap();
    let winner = winners.iter().position(|won| *won).unwrap();
    assert_eq!(leader, contenders[winner].0.as_bytes());
    Ok(())
}

fn check_needs_all_keys(store: Arc<dyn Store>) -> Outcome {
    assert!(!store.check(&["a", "b"]).unwrap());
    store.set("a", b"").unwrap();
    assert!(!store.check(&["a", "b"]).unwrap());
    assert!(!store.check(&["b", "a"]).unwrap());
    assert!(store.check(&["a"]).unwrap());
    store.set("b", b"").unwrap();
    assert!(store.check(&["a", "b"]).unwrap());
    Ok(())
}

fn an_empty_list_of_keys_is_there(store: Arc<dyn Store>) -> Outcome {
    assert!(store.check(&[]).unwrap());
    store.wait(&[]).unwrap();
    store.wait_for(&[], Duration::ZERO).unwrap();
    assert!(store.multi_get(&[]).unwrap().is_empty());
    let before = store.num_keys().unwrap();
    store.multi_set(&[]).unwrap();
    assert_eq!(store.num_keys().unwrap(), before);
    Ok(())
}

fn keys_may_repeat_in_a_list(store: Arc<dyn Store>) -> Outcome {
    store.set("a", b"1").unwrap();
    assert!(store.check(&["a", "a"]).unwrap());
    store.wait(&["a", "a", "a"]).unwrap();
    assert_eq!(store.multi_get(&["a", "a"]).unwrap(), [b"1", b"1"]);
    Ok(())
}

fn delete_says_whether_the_key_was_there(store: Arc<dyn Store>) -> Outcome {
    assert!(!store.delete_key("k").unwrap());
    store.set("k", b"v").unwrap();
    assert!(store.delete_key("k").unwrap());
    assert!(!store.check(&["k"]).unwrap());
    assert!(!store.delete_key("k").unwrap());
    // A deleted key starts anew.
    assert_eq!(store.add("k", 2).unwrap(), 2);
    assert!(store.delete_key("k").unwrap());
    store.append("k", b"x").unwrap();
    assert_eq!(store.get("k").unwrap(), b"x");
    assert!(store.delete_key("k").unwrap());
    assert_eq!(store.compare_set("k", b"x", b"y").unwrap(), b"x");
    assert!(!store.check(&["k"]).unwrap());
    Ok(())
}

fn append_creates_and_extends(store: Arc<dyn Store>) -> Outcome {
    store.append("log", b"").unwrap();
    assert_eq!(store.get("log").unwrap(), b"");
    store.append("log", b"ab").unwrap();
    store.append("log", b"cd").unwrap();
    // Twice the same: neither may be taken for a repetition of the other.
    store.append("log", b"abcd").unwrap();
    assert_eq!(store.get("log").unwrap(), b"abcdabcd");
    Ok(())
}

fn concurrent_appends_lose_nothing(store: Arc<dyn Store>) -> Outcome {
    std::thread::scope(|scope| {
        for byte in b'a'..b'e' {
            let handle = second(&store);
            scope.spawn(move || {
                for _ in 0..50 {
                    handle.append("log", &[byte]).unwrap();
                }
                handle.num_keys().unwrap();
            });
        }
    });
    let log = store.get("log").unwrap();
    for byte in b'a'..b'e' {
        assert_eq!(log.iter().filter(|b| **b == byte).count(), 50);
    }
    assert_eq!(log.len(), 200);
    Ok(())
}

fn multi_set_then_multi_get_keeps_the_order(store: Arc<dyn Store>) -> Outcome {
    store
        .multi_set(&[("a", b"one"), ("b", b""), ("c", b"three")])
        .unwrap();
    let values = store.multi_get(&["c", "a", "b", "c"]).unwrap();
    assert_eq!(values, [&b"three"[..], b"one", b"", b"three"]);
    let names: Vec<String> = (0..500).map(|i| format!("many/{i}")).collect();
    let pairs: Vec<_> = names.iter().map(|n| (n.as_str(), n.as_bytes())).collect();
    store.multi_set(&pairs).unwrap();
    let keys: Vec<&str> = names.iter().map(String::as_str).rev().collect();
    let values = store.multi_get(&keys).unwrap();
    assert!(keys.iter().zip(&values).all(|(k, v)| k.as_bytes() == v));
    Ok(())
}

fn the_last_pair_of_a_multi_set_wins(store: Arc<dyn Store>) -> Outcome {
    store.multi_set(&[("k", b"1"), ("k", b"2")]).unwrap();
    assert_eq!(store.get("k").unwrap(), b"2");
    Ok(())
}

fn num_keys_counts_keys(store: Arc<dyn Store>) -> Outcome {
    // Stores may have keys of their own, so only differences count.
    let base = store.num_keys().unwrap();
    let extra = || store.num_keys().unwrap() - base;
    store.set("a", b"").unwrap();
    assert_eq!(extra(), 1);
    store.set("a", b"again").unwrap();
    store.add("n", 1).unwrap();
    store.add("n", 1).unwrap();
    store.append("log", b"x").unwrap();
    store.multi_set(&[("a", b""), ("b", b"")]).unwrap();
    store.compare_set("c", b"", b"").unwrap();
    store.compare_set("never", b"expected", b"").unwrap();
    assert_eq!(extra(), 5);
    store.delete_key("a").unwrap();
    store.delete_key("never").unwrap();
    assert_eq!(extra(), 4);
    Ok(())
}

fn list_keys_lists_what_exists(store: Arc<dyn Store>) -> Outcome {
    let listed = || {
        let mut keys = store.list_keys().unwrap();
        keys.sort();
        keys
    };
    assert!(listed().is_empty(), "a fresh store shows {:?}", listed());
    store.set("b", b"1").unwrap();
    store.set("a", b"").unwrap();
    store.set("b", b"2").unwrap();
    store.add("n", 1).unwrap();
    store.compare_set("never", b"expected", b"").unwrap();
    assert_eq!(listed(), ["a", "b", "n"]);
    store.delete_key("b").unwrap();
    assert_eq!(listed(), ["a", "n"]);
    Ok(())
}

fn prefixes_do_not_see_each_other(store: Arc<dyn Store>) -> Outcome {
    let under = |name: &str| PrefixStore::new(name, Arc::clone(&store));
    // `ab` and `a` + `b`: a prefix is a whole name, not the beginning of one.
    let (a, ab) = (under("a"), under("ab"));
    a.set("k", b"in a").unwrap();
    ab.set("k", b"in ab").unwrap();
    store.set("k", b"outside").unwrap();
    assert_eq!(a.get("k").unwrap(), b"in a");
    assert_eq!(ab.get("k").unwrap(), b"in ab");
    assert_eq!(store.get("k").unwrap(), b"outside");
    assert_eq!(a.add("n", 1).unwrap(), 1);
    assert_eq!(ab.add("n", 10).unwrap(), 10);
    assert!(a.delete_key("k").unwrap());
    assert!(ab.check(&["k"]).unwrap());
    assert_eq!(a.list_keys().unwrap(), ["n"]);
    let mut listed = ab.list_keys().unwrap();
    listed.sort();
    assert_eq!(listed, ["k", "n"]);
    assert_eq!(a.num_keys().unwrap(), store.num_keys().unwrap());
    Ok(())
}

fn prefixes_nest_with_the_outermost_last(store: Arc<dyn Store>) -> Outcome {
    let inner: Arc<dyn Store> = Arc::new(PrefixStore::new("q", Arc::clone(&store)));
    let outer = PrefixStore::new("p", Arc::clone(&inner));
    outer.set("k", b"v").unwrap();
    assert_eq!(store.get("q/p/k").unwrap(), b"v");
    assert_eq!(inner.list_keys().unwrap(), ["p/k"]);
    assert_eq!(outer.list_keys().unwrap(), ["k"]);
    assert_eq!(outer.second_handle().unwrap().get("k").unwrap(), b"v");
    Ok(())
}

fn set_timeout_is_the_handles_own_default(store: Arc<dyn Store>) -> Outcome {
    let other = second(&store);
    assert_eq!(other.timeout(), store.timeout());
    other.set_timeout(Duration::from_millis(20));
    assert_eq!(other.timeout(), Duration::from_millis(20));
    assert_ne!(store.timeout(), other.timeout());
    super::assert_timeout(other.get("never"), "get", "never");
    super::assert_timeout(other.wait(&["never"]), "wait", "never");
    super::assert_timeout(other.multi_get(&["never"]), "multi_get", "never");
    Ok(())
}
