//! `FileStore` as its users see it: threads, processes, files made by PyTorch, hostile files.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use phalanx_store::{FileStore, PrefixStore, Store, StoreError};

/// Bytes made by PyTorch 2.13: the calls are listed in the test that reads them.
const MADE_BY_PYTORCH: &[u8] = include_bytes!("data/torch213.filestore");

const SHORT: Duration = Duration::from_millis(50);

struct Place {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        Self { _dir: dir, path }
    }

    fn open(&self) -> FileStore {
        FileStore::open_for(&self.path, None, Duration::from_secs(20)).unwrap()
    }
}

fn took_about(limit: Duration, call: impl FnOnce() -> StoreError) -> String {
    let start = Instant::now();
    let err = call();
    let took = start.elapsed();
    assert!(err.is_timeout(), "{err}");
    assert!(took >= limit, "gave up after {took:?}");
    assert!(took < Duration::from_millis(800), "took {took:?}");
    err.to_string()
}

#[test]
fn values_set_by_one_handle_are_seen_by_another() {
    let place = Place::new();
    let (one, two) = (place.open(), place.open());
    one.set("key", b"old").unwrap();
    assert_eq!(two.get("key").unwrap(), b"old");
    one.set("key", b"new").unwrap();
    assert_eq!(two.get("key").unwrap(), b"new");
    one.set("", b"").unwrap();
    assert_eq!(two.get("").unwrap(), b"");
    let second = two.second_handle().unwrap();
    second.set("third", b"3").unwrap();
    assert_eq!(one.get("third").unwrap(), b"3");
}

#[test]
fn add_counts_across_handles_and_refuses_what_is_no_integer() {
    let place = Place::new();
    let (one, two) = (place.open(), place.open());
    assert_eq!(one.add("n", 5).unwrap(), 5);
    assert_eq!(two.add("n", -7).unwrap(), -2);
    assert_eq!(one.get("n").unwrap(), b"-2");
    for text in ["12abc", " 7", "", "x"] {
        one.set("text", text.as_bytes()).unwrap();
        let before = fs::read(&place.path).unwrap();
        let err = two.add("text", 1).unwrap_err();
        assert!(matches!(err, StoreError::NotAnInteger { .. }), "{err}");
        assert_eq!(fs::read(&place.path).unwrap(), before, "nothing is written");
    }
    one.set("max", i64::MAX.to_string().as_bytes()).unwrap();
    assert!(two.add("max", 1).is_err());
    assert_eq!(two.add("max", -1).unwrap(), i64::MAX - 1);
}

#[test]
fn compare_set_follows_the_rules_of_the_trait() {
    let place = Place::new();
    let (one, two) = (place.open(), place.open());
    assert_eq!(one.compare_set("k", b"other", b"new").unwrap(), b"other");
    assert!(!two.check(&["k"]).unwrap());
    assert_eq!(one.compare_set("k", b"", b"first").unwrap(), b"first");
    assert_eq!(
        two.compare_set("k", b"first", b"second").unwrap(),
        b"second"
    );
    assert_eq!(one.compare_set("k", b"first", b"third").unwrap(), b"second");
    assert_eq!(two.get("k").unwrap(), b"second");
}

#[test]
fn delete_says_whether_the_key_was_there() {
    let place = Place::new();
    let (one, two) = (place.open(), place.open());
    one.set("k", b"v").unwrap();
    one.queue_push("k", b"element").unwrap();
    assert!(two.delete_key("k").unwrap());
    assert!(!one.delete_key("k").unwrap());
    assert!(one.get_for("k", Duration::ZERO).is_err());
    assert_eq!(two.queue_len("k").unwrap(), 1, "queues are not touched");
    one.set("k", b"again").unwrap();
    assert_eq!(two.get("k").unwrap(), b"again");
}

#[test]
fn append_and_the_calls_on_several_keys_work() {
    let place = Place::new();
    let (one, two) = (place.open(), place.open());
    one.append("log", b"one,").unwrap();
    two.append("log", b"two,").unwrap();
    assert_eq!(one.get("log").unwrap(), b"one,two,");
    one.append("same", b"x").unwrap();
    one.append("same", b"x").unwrap();
    assert_eq!(two.get("same").unwrap(), b"xx");
    one.append("empty", b"").unwrap();
    assert_eq!(two.get("empty").unwrap(), b"");
    one.multi_set(&[("a", b"1"), ("b", b"2")]).unwrap();
    assert_eq!(two.multi_get(&["b", "a"]).unwrap(), [b"2", b"1"]);
    assert!(two.check(&["a", "b", "log"]).unwrap());
    assert!(two.check(&[]).unwrap());
    assert!(!two.check(&["a", "c"]).unwrap());
}

#[test]
fn only_the_users_keys_are_counted_and_listed() {
    let place = Place::new();
    let one = place.open();
    assert_eq!(one.num_keys().unwrap(), 0);
    drop(place.open());
    one.queue_push("queue", b"element").unwrap();
    one.multi_set(&[("a", b"1"), ("-/b", b"2"), ("refcount/", b"3")])
        .unwrap();
    let two = place.open();
    assert_eq!(two.num_keys().unwrap(), 3);
    let mut keys = two.list_keys().unwrap();
    keys.sort();
    assert_eq!(keys, ["-/b", "a", "refcount/"]);
}

#[test]
fn waiting_calls_return_when_the_value_comes() {
    let place = Place::new();
    thread::scope(|scope| {
        let get = scope.spawn(|| place.open().get("late").unwrap());
        let wait = scope.spawn(|| place.open().wait(&["late", "later"]).unwrap());
        let pop = scope.spawn(|| place.open().queue_pop("queue").unwrap());
        let many = scope.spawn(|| place.open().multi_get(&["later", "late"]).unwrap());
        let store = place.open();
        thread::sleep(SHORT);
        store.set("late", b"1").unwrap();
        store.queue_push("queue", b"element").unwrap();
        store.set("later", b"2").unwrap();
        assert_eq!(get.join().unwrap(), b"1");
        wait.join().unwrap();
        assert_eq!(pop.join().unwrap(), b"element");
        assert_eq!(many.join().unwrap(), [b"2", b"1"]);
    });
}

#[test]
fn time_limits_below_a_second_are_kept() {
    let place = Place::new();
    let store = place.open();
    store.set("there", b"1").unwrap();
    let err = took_about(SHORT, || store.get_for("k", SHORT).unwrap_err());
    assert!(err.contains("waiting for key \"k\""), "{err}");
    let err = took_about(SHORT, || {
        store.wait_for(&["there", "k"], SHORT).unwrap_err()
    });
    assert!(err.contains("waiting for key \"k\""), "{err}");
    took_about(SHORT, || {
        store.multi_get_for(&["there", "k"], SHORT).unwrap_err()
    });
    took_about(SHORT, || store.queue_pop_for("q", SHORT).unwrap_err());
    took_about(SHORT, || store.barrier_for("b", 2, SHORT).unwrap_err());
    store.set_timeout(SHORT);
    took_about(SHORT, || store.get("k").unwrap_err());
    took_about(Duration::ZERO, || {
        store.get_for("k", Duration::ZERO).unwrap_err()
    });
    assert_eq!(store.get_for("there", Duration::ZERO).unwrap(), b"1");
}

#[test]
fn waiting_for_a_lock_ends_with_the_time_limit() {
    let place = Place::new();
    let store = place.open();
    let other = place.open();
    let held = fs::File::open(&place.path).unwrap();
    held.lock().unwrap();
    store.set_timeout(SHORT);
    let err = took_about(SHORT, || store.set("k", b"v").unwrap_err());
    assert!(err.contains("the lock on "), "{err}");
    took_about(SHORT, || {
        FileStore::open_for(&place.path, None, SHORT).unwrap_err()
    });
    held.unlock().unwrap();
    store.set("k", b"v").unwrap();

    held.lock_shared().unwrap();
    assert_eq!(other.get("k").unwrap(), b"v", "readers share");
    took_about(SHORT, || store.add("n", 1).unwrap_err());
    held.unlock().unwrap();
}

#[test]
fn queues_are_first_in_first_out() {
    let place = Place::new();
    let (one, two) = (place.open(), place.open());
    assert_eq!(one.queue_try_pop("q").unwrap(), None);
    for i in 0..5u8 {
        one.queue_push("q", &[i]).unwrap();
    }
    one.queue_push("other", b"").unwrap();
    assert_eq!(two.queue_len("q").unwrap(), 5);
    assert!(two.check(&["q"]).unwrap());
    for i in 0..5u8 {
        let popper = if i % 2 == 0 { &one } else { &two };
        assert_eq!(popper.queue_try_pop("q").unwrap(), Some(vec![i]));
    }
    assert_eq!(one.queue_len("q").unwrap(), 0);
    assert_eq!(one.queue_pop("other").unwrap(), b"");
}

#[test]
fn every_element_goes_to_exactly_one_popper() {
    const ELEMENTS: usize = 200;
    let place = Place::new();
    let popped: Vec<Vec<u8>> = thread::scope(|scope| {
        let pop_some = || {
            let store = place.open();
            let pop = || Some(store.queue_pop("q").unwrap()).filter(|value| value != b"stop");
            std::iter::from_fn(pop).collect::<Vec<_>>()
        };
        let poppers: Vec<_> = (0..3).map(|_| scope.spawn(pop_some)).collect();
        let store = place.open();
        for i in 0..ELEMENTS {
            store.queue_push("q", i.to_string().as_bytes()).unwrap();
        }
        for _ in 0..poppers.len() {
            store.queue_push("q", b"stop").unwrap();
        }
        poppers
            .into_iter()
            .flat_map(|p| p.join().unwrap())
            .collect()
    });
    assert_eq!(popped.len(), ELEMENTS);
    assert_eq!(popped.into_iter().collect::<BTreeSet<_>>().len(), ELEMENTS);
}

#[test]
fn a_barrier_lets_nobody_through_before_the_last() {
    let place = Place::new();
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let store = place.open();
                store.add("arrived", 1).unwrap();
                store.barrier("meet", 3).unwrap();
                assert_eq!(store.get("arrived").unwrap(), b"3");
            });
        }
    });
}

#[test]
fn threads_on_shared_and_on_own_handles_lose_no_addition() {
    let place = Place::new();
    let shared = Arc::new(place.open());
    thread::scope(|scope| {
        for i in 0..4 {
            let shared = Arc::clone(&shared);
            let place = &place;
            scope.spawn(move || {
                let own = place.open();
                let store: &FileStore = if i % 2 == 0 { &shared } else { &own };
                for _ in 0..100 {
                    store.add("n", 1).unwrap();
                }
            });
        }
    });
    assert_eq!(shared.get("n").unwrap(), b"400");
}

#[test]
fn a_prefix_keeps_names_apart() {
    let place = Place::new();
    let store: Arc<dyn Store> = Arc::new(place.open());
    let inner = PrefixStore::new("group", Arc::clone(&store));
    inner.set("k", b"v").unwrap();
    assert_eq!(store.get("group/k").unwrap(), b"v");
}

#[test]
fn the_last_member_of_the_world_removes_the_file() {
    let place = Place::new();
    let open = || FileStore::open(&place.path, Some(2)).unwrap();
    let one = open();
    drop(one.second_handle().unwrap());
    drop(one);
    assert!(place.path.exists(), "the second member has not come yet");
    let two = open();
    let three = open();
    drop(two);
    assert!(place.path.exists(), "the third handle is still open");
    drop(three);
    assert!(!place.path.exists());
}

#[test]
fn whoever_opens_while_the_last_user_leaves_has_a_store_that_works() {
    let place = Place::new();
    thread::scope(|scope| {
        for name in ["a", "b", "c"] {
            let path = &place.path;
            scope.spawn(move || {
                for _ in 0..100 {
                    let store = FileStore::open(path, Some(1)).unwrap();
                    store.set(name, b"here").unwrap();
                    assert_eq!(store.get(name).unwrap(), b"here");
                }
            });
        }
    });
    assert!(!place.path.exists());
}

#[test]
fn without_a_world_size_the_file_stays() {
    let place = Place::new();
    place.open().set("k", b"v").unwrap();
    assert!(place.path.exists());
    assert_eq!(place.open().get("k").unwrap(), b"v");
}

#[test]
fn the_file_belongs_to_its_owner_alone() {
    let place = Place::new();
    let _store = place.open();
    let mode = fs::metadata(&place.path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn links_and_things_that_are_no_files_are_refused() {
    let place = Place::new();
    let refusal = |path: &Path| FileStore::open(path, None).unwrap_err().to_string();
    let dir = place.path.parent().unwrap();
    fs::write(dir.join("victim"), b"").unwrap();
    symlink(dir.join("victim"), dir.join("soft")).unwrap();
    symlink(dir.join("missing"), dir.join("dangling")).unwrap();
    fs::hard_link(dir.join("victim"), dir.join("hard")).unwrap();
    assert!(refusal(&dir.join("soft")).contains("symbolic link"));
    assert!(refusal(&dir.join("dangling")).contains("symbolic link"));
    assert!(!dir.join("missing").exists());
    assert!(refusal(&dir.join("hard")).contains("hard link"));
    assert!(refusal(Path::new("/dev/null")).contains("not a regular file"));
    assert!(refusal(dir).contains("opening the store file"));
    assert_eq!(fs::metadata(dir.join("victim")).unwrap().len(), 0);
}

#[test]
fn another_users_file_is_refused() {
    let place = Place::new();
    fs::write(&place.path, b"").unwrap();
    if fs::metadata(&place.path).unwrap().uid() != 0 {
        eprintln!("skipped: only root can give a file away");
        return;
    }
    std::os::unix::fs::chown(&place.path, Some(12345), None).unwrap();
    let err = FileStore::open(&place.path, None).unwrap_err().to_string();
    assert!(err.contains("it belongs to user 12345"), "{err}");
}

#[test]
fn a_file_that_is_removed_replaced_or_emptied_is_an_error_not_a_mixture() {
    let place = Place::new();
    let store = place.open();
    store.set("k", b"v").unwrap();

    let moved = place.path.with_extension("moved");
    fs::rename(&place.path, &moved).unwrap();
    let err = store.get("k").unwrap_err().to_string();
    assert!(err.contains("removed or replaced"), "{err}");
    let other = place.open();
    let err = store.set("k", b"w").unwrap_err().to_string();
    assert!(err.contains("removed or replaced"), "{err}");
    drop(other);
    fs::rename(&moved, &place.path).unwrap();
    assert_eq!(store.get("k").unwrap(), b"v");

    fs::File::options()
        .write(true)
        .open(&place.path)
        .unwrap()
        .set_len(0)
        .unwrap();
    let err = store.get("k").unwrap_err().to_string();
    assert!(err.contains("it shrank to 0 bytes"), "{err}");
    fs::remove_file(&place.path).unwrap();
}

#[test]
fn a_file_made_by_pytorch_is_read_and_continued() {
    let place = Place::new();
    fs::write(&place.path, MADE_BY_PYTORCH).unwrap();
    let store = place.open();
    let get = |key| store.get_for(key, Duration::ZERO).unwrap();
    // set twice, set empty, set the empty key
    assert_eq!(get("greeting"), b"good morning");
    assert_eq!(get("empty"), b"");
    assert_eq!(get(""), b"empty key");
    // add 5, add -7
    assert_eq!(get("counter"), b"-2");
    // compare_set: missing, equal, different
    assert_eq!(get("chosen"), b"second");
    // append twice
    assert_eq!(get("log"), b"one,two,");
    // multi_set of a and b, delete_key of a and of one that never was
    assert!(!store.check(&["a"]).unwrap());
    assert_eq!(get("b"), b"2");
    assert_eq!(get("umlaut/ü"), "grün".as_bytes());
    // a barrier of one, a clone that was dropped, one more set, and death without a farewell
    store.barrier_for("meet", 1, Duration::ZERO).unwrap();
    assert_eq!(get("last"), b"record");
    assert_eq!(store.num_keys().unwrap(), 11);
    assert_eq!(store.add("counter", 1).unwrap(), -1);

    let bytes = fs::read(&place.path).unwrap();
    assert_eq!(&bytes[..MADE_BY_PYTORCH.len()], MADE_BY_PYTORCH);
    let second_open_handle = b"\x09\0\0\0refcount/\x01\0\0\x002";
    assert!(bytes[MADE_BY_PYTORCH.len()..].starts_with(second_open_handle));
}

/// The environment variable that turns a test of this binary into a child process.
const CHILD: &str = "PHALANX_FILESTORE_TEST_CHILD";

/// Runs one test of this binary in a process of its own, with the path of a store.
fn spawn(test: &str, path: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--ignored"])
        .env(CHILD, path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn child_store() -> Option<FileStore> {
    let path = std::env::var_os(CHILD)?;
    Some(FileStore::open_for(path, None, Duration::from_secs(20)).unwrap())
}

#[test]
#[ignore = "the child process of another test"]
fn child_that_adds() {
    let Some(store) = child_store() else { return };
    for _ in 0..200 {
        store.add("n", 1).unwrap();
    }
}

#[test]
fn processes_adding_at_the_same_time_lose_nothing() {
    let place = Place::new();
    let store = place.open();
    let children: Vec<Child> = (0..3)
        .map(|_| spawn("child_that_adds", &place.path))
        .collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(store.get_for("n", Duration::ZERO).unwrap(), b"600");
}

#[test]
#[ignore = "the child process of another test"]
fn child_that_writes_until_killed() {
    let Some(store) = child_store() else { return };
    let mut out = std::io::stdout();
    for i in 0u64.. {
        // Long values, so that death may come within one.
        let value = vec![i as u8; 64 << 10];
        store.set(&format!("k{}", i % 512), &value).unwrap();
        store.queue_push("q", &i.to_le_bytes()).unwrap();
        writeln!(out, "acknowledged {i}").unwrap();
        out.flush().unwrap();
    }
}

#[test]
fn a_writer_killed_at_any_moment_loses_nothing_it_acknowledged() {
    for round in 0..5u64 {
        let place = Place::new();
        let watcher = place.open();
        let mut child = spawn("child_that_writes_until_killed", &place.path);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let number = |line: String| line.strip_prefix("acknowledged ")?.parse::<u64>().ok();
        let first = lines.by_ref().map_while(Result::ok).find_map(number);
        assert_eq!(first, Some(0));
        thread::sleep(Duration::from_micros(20_000 + 7_300 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        let last = lines.map_while(Result::ok).filter_map(number).last();
        let last = last.unwrap_or(0);

        // A writer that joins after the death, and a reader that was there before it.
        let heir = place.open();
        heir.set("heir", b"1").unwrap();
        assert_eq!(watcher.get("heir").unwrap(), b"1");
        for store in [&heir, &watcher] {
            let len = store.queue_len("q").unwrap() as u64;
            assert!(len > last, "{len} elements, {last} acknowledged");
            for i in last.saturating_sub(500)..=last {
                let value = store.get_for(&format!("k{}", i % 512), Duration::ZERO);
                let value = value.unwrap();
                assert_eq!(value.len(), 64 << 10);
                assert!(value.iter().all(|byte| *byte == value[0]));
            }
        }
        for i in 0..=last {
            assert_eq!(
                watcher.queue_try_pop("q").unwrap().unwrap(),
                i.to_le_bytes()
            );
        }
    }
}
