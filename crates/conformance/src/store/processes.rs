//! The same operations between processes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use phalanx_store::{PrefixStore, Store, StoreError};

use super::assert_timeout;

/// Elements that every rank pushes and pops.
const ELEMENTS: usize = 20;

/// Checks that the ranks of a world meet in their stores. Every rank calls it, in a process of its
/// own, with its handle on the one store they share; it may hold other data.
///
/// # Panics
///
/// If anything is not as it should be; other ranks may then run into their handles' timeouts.
pub fn run_rank(rank: usize, world_size: usize, store: &Arc<dyn Store>) {
    assert!(rank < world_size, "rank {rank} of {world_size}");
    let store: Arc<dyn Store> = Arc::new(PrefixStore::new("conformance", Arc::clone(store)));
    let world = World {
        rank,
        size: world_size,
        store,
    };
    world.everyone_reads_everyone();
    world.counts_add_up();
    world.one_leader();
    world.logs_are_whole();
    world.barriers_hold();
    world.queue_elements_go_to_one();
    world.a_value_goes_round();
    world.timeouts_stay_local();
    world.store.barrier("done", world_size).unwrap();
}

struct World {
    rank: usize,
    size: usize,
    store: Arc<dyn Store>,
}

impl World {
    fn keys(&self, what: &str) -> Vec<String> {
        (0..self.size).map(|r| format!("{what}/{r}")).collect()
    }

    fn everyone_reads_everyone(&self) {
        // Different lengths, so that a torn or a swapped value shows.
        let value = |rank: usize| vec![rank as u8; 1 + 1000 * rank];
        let keys = self.keys("hello");
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        self.store.set(keys[self.rank], &value(self.rank)).unwrap();
        for (rank, key) in keys.iter().enumerate() {
            assert_eq!(self.store.get(key).unwrap(), value(rank));
        }
        let values = self.store.multi_get(&keys).unwrap();
        assert_eq!(values, (0..self.size).map(value).collect::<Vec<_>>());
        assert!(self.store.check(&keys).unwrap());
        let listed = self.store.list_keys().unwrap();
        assert!(keys.iter().all(|key| listed.iter().any(|l| l == key)));
    }

    fn counts_add_up(&self) {
        let rounds = 50;
        let sums: Vec<i64> = (0..rounds)
            .map(|_| self.store.add("count", 1).unwrap())
            .collect();
        assert!(sums.is_sorted_by(|a, b| a < b), "sums went back: {sums:?}");
        self.store.barrier("counted", self.size).unwrap();
        let total = self.store.add("count", 0).unwrap();
        assert_eq!(total, (rounds * self.size) as i64);
    }

    fn one_leader(&self) {
        let me = self.rank.to_string();
        let leader = self
            .store
            .compare_set("leader", b"", me.as_bytes())
            .unwrap();
        if leader == me.as_bytes() {
            assert_eq!(self.store.add("leaders", 1).unwrap(), 1);
        }
        assert_eq!(self.store.get("leader").unwrap(), leader);
        self.store.barrier("elected", self.size).unwrap();
        assert_eq!(self.store.add("leaders", 0).unwrap(), 1);
    }

    fn logs_are_whole(&self) {
        let line = |rank: usize| format!("<{rank}:{}>", "x".repeat(rank));
        for _ in 0..10 {
            self.store
                .append("log", line(self.rank).as_bytes())
                .unwrap();
        }
        // An answered call shows that the unanswered ones before it have arrived.
        self.store.add("appended", 1).unwrap();
        self.store.barrier("logged", self.size).unwrap();
        let log = String::from_utf8(self.store.get("log").unwrap()).unwrap();
        for rank in 0..self.size {
            assert_eq!(
                log.matches(&line(rank)).count(),
                10,
                "of rank {rank} in {log}"
            );
        }
        let expected: usize = (0..self.size).map(|r| 10 * line(r).len()).sum();
        assert_eq!(log.len(), expected);
    }

    fn barriers_hold(&self) {
        for round in 0..10 {
            let before = self.store.add("before", 1).unwrap();
            assert!(
                before <= ((round + 1) * self.size) as i64,
                "somebody is a round ahead"
            );
            self.store
                .barrier(&format!("round {round}"), self.size)
                .unwrap();
            let arrived = self.store.add("before", 0).unwrap();
            assert!(
                arrived >= ((round + 1) * self.size) as i64,
                "somebody is missing"
            );
        }
    }

    fn queue_elements_go_to_one(&self) {
        if let Err(StoreError::Unsupported { .. }) = self.store.queue_len("q") {
            return;
        }
        for i in 0..ELEMENTS {
            let element = format!("{}/{i}", self.rank);
            self.store.queue_push("q", element.as_bytes()).unwrap();
        }
        for _ in 0..ELEMENTS {
            let element = self.store.queue_pop("q").unwrap();
            self.store
                .append("popped", &[&element[..], b"\n"].concat())
                .unwrap();
        }
        self.store.add("appended", 1).unwrap();
        self.store.barrier("popped all", self.size).unwrap();
        let popped = String::from_utf8(self.store.get("popped").unwrap()).unwrap();
        let popped: Vec<&str> = popped.lines().collect();
        assert_eq!(popped.len(), self.size * ELEMENTS);
        assert_eq!(popped.iter().collect::<BTreeSet<_>>().len(), popped.len());
        assert_eq!(self.store.queue_len("q").unwrap(), 0);
    }

    fn a_value_goes_round(&self) {
        // Every rank blocks until its predecessor has written.
        let keys = self.keys("ring");
        let trail = match self.rank {
            0 => Vec::new(),
            rank => self.store.get(&keys[rank - 1]).unwrap(),
        };
        let trail = [&trail[..], &[self.rank as u8]].concat();
        self.store.set(&keys[self.rank], &trail).unwrap();
        let last = self.store.get(&keys[self.size - 1]).unwrap();
        assert_eq!(last, (0..self.size).map(|r| r as u8).collect::<Vec<_>>());
    }

    fn timeouts_stay_local(&self) {
        let limit = Duration::from_millis(20);
        assert_timeout(
            self.store.get_for("nobody writes this", limit),
            "get",
            "nobody",
        );
        if self.rank == 0 {
            self.store.set("last word", b"").unwrap();
        }
        self.store.wait(&["last word"]).unwrap();
    }
}
