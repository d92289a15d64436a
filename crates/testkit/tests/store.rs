//! Every world has a store of its own, which the ranks find as `torchrun`'s workers find theirs.

use std::sync::Arc;
use std::time::Duration;

use phalanx_store::{JobToken, Store, StoreError, TcpStore, TcpStoreOptions};
use phalanx_testkit::{Rank, World};

/// What a program does that knows nothing of the harness.
fn options_from_env(ctx: &Rank) -> TcpStoreOptions {
    assert_eq!(ctx.var("TORCHELASTIC_USE_AGENT_STORE"), "True");
    assert_eq!(ctx.var("TORCHELASTIC_RESTART_COUNT"), "0");
    let port = ctx.var("MASTER_PORT").parse().unwrap();
    TcpStoreOptions::new(ctx.var("MASTER_ADDR"), port)
}

#[test]
fn ranks_meet_in_the_store_of_their_world() {
    World::new(3).run(|ctx| {
        let store = ctx.store();
        store.barrier("start", ctx.size()).unwrap();
        if ctx.rank() == 1 {
            let own = TcpStore::connect(&options_from_env(ctx)).unwrap();
            own.set("word", b"phalanx").unwrap();
        }
        assert_eq!(store.get("word").unwrap(), b"phalanx");
        assert!(Arc::ptr_eq(&store, &ctx.store()));
    });
}

#[test]
fn worlds_do_not_see_each_others_keys() {
    for _ in 0..2 {
        World::new(2).run(|ctx| {
            let arrived = ctx.store().add("arrived", 1).unwrap();
            assert!(arrived <= 2, "{arrived}");
            ctx.store().barrier("all", 2).unwrap();
            assert_eq!(ctx.store().add("arrived", 0).unwrap(), 2);
        });
    }
}

#[test]
fn a_token_given_to_the_world_guards_its_store() {
    World::new(2).env("PHALANX_TOKEN", "secret").run(|ctx| {
        ctx.store().barrier("all", 2).unwrap();
        let mut options = options_from_env(ctx);
        options.timeout = Duration::from_secs(10);
        options.token = Some(JobToken::new("another").unwrap());
        let refused = TcpStore::connect(&options).unwrap_err();
        assert!(matches!(refused, StoreError::Token { .. }), "{refused}");
    });
}
