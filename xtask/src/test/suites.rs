//! The table of suites.

use super::Args;
use crate::nccl;
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

/// Something that a suite cannot do without and that a machine may lack.
pub(super) struct Need {
    what: &'static str,
    is_there: fn() -> bool,
    how_to_get: &'static str,
}

impl Need {
    /// What to tell the reader if it is not there.
    pub(super) fn missing(&self) -> Option<String> {
        let Self {
            what, how_to_get, ..
        } = self;
        (!(self.is_there)()).then(|| format!("no {what}; {how_to_get}"))
    }
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
            vec![clippy.args(lints)]
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
            vec![
                left_out
                    .iter()
                    .fold(test, |test, package| test.args(["--exclude", package])),
            ]
        },
    },
    Suite {
        name: "features",
        about: "the facade with no feature, with each alone, with all; features of the backends",
        quick: true,
        needs: &[CLIPPY],
        commands: |_| {
            let facade = ["--package", "phalanx", "--lib", "--no-default-features"];
            let each = FEATURES.iter().map(|feature| vec!["--features", *feature]);
            let choices = [vec![], vec!["--all-features"]].into_iter().chain(each);
            let lint = |choice: Vec<&str>| {
                let clippy = Cmd::cargo().arg("clippy").args(facade).args(choice);
                clippy.args(["--", "-D", "warnings"])
            };
            let bare = Cmd::cargo().arg("test").args(facade);
            let slices = ["--package", "phalanx-nccl", "--features", "cudarc-0_19"];
            let slices = Cmd::cargo().arg("test").args(slices);
            let slices = slices.args(["--test", "emulated", "slices::"]);
            choices.map(lint).chain([bare, slices]).collect()
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
        commands: |_| {
            let doc = Cmd::cargo().args(["doc", "--workspace", "--no-deps"]);
            vec![doc.env("RUSTDOCFLAGS", "-D warnings")]
        },
    },
];

/// The features of the facade, but for `default`; a test keeps the list complete.
const FEATURES: &[&str] = &["native", "nccl", "reference"];

/// Packages that `--quick` leaves out: those that need C libraries or a training framework.
const NOT_QUICK: &[&str] = &[];

const RUSTFMT: Need = Need {
    what: "rustfmt",
    is_there: || Cmd::cargo().args(["fmt", "--version"]).succeeds(),
    how_to_get: "rustup component add rustfmt",
};

const CLIPPY: Need = Need {
    what: "clippy",
    is_there: || Cmd::cargo().args(["clippy", "--version"]).succeeds(),
    how_to_get: "rustup component add clippy",
};

const NCCL: Need = Need {
    what: "NCCL in the cache directory",
    is_there: nccl::is_there,
    how_to_get: "`cargo xtask test --require-all` fetches it (305 MB)",
};

const C_COMPILER: Need = Need {
    what: "C compiler",
    is_there: || Cmd::new("cc").arg("--version").succeeds(),
    how_to_get: "on Debian: apt-get install gcc",
};

const NAMESPACES: Need = Need {
    what: "network namespaces",
    is_there: || {
        let line = "unshare --net true && command -v nsenter && command -v ip";
        Cmd::new("sh").args(["-c", line]).succeeds()
    },
    how_to_get: "run as root, with util-linux and iproute2",
};

/// For the command line's help and checks.
pub(super) fn names() -> Vec<&'static str> {
    SUITES.iter().map(|suite| suite.name).collect()
}

#[cfg(test)]
mod tests {
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
        assert_eq!(names, FEATURES);
    }
}
