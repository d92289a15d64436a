//! The store suite on every store there is, directly and below prefixes.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use phalanx_conformance::store;
use phalanx_store::{
    FileStore, HashStore, JobToken, PrefixStore, Result, Store, TcpStore, TcpStoreOptions,
    TcpStoreServer,
};

/// Runs the suite and prints what it did; a store here has no excuse to lack anything.
fn pass(name: &str, make: store::Factory<'_>) {
    let report = store::run(make);
    println!("{name}: {} cases passed", report.passed.len());
    assert_eq!(report.passed.len(), store::cases().len());
    assert!(report.skipped.is_empty(), "{:?}", report.skipped);
}

fn below(prefixes: &[&str], store: Arc<dyn Store>) -> Arc<dyn Store> {
    prefixes.iter().fold(store, |inner, prefix| {
        Arc::new(PrefixStore::new(prefix, inner))
    })
}

/// Runs the suite on `make`'s stores: as they are, below a prefix, below two.
fn pass_with_prefixes(name: &str, make: store::Factory<'_>) {
    pass(name, make);
    pass(&format!("{name} below a prefix"), &|| below(&["p"], make()));
    // Odd prefixes: empty, and one with a slash of its own.
    pass(&format!("{name} below prefixes"), &|| {
        below(&["", "q/r"], make())
    });
}

fn local() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

/// A store with a server of its own, which lives as long as any handle.
#[derive(Debug)]
struct Hosted {
    store: Arc<dyn Store>,
    server: Arc<TcpStoreServer>,
}

impl Hosted {
    fn start(token: Option<JobToken>) -> Arc<dyn Store> {
        let server = TcpStoreServer::start(&[local()], token.clone()).unwrap();
        let options = TcpStoreOptions {
            timeout: Duration::from_secs(30),
            token,
            ..TcpStoreOptions::new("127.0.0.1", server.local_addr().port())
        };
        Arc::new(Self {
            store: Arc::new(TcpStore::connect(&options).unwrap()),
            server: Arc::new(server),
        })
    }
}

/// Hands every call to the inner store.
macro_rules! forward {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($arg: $type),*) -> $result {
            self.store.$name($($arg),*)
        })*
    };
}

impl Store for Hosted {
    forward! {
        set(key: &str, value: &[u8]) -> Result<()>;
        get_for(key: &str, limit: Duration) -> Result<Vec<u8>>;
        add(key: &str, delta: i64) -> Result<i64>;
        compare_set(key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;
        check(keys: &[&str]) -> Result<bool>;
        wait_for(keys: &[&str], limit: Duration) -> Result<()>;
        delete_key(key: &str) -> Result<bool>;
        append(key: &str, value: &[u8]) -> Result<()>;
        multi_get_for(keys: &[&str], limit: Duration) -> Result<Vec<Vec<u8>>>;
        multi_set(pairs: &[(&str, &[u8])]) -> Result<()>;
        num_keys() -> Result<usize>;
        list_keys() -> Result<Vec<String>>;
        queue_push(key: &str, value: &[u8]) -> Result<()>;
        queue_try_pop(key: &str) -> Result<Option<Vec<u8>>>;
        queue_pop_for(key: &str, limit: Duration) -> Result<Vec<u8>>;
        queue_len(key: &str) -> Result<usize>;
        barrier_for(key: &str, world_size: usize, limit: Duration) -> Result<()>;
        timeout() -> Duration;
        set_timeout(limit: Duration) -> ();
    }

    fn second_handle(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(Self {
            store: self.store.second_handle()?,
            server: Arc::clone(&self.server),
        }))
    }
}

#[test]
fn hash_store_conforms() {
    pass_with_prefixes("HashStore", &|| Arc::new(HashStore::new()));
}

#[test]
fn tcp_store_conforms() {
    pass_with_prefixes("TcpStore", &|| Hosted::start(None));
}

#[test]
fn file_store_conforms() {
    let dir = tempfile::tempdir().unwrap();
    let made = AtomicUsize::new(0);
    pass_with_prefixes("FileStore", &|| {
        let name = made.fetch_add(1, Ordering::Relaxed).to_string();
        Arc::new(FileStore::open(dir.path().join(name), None).unwrap())
    });
}

#[test]
fn tcp_store_with_a_token_conforms() {
    let token = JobToken::new("secret").unwrap();
    pass("TcpStore with a token", &|| {
        Hosted::start(Some(token.clone()))
    });
}

#[test]
fn threads_as_ranks_conform() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let handle = store.second_handle().unwrap();
            handle.set_timeout(Duration::from_secs(30));
            scope.spawn(move || store::run_rank(rank, 4, &handle));
        }
    });
}

#[test]
fn a_failing_case_is_named_and_the_others_still_run() {
    let broken = || -> Arc<dyn Store> {
        let store = Hosted::start(None);
        store.set("left over from another life", b"").unwrap();
        store
    };
    let case = |name: &str| {
        let found = store::cases().into_iter().find(|case| case.name() == name);
        found.expect("a case of this name")
    };
    let failure = case("list_keys_lists_what_exists")
        .run(&broken)
        .unwrap_err();
    assert!(failure.to_string().contains("list_keys_lists_what_exists"));
    assert!(failure.to_string().contains("left over"), "{failure}");
    assert!(case("an_empty_value_is_a_value").run(&broken).is_ok());
    let all = std::panic::catch_unwind(|| store::run(&broken)).unwrap_err();
    let text = all.downcast_ref::<String>().expect("a message");
    assert!(text.contains("list_keys_lists_what_exists"), "{text}");
}

#[test]
fn case_names_are_unique() {
    let mut names: Vec<_> = store::cases().iter().map(|case| case.name()).collect();
    names.sort_unstable();
    names.iter().for_each(|name| println!("{name}"));
    names.dedup();
    assert_eq!(names.len(), store::cases().len());
}
