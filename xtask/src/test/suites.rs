//! The table of suites.

use super::Args;
use super::needs::{CLIPPY, GLOO, MPI, NAMESPACES, Need, RUSTFMT};
use crate::shell::{Cmd, target_dir};

/// One line of the final table: what is run, and what must be there for it.
pub(super) struct Suite {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    /// Whether it is part of `--quick`.
    pub(super) quick: bool,
    pub(super) needs: &'static [Need],
    /// Run one after the other; each counts the tests that it reports, or else as one.
    pub(super) commands: fn(&Args) -> Vec<Cmd>,
}

pub(super) const SUITES: &[Suite] = &[
    Suite {
        name: "fmt",
        about: "source format",
        quick: true,
        needs: &[RUSTFMT],
        commands: |_| vec![Cmd::cargo().args(["fmt", "--all", "--check"])],
    },
    Suite {
        name: "clippy",
        about: "lints",
        quick: true,
        needs: &[CLIPPY],
        commands: |_| {
            let lints = ["--", "-D", "warnings"];
            let clippy = Cmd::cargo().args(["clippy", "--workspace", "--all-targets"]);
            vec![rust_alone(clippy).args(lints)]
        },
    },
    Suite {
        name: "tests",
        about: "unit, multi-process and doc tests, bounded runs of the fuzz bodies",
        quick: true,
        needs: &[],
        commands: |args| {
            let left_out = if args.quick { NOT_QUICK } else { &[] };
            let test = Cmd::cargo().args(["test", "--workspace", "--no-fail-fast"]);
            vec![without(left_out, rust_alone(test))]
        },
    },
    Suite {
        name: "features",
        about: "the facade with no feature, with each alone, with all that are Rust alone",
        quick: true,
        needs: &[CLIPPY],
        commands: |_| {
            let facade = ["--package", "phalanx", "--lib", "--no-default-features"];
            let each = FEATURES.iter().map(|feature| (*feature).to_owned());
            let choices = [String::new(), FEATURES.join(",")].into_iter().chain(each);
            let bare = Cmd::cargo().arg("test").args(facade);
            choices
                .map(|features| lint_facade(&features))
                .chain([bare])
                .collect()
        },
    },
    Suite {
        name: "consumer",
        about: "a crate outside the workspace with a backend of its own: lints, format, tests",
        quick: true,
        needs: &[RUSTFMT, CLIPPY],
        commands: |_| {
            let cargo = |args: &[&str]| {
                // Below the other's, which is what CI keeps.
                let target = target_dir().join("consumer");
                Cmd::cargo()
                    .args(args)
                    .inside("tests/consumer")
                    .env("CARGO_TARGET_DIR", target)
            };
            vec![
                cargo(&["fmt", "--check"]),
                cargo(&[
                    "clippy",
                    "--locked",
                    "--all-targets",
                    "--",
                    "-D",
                    "warnings",
                ]),
                cargo(&["test", "--locked", "--no-fail-fast"]),
            ]
        },
    },
    Suite {
        name: "namespaces",
        about: "the process group suite of the native backend across network namespaces",
        quick: false,
        needs: &[NAMESPACES],
        commands: |_| {
            let test = [
                "test",
                "--package",
                "phalanx-native",
                "--test",
                "namespaces",
            ];
            vec![Cmd::cargo().args(test)]
        },
    },
    Suite {
        name: "gloo",
        about: "the gloo backend: lints, its tests, the process group suite, DDP, documentation",
        quick: false,
        needs: &[CLIPPY, GLOO],
        commands: |_| with_c_library("gloo", &["gloo-sys", "phalanx-gloo"]),
    },
    Suite {
        name: "mpi",
        about: "the mpi backend under mpirun: lints, its tests, the process group suite, DDP, \
                documentation",
        quick: false,
        needs: &[CLIPPY, MPI],
        commands: |_| with_c_library("mpi", &["phalanx-mpi"]),
    },
    Suite {
        name: "docs",
        about: "documentation without warnings",
        quick: true,
        needs: &[],
        commands: |_| {
            let doc = Cmd::cargo().args(["doc", "--workspace", "--no-deps"]);
            vec![rust_alone(doc).env("RUSTDOCFLAGS", "-D warnings")]
        },
    },
];

/// The features of the facade that are Rust alone; a test keeps the list complete.
const FEATURES: &[&str] = &["native", "reference"];

/// Packages that need a C library, each in a suite of its own, and the features that they are.
const C_PACKAGES: &[&str] = &["gloo-sys", "phalanx-gloo", "phalanx-mpi"];

/// Packages that `--quick` leaves out: those that need a training framework.
const NOT_QUICK: &[&str] = &[];

fn without(packages: &[&str], command: Cmd) -> Cmd {
    let exclude = |command: Cmd, package: &&str| command.args(["--exclude", package]);
    packages.iter().fold(command, exclude)
}

/// The workspace as far as it needs no C library.
fn rust_alone(command: Cmd) -> Cmd {
    without(C_PACKAGES, command)
}

fn lint_facade(features: &str) -> Cmd {
    let facade = ["--package", "phalanx", "--lib", "--no-default-features"];
    let clippy = Cmd::cargo().arg("clippy").args(facade);
    let clippy = clippy.args(["--features", features]);
    clippy.args(["--", "-D", "warnings"])
}

/// Everything about a backend that a C library carries.
fn with_c_library(feature: &str, packages: &[&str]) -> Vec<Cmd> {
    let on = |command: &str| {
        let command = Cmd::cargo().arg(command);
        let choose = |command: Cmd, package: &&str| command.args(["--package", package]);
        packages.iter().fold(command, choose)
    };
    // In the facade, in the program, and under what is built on groups.
    let crossing = ["--package", "phalanx-tests", "--features", feature];
    let crossing_tests = ["--test", "ddp_golden", "--test", "backends"];
    let program = ["--package", "phalanx-cli", "--features", feature];
    let lints = ["--", "-D", "warnings"];
    vec![
        on("clippy").arg("--all-targets").args(lints),
        lint_facade(feature),
        Cmd::cargo().arg("clippy").args(program).args(lints),
        on("test").arg("--no-fail-fast"),
        Cmd::cargo().arg("test").args(crossing).args(crossing_tests),
        on("doc")
            .arg("--no-deps")
            .env("RUSTDOCFLAGS", "-D warnings"),
    ]
}

/// For the command line's help and checks.
pub(super) fn names() -> Vec<&'static str> {
    SUITES.iter().map(|suite| suite.name).collect()
}

#[cfg(test)]
mod tests {
    use super::names as suites;
    use super::*;
    use crate::shell::root;

    #[test]
    fn every_feature_of_the_facade_is_checked() {
        let manifest = root().join("crates/phalanx/Cargo.toml");
        let text = std::fs::read_to_string(manifest).expect("the facade's manifest");
        let (_, features) = text
            .split_once("[features]\n")
            .expect("a table of features");
        let features = features.split("\n[").next().unwrap_or_default().lines();
        let names: Vec<&str> = features
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.split_once(" = "))
            .map(|(name, _)| name)
            .filter(|&name| name != "default")
            .collect();
        let checked = |name: &&str| FEATURES.contains(name) || suites().contains(name);
        let unchecked: Vec<_> = names.iter().filter(|name| !checked(name)).collect();
        assert!(unchecked.is_empty(), "{unchecked:?}");
    }
}
