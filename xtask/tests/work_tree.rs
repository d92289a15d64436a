//! Where `cargo xtask` works and builds, however it is started.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The lines with which `cargo xtask test --only fmt` says where it is.
struct Start {
    command: Command,
}

impl Start {
    /// As from a shell, in a directory, with no variable of cargo's but its program.
    fn inside(dir: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command.args(["test", "--only", "fmt"]).current_dir(dir);
        for name in [
            "CARGO_MANIFEST_DIR",
            "CARGO_TARGET_DIR",
            "CARGO_BUILD_TARGET_DIR",
        ] {
            command.env_remove(name);
        }
        Self { command }
    }

    fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Work tree and target directory.
    fn says(mut self) -> (PathBuf, PathBuf) {
        let output = self.command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let after = |prefix: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(prefix));
            PathBuf::from(line.unwrap_or_else(|| panic!("no line {prefix:?}:\n{text}")))
        };
        (after("work tree "), after("built in "))
    }
}

/// The top of the work tree, by the way of this package.
fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .into()
}

#[test]
fn the_work_tree_is_the_same_from_a_test_a_shell_and_another_directory() {
    let elsewhere = tempfile::tempdir().unwrap();
    let tree = |start: Start| start.says().0;
    for dir in [&top(), &top().join("crates/phalanx"), elsewhere.path()] {
        assert_eq!(tree(Start::inside(dir)), top(), "in {}", dir.display());
    }
    for package in ["xtask", "tests/with-burn"] {
        let start = Start::inside(elsewhere.path());
        let start = start.env("CARGO_MANIFEST_DIR", top().join(package));
        assert_eq!(tree(start), top(), "as a test of {package}");
    }
    // Some other project's cargo.
    let start = Start::inside(&top()).env("CARGO_MANIFEST_DIR", elsewhere.path());
    assert_eq!(tree(start), top());
}

#[test]
fn the_target_directory_is_the_one_that_cargo_builds_in() {
    let inside = || Start::inside(&top().join("tests"));
    let built = |start: Start| start.says().1;
    let relative = inside().env("CARGO_TARGET_DIR", "some/where");
    assert_eq!(built(relative), top().join("some/where"));
    let absolute = inside().env("CARGO_TARGET_DIR", "/some where");
    assert_eq!(built(absolute), Path::new("/some where"));
    let configured = inside().env("CARGO_BUILD_TARGET_DIR", "/configured");
    assert_eq!(built(configured), Path::new("/configured"));
}

#[test]
fn a_program_that_another_clone_built_works_in_the_clone_that_it_is_started_in() {
    let clone = tempfile::tempdir().unwrap();
    let clone = clone.path().canonicalize().unwrap();
    for file in ["xtask/src/shell.rs", "crates/phalanx/Cargo.toml"] {
        let file = clone.join(file);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, "").unwrap();
    }
    std::fs::write(clone.join("Cargo.toml"), "[workspace]\n").unwrap();
    assert_eq!(Start::inside(&clone.join("crates")).says().0, clone);
}
