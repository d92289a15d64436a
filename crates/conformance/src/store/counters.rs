//! `add`.

use std::sync::Arc;

use phalanx_store::{Store, StoreError};

use super::{Outcome, case_list, second};

case_list![
    add_counts_from_nothing_and_downwards,
    add_continues_from_integer_text,
    add_stores_decimal_text,
    add_to_text_fails_and_changes_nothing,
    add_that_overflows_fails_and_changes_nothing,
    add_reaches_both_ends_of_its_range,
    many_adders_lose_no_count,
];

fn add_counts_from_nothing_and_downwards(store: Arc<dyn Store>) -> Outcome {
    assert_eq!(store.add("n", 5).unwrap(), 5);
    assert_eq!(store.add("n", -7).unwrap(), -2);
    assert_eq!(store.add("n", 0).unwrap(), -2);
    assert_eq!(store.add("zero", 0).unwrap(), 0);
    assert!(store.check(&["zero"]).unwrap(), "adding 0 creates the key");
    Ok(())
}

fn add_continues_from_integer_text(store: Arc<dyn Store>) -> Outcome {
    store.set("n", b"40").unwrap();
    assert_eq!(store.add("n", 2).unwrap(), 42);
    store.set("n", b"-10").unwrap();
    assert_eq!(store.add("n", 3).unwrap(), -7);
    Ok(())
}

fn add_stores_decimal_text(store: Arc<dyn Store>) -> Outcome {
    store.add("n", -2).unwrap();
    assert_eq!(store.get("n").unwrap(), b"-2");
    store.add("n", 1002).unwrap();
    assert_eq!(store.get("n").unwrap(), b"1000");
    Ok(())
}

#[track_caller]
fn assert_refused(result: phalanx_store::Result<i64>) {
    let err = result.expect_err("this sum cannot be made");
    assert!(matches!(err, StoreError::NotAnInteger { .. }), "{err:?}");
    let text = err.to_string();
    // The key ends in `n`; a prefix may stand before it.
    assert!(text.contains("add") && text.contains("n\""), "{text}");
}

fn add_to_text_fails_and_changes_nothing(store: Arc<dyn Store>) -> Outcome {
    for text in [
        &b"text"[..],
        b"",
        b"12abc",
        b" 7",
        b"1.5",
        b"0x10",
        &[0xff, 0xfe],
    ] {
        store.set("n", text).unwrap();
        assert_refused(store.add("n", 1));
        assert_eq!(store.get("n").unwrap(), text, "the value changed");
    }
    // The handle and its kin go on.
    store.set("n", b"1").unwrap();
    assert_eq!(store.add("n", 1).unwrap(), 2);
    assert_eq!(second(&store).add("n", 1).unwrap(), 3);
    Ok(())
}

fn add_that_overflows_fails_and_changes_nothing(store: Arc<dyn Store>) -> Outcome {
    store.set("n", i64::MAX.to_string().as_bytes()).unwrap();
    assert_refused(store.add("n", 1));
    assert_eq!(store.add("n", 0).unwrap(), i64::MAX);
    store.set("n", i64::MIN.to_string().as_bytes()).unwrap();
    assert_refused(store.add("n", -1));
    store.set("n", b"9223372036854775808").unwrap();
    assert_refused(store.add("n", -1));
    assert_eq!(store.get("n").unwrap(), b"9223372036854775808");
    Ok(())
}

fn add_reaches_both_ends_of_its_range(store: Arc<dyn Store>) -> Outcome {
    assert_eq!(store.add("max", i64::MAX).unwrap(), i64::MAX);
    assert_eq!(store.add("min", i64::MIN).unwrap(), i64::MIN);
    assert_eq!(store.add("max", i64::MIN).unwrap(), -1);
    assert_eq!(store.add("min", i64::MAX).unwrap(), -1);
    Ok(())
}

fn many_adders_lose_no_count(store: Arc<dyn Store>) -> Outcome {
    const ADDERS: usize = 8;
    const ROUNDS: usize = 50;
    let mut seen: Vec<i64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ADDERS)
            .map(|_| {
                let handle = second(&store);
                scope.spawn(move || -> Vec<i64> {
                    (0..ROUNDS).map(|_| handle.add("n", 1).unwrap()).collect()
                })
            })
            .collect();
        threads
            .into_iter()
            .flat_map(|t| t.join().unwrap())
            .collect()
    });
    // Every sum was returned to exactly one caller.
    seen.sort_unstable();
    let expected: Vec<i64> = (1..=(ADDERS * ROUNDS) as i64).collect();
    assert_eq!(seen, expected);
    Ok(())
}
