//! The store suite between real processes.

use std::sync::Arc;
use std::time::Duration;

use phalanx_conformance::store::run_rank;
use phalanx_store::{FileStore, PrefixStore, Store};
use phalanx_testkit::{Rank, World};

/// What a rank waits for another; below the world's deadline, so that the error names the call.
const PATIENCE: Duration = Duration::from_secs(30);

fn tcp(ctx: &Rank) -> Arc<dyn Store> {
    let store = ctx.store();
    store.set_timeout(PATIENCE);
    store
}

fn file(ctx: &Rank) -> Arc<dyn Store> {
    let path = ctx.dir().join("store");
    let store = FileStore::open(path, Some(ctx.size())).unwrap();
    store.set_timeout(PATIENCE);
    Arc::new(store)
}

#[test]
fn ranks_meet_in_a_tcp_store() {
    World::new(4).run(|ctx| run_rank(ctx.rank(), ctx.size(), &tcp(ctx)));
}

#[test]
fn ranks_meet_in_a_file_store() {
    World::new(4).run(|ctx| run_rank(ctx.rank(), ctx.size(), &file(ctx)));
}

#[test]
fn ranks_meet_below_prefixes() {
    World::new(3).run(|ctx| {
        for store in [tcp(ctx), file(ctx)] {
            let inner = Arc::new(PrefixStore::new("q", store));
            let outer: Arc<dyn Store> = Arc::new(PrefixStore::new("p", inner));
            run_rank(ctx.rank(), ctx.size(), &outer);
        }
    });
}

#[test]
fn a_world_of_one_meets_itself() {
    World::new(1).run(|ctx| {
        run_rank(ctx.rank(), ctx.size(), &tcp(ctx));
        run_rank(ctx.rank(), ctx.size(), &file(ctx));
    });
}
