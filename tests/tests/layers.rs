//! Keeps the layers apart: which crate may depend on which, and which does without `unsafe`.
//!
//! A new crate fails here until it has been entered, so that its place is a decision.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The place of one crate.
struct Rule {
    name: &'static str,
    /// The crates of this workspace that it may depend on, other than for its tests.
    may_know: &'static [&'static str],
    /// Whether `unsafe` is forbidden in it.
    safe: bool,
}

const fn safe(name: &'static str, may_know: &'static [&'static str]) -> Rule {
    Rule {
        name,
        may_know,
        safe: true,
    }
}

const fn with_unsafe(name: &'static str, may_know: &'static [&'static str]) -> Rule {
    Rule {
        name,
        may_know,
        safe: false,
    }
}

const CORE: &[&str] = &["phalanx-pg", "phalanx-store"];

const DDP: &[&str] = &[
    "phalanx-ddp",
    "phalanx-reducer",
    "phalanx-pg",
    "phalanx-store",
];

/// The facade and all parts of the product: only the program may name them all.
const PRODUCT: &[&str] = &[
    "phalanx",
    "phalanx-burn",
    "phalanx-candle",
    "phalanx-ddp",
    "phalanx-reducer",
    "phalanx-reference",
    "phalanx-native",
    "phalanx-gloo",
    "phalanx-mpi",
    "phalanx-nccl",
    "phalanx-pg",
    "phalanx-store",
];

/// What tests across crates need to run what they build.
const TESTS: &[&str] = &[
    "phalanx",
    "phalanx-ddp",
    "phalanx-reference",
    "phalanx-testkit",
];

/// What the facade puts together.
const PARTS: &[&str] = match PRODUCT.split_first() {
    Some((_facade, parts)) => parts,
    None => &[],
};

const RULES: &[Rule] = &[
    safe("phalanx-store", &[]),
    with_unsafe("phalanx-pg", &["phalanx-store"]),
    // Backends know the trait that they implement, and not each other.
    safe("phalanx-reference", CORE),
    with_unsafe("phalanx-native", CORE),
    with_unsafe("gloo-sys", &[]),
    with_unsafe("phalanx-gloo", &["gloo-sys", "phalanx-pg", "phalanx-store"]),
    with_unsafe("phalanx-mpi", CORE),
    with_unsafe("nccl-sys", &[]),
    with_unsafe("phalanx-nccl", &["nccl-sys", "phalanx-pg", "phalanx-store"]),
    // Libraries for tests only, which nothing depends on but tests.
    with_unsafe("emu-cuda", &[]),
    with_unsafe("emu-nccl", &["nccl-sys", "phalanx-pg"]),
    safe("phalanx-reducer", CORE),
    safe(
        "phalanx-ddp",
        &["phalanx-reducer", "phalanx-pg", "phalanx-store"],
    ),
    safe("phalanx-burn", DDP),
    safe("phalanx-candle", DDP),
    safe("phalanx", PARTS),
    safe("phalanx-cli", PRODUCT),
    safe("phalanx-with-burn", &["phalanx", "phalanx-burn"]),
    safe("phalanx-with-candle", &["phalanx", "phalanx-candle"]),
    // Tools for tests, of use to whoever writes a store or a backend.
    safe("phalanx-testkit", &["phalanx-store"]),
    safe(
        "phalanx-conformance",
        &["phalanx-testkit", "phalanx-pg", "phalanx-store"],
    ),
    safe("phalanx-tests", TESTS),
    safe("xtask", &["phalanx-testkit", "phalanx-store"]),
];

/// What this test needs to know of a crate.
#[derive(Default)]
struct Package {
    /// Names of crates of this workspace, other than for tests.
    depends_on: Vec<String>,
    /// The files in which its libraries and programs begin, with their text.
    roots: Vec<(String, String)>,
}

type Workspace = BTreeMap<String, Package>;

fn violations(workspace: &Workspace) -> Vec<String> {
    let mut found = Vec::new();
    for (name, package) in workspace {
        let Some(rule) = RULES.iter().find(|rule| rule.name == name) else {
            found.push(format!("{name} has no place yet: enter it into RULES"));
            continue;
        };
        for other in &package.depends_on {
            if !rule.may_know.contains(&other.as_str()) {
                found.push(format!("{name} must not depend on {other}"));
            }
        }
        for (file, text) in &package.roots {
            let forbids = text.lines().any(|line| line == "#![forbid(unsafe_code)]");
            if rule.safe && !forbids {
                found.push(format!("{file} lacks #![forbid(unsafe_code)]"));
            }
        }
    }
    found
}

fn metadata(dir: &Path) -> Value {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(dir)
        .output()
        .expect("run cargo metadata");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo metadata: {errors}");
    serde_json::from_slice(&output.stdout).expect("cargo metadata is JSON")
}

fn workspace() -> Workspace {
    let metadata = metadata(Path::new(env!("CARGO_MANIFEST_DIR")));
    let packages = list(&metadata["packages"]);
    let names: Vec<&str> = packages.iter().map(|p| text(&p["name"])).collect();
    packages
        .iter()
        .map(|p| (text(&p["name"]).to_owned(), package(p, &names)))
        .collect()
}

fn package(metadata: &Value, names: &[&str]) -> Package {
    let dependencies = list(&metadata["dependencies"]).iter();
    let depends_on = dependencies
        .filter(|d| d["kind"] != "dev")
        .map(|d| text(&d["name"]).to_owned())
        .filter(|name| names.contains(&name.as_str()));
    let targets = list(&metadata["targets"]).iter();
    let roots = targets
        .filter(|t| list(&t["kind"]).iter().any(|k| k == "lib" || k == "bin"))
        .map(|t| {
            let path = text(&t["src_path"]).to_owned();
            let source = std::fs::read_to_string(&path).expect("read a crate's root");
            (path, source)
        });
    Package {
        depends_on: depends_on.collect(),
        roots: roots.collect(),
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list in cargo metadata")
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a text in cargo metadata")
}

#[test]
fn every_crate_knows_only_what_it_may() {
    let workspace = workspace();
    assert!(workspace.contains_key("phalanx-store"), "no crates found");
    let found = violations(&workspace);
    assert!(found.is_empty(), "{}", found.join("\n"));
}

fn files_below(dir: &Path) -> Vec<PathBuf> {
    let entries = dir.read_dir().expect("the crate's files");
    let paths = entries.map(|entry| entry.expect("a file").path());
    paths
        .flat_map(|path| match path.is_dir() {
            true => files_below(&path),
            false => vec![path],
        })
        .collect()
}

#[test]
fn process_groups_have_unsafe_code_in_two_files() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/process-group/src");
    let root = std::fs::read_to_string(source.join("lib.rs")).expect("the crate's root");
    assert!(root.contains("\n#![deny(unsafe_code)]\n"));
    let mut excepted = Vec::new();
    for file in files_below(&source) {
        let text = std::fs::read_to_string(file).expect("a source file");
        let lines: Vec<&str> = text.lines().collect();
        let pairs = lines.windows(2);
        let lifted = pairs.filter(|pair| {
            ["#[expect(unsafe_code", "#[allow(unsafe_code"]
                .iter()
                .any(|lift| pair[0].trim_start().starts_with(lift))
        });
        excepted.extend(lifted.map(|pair| pair[1].to_owned()));
    }
    assert_eq!(excepted, ["mod buffer;", "mod lines;"]);
}

#[test]
fn the_consumer_knows_the_facade_only() {
    let consumer = Path::new(env!("CARGO_MANIFEST_DIR")).join("consumer");
    let metadata = metadata(&consumer);
    let packages = list(&metadata["packages"]);
    assert_eq!(packages.len(), 1, "it is a workspace of its own");
    let dependencies = list(&packages[0]["dependencies"]).iter();
    let names: Vec<&str> = dependencies
        .filter(|dependency| dependency["kind"] != "dev")
        .map(|dependency| text(&dependency["name"]))
        .collect();
    assert_eq!(names, ["phalanx"]);
}

#[test]
fn a_breach_is_found() {
    let package = |depends_on: &[&str], text: &str| Package {
        depends_on: depends_on.iter().map(|&name| name.into()).collect(),
        roots: vec![("lib.rs".into(), text.into())],
    };
    let forbid = "//! Text.\n#![forbid(unsafe_code)]\n";
    let breaches = [
        ("phalanx-store", package(&["phalanx-pg"], forbid)),
        ("phalanx-native", package(&["phalanx-gloo"], forbid)),
        ("phalanx-reducer", package(&["phalanx-native"], forbid)),
        ("phalanx-ddp", package(&["phalanx-testkit"], forbid)),
        (
            "phalanx-testkit",
            package(&[], "// #![forbid(unsafe_code)]\n"),
        ),
        ("phalanx-unheard-of", package(&[], forbid)),
    ];
    for (name, package) in breaches {
        let found = violations(&Workspace::from([(name.into(), package)]));
        assert_eq!(found.len(), 1, "{name}: {found:?}");
    }
    let fine = [
        (
            "phalanx-ddp",
            package(&["phalanx-reducer", "phalanx-store"], forbid),
        ),
        ("phalanx-cli", package(&["phalanx", "phalanx-nccl"], forbid)),
        ("phalanx-native", package(&["phalanx-pg"], "")),
    ];
    for (name, package) in fine {
        let found = violations(&Workspace::from([(name.into(), package)]));
        assert!(found.is_empty(), "{name}: {found:?}");
    }
}

#[test]
fn no_rule_lets_a_layer_know_what_lies_above_it() {
    // Each rule may only name crates that stand before it in the table: no circle is possible.
    for (i, rule) in RULES.iter().enumerate() {
        for other in rule.may_know {
            let place = RULES.iter().position(|rule| rule.name == *other);
            assert!(
                place.is_some_and(|place| place < i),
                "{} may know {other}",
                rule.name
            );
        }
    }
}
