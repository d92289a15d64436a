//! One of two members of a world that meets in a `FileStore`: the Rust side of
//! `xtask/interop/filestore.py`, call for call.
//!
//! ```text
//! filestore_peer PATH first|second
//! ```

use std::collections::BTreeSet;
use std::error::Error;
use std::time::Duration;

use phalanx_store::{FileStore, Store};

const ROLES: [&str; 2] = ["first", "second"];
const ROUNDS: usize = 200;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, role] = args.as_slice() else {
        return Err("usage: filestore_peer PATH first|second".into());
    };
    let at = ROLES.iter().position(|name| name == role);
    let other = ROLES[1 - at.ok_or("the role is first or second")?];
    let store = FileStore::open_for(path, Some(ROLES.len()), Duration::from_secs(60))?;
    let meet = |name: &str| store.barrier(&format!("meet/{name}"), ROLES.len());

    meet("start")?;
    let greeting = |role: &str| format!("greetings, {role}").into_bytes();
    store.set(&format!("from/{role}"), &greeting(role))?;
    let from_other = format!("from/{other}");
    store.wait(&[&from_other])?;
    assert_eq!(store.get(&from_other)?, greeting(other));

    for _ in 0..ROUNDS {
        store.add("sum", 1)?;
    }
    meet("sum")?;
    let sum = (2 * ROUNDS).to_string();
    assert_eq!(store.get("sum")?, sum.as_bytes());

    // Every piece differs: PyTorch drops what it appends to a key that holds just the same bytes.
    for i in 0..ROUNDS {
        store.append("log", format!("{role} {i},").as_bytes())?;
    }
    meet("log")?;
    let log = String::from_utf8(store.get("log")?)?;
    let pieces: BTreeSet<&str> = log.split_terminator(',').collect();
    let expected = ROLES
        .iter()
        .flat_map(|name| (0..ROUNDS).map(move |i| format!("{name} {i}")));
    assert_eq!(log.split_terminator(',').count(), 2 * ROUNDS);
    assert!(expected.into_iter().all(|piece| pieces.contains(&*piece)));

    let role_bytes = role.as_bytes();
    let leader = store.compare_set("leader", b"", role_bytes)?;
    meet("leader")?;
    assert_eq!(store.get("leader")?, leader);
    assert_eq!(store.compare_set("leader", b"nobody", role_bytes)?, leader);
    let missing = store.compare_set("missing", b"expected", role_bytes)?;
    assert_eq!(missing, b"expected");

    // A lock made of compare_set and delete_key guards a counter that is not updated atomically.
    store.compare_set("turns", b"", b"0")?;
    for _ in 0..ROUNDS / 4 {
        while store.compare_set("lock", b"", role_bytes)? != role_bytes {}
        let turns: usize = String::from_utf8(store.get("turns")?)?.parse()?;
        store.set("turns", (turns + 1).to_string().as_bytes())?;
        assert!(store.delete_key("lock")?);
    }
    meet("turns")?;
    let turns = 2 * (ROUNDS / 4);
    assert_eq!(store.get("turns")?, turns.to_string().as_bytes());

    if role == "first" {
        assert!(store.delete_key("from/second")?);
    }
    meet("deleted")?;
    assert!(!store.check(&["from/second"])?);
    assert!(store.check(&["from/first", "sum"])?);

    let (a, b) = (format!("a/{role}"), format!("b/{role}"));
    store.multi_set(&[(&a, b"1"), (&b, b"")])?;
    let (a, b) = (format!("a/{other}"), format!("b/{other}"));
    assert_eq!(store.multi_get(&[&b, &a])?, [b"".as_slice(), b"1"]);

    // The second counts the first one's answer too.
    meet("count")?;
    if role == "first" {
        store.set("count", store.num_keys()?.to_string().as_bytes())?;
        store.wait(&["counted"])?;
    } else {
        let count: usize = String::from_utf8(store.get("count")?)?.parse()?;
        assert_eq!(store.num_keys()? - 1, count);
        store.set("counted", b"")?;
    }

    let queue = format!("queue of {role}");
    for i in 0..3u8 {
        store.queue_push(&queue, &[i])?;
    }
    assert_eq!(store.queue_pop(&queue)?, [0]);
    meet("queues")?;
    assert_eq!(store.queue_pop(&queue)?, [1]);
    assert_eq!(store.queue_len(&queue)?, 1);
    assert_eq!(store.get("sum")?, sum.as_bytes());
    meet("end")?;
    drop(store);
    println!("ok {role}");
    Ok(())
}
