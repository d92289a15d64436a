//! The log format alone, and torn logs in real files.

use std::fs;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use super::log::{self, Change, MAX_KEY_LEN, MAX_VALUE_LEN, Replica};
use super::{FileStore, Store};

/// A change that owns its parts.
#[derive(Debug, Clone)]
enum Step {
    Set(Vec<u8>, Vec<u8>),
    Delete(Vec<u8>),
    Push(Vec<u8>, Vec<u8>),
    Pop(Vec<u8>),
    Opened(i64),
    Closed(i64),
}

impl Step {
    fn change(&self) -> Change<'_> {
        match self {
            Step::Set(key, value) => Change::Set { key, value },
            Step::Delete(key) => Change::Delete { key },
            Step::Push(queue, value) => Change::Push { queue, value },
            Step::Pop(queue) => Change::Pop { queue },
            &Step::Opened(handles) => Change::Opened { handles },
            &Step::Closed(handles) => Change::Closed { handles },
        }
    }
}

/// Few names, so that steps meet; names that look like prefixes, so that they would be confused.
fn name() -> impl Strategy<Value = Vec<u8>> {
    prop::sample::select(vec!["", "a", "b", "/", "-", "-/a", "queue/a", "refcount/"])
        .prop_map(|name| name.as_bytes().to_vec())
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let value = || vec(any::<u8>(), 0..20);
    let step = prop_oneof![
        (name(), value()).prop_map(|(key, value)| Step::Set(key, value)),
        name().prop_map(Step::Delete),
        (name(), value()).prop_map(|(queue, value)| Step::Push(queue, value)),
        name().prop_map(Step::Pop),
        (0..9i64).prop_map(Step::Opened),
        (0..9i64).prop_map(Step::Closed),
    ];
    vec(step, 1..12)
}

/// A log, and the state after each of its records (the first: after none).
fn history(steps: &[Step]) -> (Vec<u8>, Vec<Replica>) {
    let mut bytes = Vec::new();
    let mut states = vec![Replica::default()];
    for step in steps {
        let start = bytes.len();
        log::encode(step.change(), &mut bytes).unwrap();
        let mut state = states.last().unwrap().clone();
        let progress = state.replay(&bytes[start..]).unwrap();
        assert_eq!(progress.taken, bytes.len() - start);
        states.push(state);
    }
    (bytes, states)
}

/// The last state that a log of `len` bytes can show.
fn state_at(states: &[Replica], len: usize) -> &Replica {
    let whole = |state: &&Replica| state.offset <= len as u64;
    states.iter().rev().find(whole).unwrap()
}

/// Puts `bytes` where a store finds them, lets it join, and compares.
fn check_repair(bytes: &[u8], expected: &Replica) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    fs::write(&path, bytes).unwrap();
    let store = FileStore::open(&path, None).unwrap();
    assert_eq!(store.shared.replica.lock().table, expected.table);

    let mut repaired = bytes[..expected.offset as usize].to_vec();
    let handles = expected.opened + 1;
    log::encode(Change::Opened { handles }, &mut repaired).unwrap();
    assert_eq!(fs::read(&path).unwrap(), repaired);

    store.set("next", b"value").unwrap();
    let other = FileStore::open(&path, None).unwrap();
    assert_eq!(other.get_for("next", Duration::ZERO).unwrap(), b"value");
}

proptest! {
    #[test]
    fn any_prefix_of_a_log_replays_to_a_prefix_of_the_history(steps in steps()) {
        let (bytes, states) = history(&steps);
        for len in 0..=bytes.len() {
            let mut replica = Replica::default();
            let progress = replica.replay(&bytes[..len]).unwrap();
            let expected = state_at(&states, len);
            prop_assert_eq!(&replica, expected);
            prop_assert!(progress.taken + progress.need > len);
        }
    }

    #[test]
    fn a_log_may_be_read_in_any_pieces(steps in steps(), cut in any::<prop::sample::Index>()) {
        let (bytes, states) = history(&steps);
        let cut = cut.index(bytes.len() + 1);
        let mut replica = Replica::default();
        let taken = replica.replay(&bytes[..cut]).unwrap().taken;
        replica.replay(&bytes[taken..]).unwrap();
        prop_assert_eq!(&replica, states.last().unwrap());
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in vec(any::<u8>(), 0..200)) {
        let _ = Replica::default().replay(&bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_next_write_repairs_any_torn_log(steps in steps(), cut in any::<prop::sample::Index>()) {
        let (bytes, states) = history(&steps);
        let cut = cut.index(bytes.len() + 1);
        check_repair(&bytes[..cut], state_at(&states, cut));
    }
}

#[test]
fn a_log_torn_at_every_byte_is_repaired_by_the_next_write() {
    let steps = [
        Step::Opened(1),
        Step::Set(b"key".to_vec(), b"value".to_vec()),
        Step::Push(b"queue".to_vec(), b"element".to_vec()),
        Step::Set(b"key".to_vec(), b"".to_vec()),
        Step::Pop(b"queue".to_vec()),
        Step::Delete(b"key".to_vec()),
    ];
    let (bytes, states) = history(&steps);
    for len in 0..=bytes.len() {
        check_repair(&bytes[..len], state_at(&states, len));
    }
}

#[test]
fn readers_ignore_a_torn_record_until_it_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let store = FileStore::open(&path, None).unwrap();
    store.set("before", b"1").unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    let end = file.metadata().unwrap().len();

    let mut record = Vec::new();
    let (key, value) = (b"torn".as_slice(), b"value".as_slice());
    log::encode(Change::Set { key, value }, &mut record).unwrap();
    for len in 1..record.len() {
        file.write_all_at(&record[..len], end).unwrap();
        assert!(!store.check(&["torn"]).unwrap());
        assert_eq!(store.get("before").unwrap(), b"1");
    }
    file.write_all_at(&record, end).unwrap();
    assert_eq!(store.get_for("torn", Duration::ZERO).unwrap(), b"value");
}

#[test]
fn a_record_larger_than_a_chunk_is_read_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let one = FileStore::open(&path, None).unwrap();
    let two = FileStore::open(&path, None).unwrap();
    let value: Vec<u8> = (0..3_000_000u32).map(|i| i as u8).collect();
    one.set("small", b"1").unwrap();
    one.set("large", &value).unwrap();
    one.set("after", b"2").unwrap();
    assert_eq!(two.get("large").unwrap(), value);
    assert_eq!(two.get("after").unwrap(), b"2");
}

#[test]
fn lengths_beyond_the_limits_are_an_error_and_cost_no_memory() {
    let mut key_too_long = Vec::new();
    key_too_long.extend_from_slice(&u32::MAX.to_le_bytes());
    let mut key_empty = Vec::new();
    key_empty.extend_from_slice(&[0; 8]);
    let mut value_too_long = b"\x02\0\0\0/k".to_vec();
    value_too_long.extend_from_slice(&(MAX_VALUE_LEN as u32 + 1).to_le_bytes());
    let text = b"this is somebody's shopping list".to_vec();
    let bad_count = b"\x09\0\0\0refcount/\x03\0\0\0one".to_vec();
    for hostile in [key_too_long, key_empty, value_too_long, text, bad_count] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        fs::write(&path, &hostile).unwrap();
        let err = FileStore::open(&path, None).unwrap_err().to_string();
        assert!(err.contains("is it a store file?"), "{err}");
        assert_eq!(fs::read(&path).unwrap(), hostile, "left as it was");
    }
}

#[test]
fn what_does_not_fit_a_record_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let store = FileStore::open(&path, None).unwrap();
    let before = fs::read(&path).unwrap();
    let long_key = "k".repeat(MAX_KEY_LEN + 1);
    let err = store.set(&long_key, b"").unwrap_err().to_string();
    assert_eq!(err, "set: key is 65537, the limit is 65536");
    let pairs: [(&str, &[u8]); 2] = [("fits", b"1"), (&long_key, b"2")];
    assert!(store.multi_set(&pairs).is_err());
    assert_eq!(fs::read(&path).unwrap(), before);
    store.set(&"k".repeat(MAX_KEY_LEN), b"longest").unwrap();
}
