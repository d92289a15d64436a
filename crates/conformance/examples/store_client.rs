//! Our client on somebody else's server: runs the store suite through `TcpStore`.
//!
//! ```text
//! store_client HOST PORT phalanx|libuv|legacy
//! ```
//!
//! On PyTorch's servers the cases that meet a documented defect of theirs are left out, by name.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use phalanx_conformance::store;
use phalanx_store::{JobToken, PrefixStore, Store, TcpStore, TcpStoreOptions};

/// What PyTorch's libuv server does otherwise than the trait says.
const LIBUV: &[(&str, &str)] = &[
    ("add_to_text_fails_and_changes_nothing", TRAILING_JUNK),
    ("add_that_overflows_fails_and_changes_nothing", WRAPS),
    (
        "a_compare_set_that_writes_nothing_wakes_nobody",
        "the server wakes waiters of a key that does not exist",
    ),
    (
        "a_wait_takes_no_element",
        "the server wakes one waiter per element, whether it takes the element or not",
    ),
    (
        "a_wait_for_a_queue_and_a_key_needs_both",
        "the server looks at keys only when it counts what is missing",
    ),
];

/// What PyTorch's legacy server does otherwise than the trait says.
const LEGACY: &[(&str, &str)] = &[
    ("add_to_text_fails_and_changes_nothing", TRAILING_JUNK),
    ("add_that_overflows_fails_and_changes_nothing", WRAPS),
    ("a_blocked_get_is_woken_by_every_way_to_write", NO_WAKE),
    ("a_blocked_wait_is_woken_by_every_way_to_write", NO_WAKE),
    ("any_limit_is_accepted", NO_QUEUES),
    ("a_queue_is_first_in_first_out", NO_QUEUES),
    ("an_empty_queue_has_nothing_to_pop", NO_QUEUES),
    ("queues_and_keys_of_one_name_are_independent", NO_QUEUES),
    ("a_queue_with_elements_counts_as_existing", NO_QUEUES),
    ("a_blocked_pop_is_woken_by_a_push", NO_QUEUES),
    (
        "each_element_goes_to_exactly_one_of_many_poppers",
        NO_QUEUES,
    ),
    ("a_popper_that_gave_up_loses_nothing", NO_QUEUES),
    ("a_wait_takes_no_element", NO_QUEUES),
    ("a_wait_for_a_queue_and_a_key_needs_both", NO_QUEUES),
    ("queues_of_different_names_are_apart", NO_QUEUES),
];

const TRAILING_JUNK: &str = "the server takes 12abc for 12";
const WRAPS: &str = "the server's sums wrap around";
const NO_WAKE: &str = "the server wakes nobody on compare_set";
const NO_QUEUES: &str = "the server has no queues";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [host, port, server] = args.as_slice() else {
        return Err("usage: store_client HOST PORT phalanx|libuv|legacy".into());
    };
    let left_out = match server.as_str() {
        "libuv" => LIBUV,
        "legacy" => LEGACY,
        _ => &[],
    };
    let mut options = TcpStoreOptions::new(host, port.parse()?);
    options.token = JobToken::from_env()?;
    let made = AtomicUsize::new(0);
    // Prefixes make one server as good as a fresh one for every case.
    let make = || -> Arc<dyn Store> {
        let store = TcpStore::connect(&options).expect("the server is there");
        let number = made.fetch_add(1, Ordering::Relaxed);
        let name = format!("suite-{}-{number}", std::process::id());
        Arc::new(PrefixStore::new(name, Arc::new(store)))
    };
    let known: Vec<&str> = store::cases().iter().map(|case| case.name()).collect();
    for (name, _) in left_out {
        assert!(known.contains(name), "{name} is left out but no case");
    }
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for case in store::cases() {
        let name = case.name();
        if let Some((_, why)) = left_out.iter().find(|(left_out, _)| *left_out == name) {
            println!("skip {name}: {why}");
            skipped += 1;
            continue;
        }
        match case.run(&make) {
            Ok(None) => {
                println!("ok   {name}");
                passed += 1;
            }
            Ok(Some(why)) => {
                println!("skip {name}: {why}");
                skipped += 1;
            }
            Err(failure) => {
                println!("FAIL {failure}");
                failed += 1;
            }
        }
    }
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    match failed {
        0 => Ok(()),
        _ => Err(format!("{failed} cases failed").into()),
    }
}
