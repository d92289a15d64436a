//! The table of suites.

use super::Args;
use super::needs::{C_COMPILER, CLIPPY, GLOO, MPI, NAMESPACES, NCCL, Need, RUSTFMT};
use crate::nccl;
use crate::shell::{Cmd, WITHOUT, target_dir};

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
        commands: |args| {
            let clippy = frameworks(args, workspace(args, "clippy"));
            vec![clippy.args(["--all-targets", "--", "-D", "warnings"])]
        },
    },
    Suite {
        name: "tests",
        about: "unit, multi-process and doc tests, bounded runs of the fuzz bodies",
        quick: true,
        needs: &[],
        commands: |args| vec![workspace(args, "test").arg("--no-fail-fast")],
    },
    Suite {
        name: "features",
        about: "the facade with no feature, with each alone, with all that are Rust alone; features of \
                the backends",
        quick: true,
        needs: &[CLIPPY],
        commands: |args| {
            let facade = ["--package", "phalanx", "--lib", "--no-default-features"];
            let frameworks = if args.quick { &[] } else { FRAMEWORKS };
            let each = [FEATURES, frameworks].concat();
            let each = each.into_iter().map(str::to_owned);
            let choices = [String::new(), FEATURES.join(",")].into_iter().chain(each);
            let bare = Cmd::cargo().arg("test").args(facade);
            let slices = ["--package", "phalanx-nccl", "--features", "cudarc-0_19"];
            let slices = Cmd::cargo().arg("test").args(slices);
            let slices = slices.args(["--test", "emulated", "slices::"]);
            choices
                .map(|features| lint_facade(&features))
                .chain([bare, slices])
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
        name: "all-features",
        about: "the facade with all features at once",
        quick: false,
        needs: &[CLIPPY, GLOO, MPI],
        commands: |_| {
            let facade = ["--package", "phalanx", "--lib", "--all-features"];
            let clippy = Cmd::cargo().arg("clippy").args(facade);
            vec![clippy.args(["--", "-D", "warnings"])]
        },
    },
    Suite {
        name: "nccl",
        about: "nccl-sys against NVIDIA's header and library, for what it answers without a GPU",
        quick: false,
        needs: &[NCCL, C_COMPILER],
        commands: |_| {
            let test = ["test", "--package", "nccl-sys", "--test", "real_nccl"];
            let dir = nccl::dir().unwrap_or_default();
            vec![Cmd::cargo().args(test).env("NCCL_SYS_TEST_DIR", dir)]
        },
    },
    Suite {
        name: "docs",
        about: "documentation without warnings",
        quick: true,
        needs: &[],
        commands: |args| {
            let doc = frameworks(args, workspace(args, "doc"));
            vec![doc.arg("--no-deps").env("RUSTDOCFLAGS", "-D warnings")]
        },
    },
];

/// A command of cargo's on the whole workspace, as far as it needs no C library; with `--quick` on what
/// is quick to build.
fn workspace(args: &Args, command: &str) -> Cmd {
    let left_out = match args.quick {
        false => C_PACKAGES.to_vec(),
        true => [C_PACKAGES, NOT_QUICK].concat(),
    };
    let cargo = Cmd::cargo().args([command, "--workspace"]);
    let excludes = left_out.iter().flat_map(|package| ["--exclude", package]);
    cargo.args(excludes).env(WITHOUT, left_out.join(","))
}

/// The same with the facade's features for frameworks, unless the frameworks are left out. Only here:
/// the facade alone with each of them would be a second set of features, and compile them again.
fn frameworks(args: &Args, cargo: Cmd) -> Cmd {
    match args.quick {
        true => cargo,
        false => FRAMEWORKS.iter().fold(cargo, |cargo, feature| {
            cargo.args(["--features".into(), format!("phalanx/{feature}")])
        }),
    }
}

/// The features of the facade that are Rust alone; a test keeps the lists complete.
const FEATURES: &[&str] = &["native", "log", "nccl", "reference"];
const FRAMEWORKS: &[&str] = &["burn", "candle"];

/// Packages that need a C library, each in a suite of its own, and the features that they are.
const C_PACKAGES: &[&str] = &["gloo-sys", "phalanx-gloo", "phalanx-mpi"];

/// Packages that `--quick` leaves out: those that need a training framework.
const NOT_QUICK: &[&str] = &[
    "phalanx-burn",
    "phalanx-candle",
    "phalanx-with-burn",
    "phalanx-with-candle",
];

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
    let crossing_tests = ["ddp_golden", "ddp_large", "backends"].map(|name| ["--test", name]);
    let crossing_tests = crossing_tests.concat();
    let program = ["--package", "phalanx-cli", "--features", feature];
    let program_tests = ["--test", "bench_allreduce"];
    let lints = ["--", "-D", "warnings"];
    vec![
        on("clippy").arg("--all-targets").args(lints),
        lint_facade(feature),
        Cmd::cargo().arg("clippy").args(program).args(lints),
        on("test").arg("--no-fail-fast"),
        Cmd::cargo().arg("test").args(crossing).args(crossing_tests),
        Cmd::cargo().arg("test").args(program).args(program_tests),
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
        let checked = |name: &&str| {
            FEATURES.contains(name) || FRAMEWORKS.contains(name) || suites().contains(name)
        };
        let unchecked: Vec<_> = names.iter().filter(|name| !checked(name)).collect();
        assert!(unchecked.is_empty(), "{unchecked:?}");
    }
}
