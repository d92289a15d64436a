//! The parity table names tests that exist.

use std::path::Path;

/// The names of all test functions under a directory.
fn tests_under(dir: &Path, names: &mut Vec<String>) {
    for entry in dir.read_dir().expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            tests_under(&path, names);
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            let text = std::fs::read_to_string(&path).expect("a source file");
            let lines: Vec<&str> = text.lines().map(str::trim).collect();
            let tests = lines.windows(2).filter(|pair| pair[0] == "#[test]");
            let named = tests.filter_map(|pair| pair[1].strip_prefix("fn ")?.split('(').next());
            names.extend(named.map(str::to_owned));
        }
    }
}

/// Words in backticks that are names of tests: long ones with underscores.
fn named(text: &str) -> impl Iterator<Item = &str> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted.filter(|word| word.matches('_').count() > 2 && word.chars().all(is_name))
}

fn is_name(c: char) -> bool {
    c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'
}

#[test]
fn every_test_in_the_parity_table_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut tests = Vec::new();
    for dir in ["crates/reducer", "crates/ddp"] {
        tests_under(&root.join(dir), &mut tests);
    }
    let table = std::fs::read_to_string(root.join("docs/ddp-parity.md")).expect("the table");
    let options = ["gradient_as_bucket_view", "can_set_static_graph"];
    let mut missing: Vec<&str> = named(&table)
        .filter(|name| !options.contains(name) && !tests.iter().any(|test| test == name))
        .collect();
    missing.dedup();
    assert!(missing.is_empty(), "{missing:?}");
    assert!(named(&table).count() > 60);
}
