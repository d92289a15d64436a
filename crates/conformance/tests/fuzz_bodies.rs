//! The bodies of the fuzz targets on their seeds, on damaged seeds and on random bytes.

use std::path::Path;

use phalanx_conformance::fuzz;
use proptest::prelude::*;
use proptest::sample::Index;

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/seeds")
        .join(target);
    let mut paths: Vec<_> = std::fs::read_dir(dir)
        .expect("seeds are committed")
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    paths
        .iter()
        .map(|path| std::fs::read(path).unwrap())
        .collect()
}

/// A seed with bytes replaced, a stretch doubled, and an end cut off.
fn damaged(target: &str) -> impl Strategy<Value = Vec<u8>> + use<> {
    let edits = prop::collection::vec((any::<Index>(), any::<u8>()), 0..8);
    let seed = prop::sample::select(seeds(target));
    let doubled = any::<(Index, Index, Index)>();
    (seed, edits, doubled).prop_map(|(mut data, edits, (from, to, end))| {
        for (at, byte) in edits {
            let at = at.index(data.len());
            data[at] = byte;
        }
        let (from, to) = (from.index(data.len()), to.index(data.len()));
        let stretch = data[from.min(to)..from.max(to)].to_vec();
        data.splice(to..to, stretch);
        let end = end.index(2 * data.len());
        data.truncate(end.max(1));
        data
    })
}

fn input(target: &str) -> impl Strategy<Value = Vec<u8>> + use<> {
    prop_oneof![
        3 => damaged(target),
        1 => prop::collection::vec(any::<u8>(), 0..600),
        // Small numbers are opcodes and plausible lengths.
        2 => prop::collection::vec(prop_oneof![Just(0), 0..20_u8, any::<u8>()], 0..300),
    ]
}

#[test]
fn every_seed_passes() {
    type Target = (&'static str, fn(&[u8]));
    let targets: [Target; 3] = [
        ("request_parser", fuzz::request_parser),
        ("reply_parser", fuzz::reply_parser),
        ("server_state", fuzz::server_state),
    ];
    for (target, body) in targets {
        let seeds = seeds(target);
        assert!(seeds.len() > 3, "{target} has too few seeds");
        seeds.iter().for_each(|seed| body(seed));
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_request_parser_keeps_its_promises(data in input("request_parser")) {
        fuzz::request_parser(&data);
    }

    #[test]
    fn the_reply_parser_keeps_its_promises(data in input("reply_parser")) {
        fuzz::reply_parser(&data);
    }

    #[test]
    fn the_server_state_keeps_its_promises(data in input("server_state")) {
        fuzz::server_state(&data);
    }
}
