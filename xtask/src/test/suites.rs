//! The table of suites.

use super::Args;
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
        about: "the facade with no feature, with each alone, with all but the frameworks",
        quick: true,
        needs: &[CLIPPY],
        commands: |_| {
            let facade = ["--package", "phalanx", "--lib", "--no-default-features"];
            let each = FEATURES.iter().map(|feature| vec!["--features", *feature]);
            let all = FEATURES.join(",");
            let choices = [vec![], vec!["--features", &all]].into_iter().chain(each);
            let lint = |choice: Vec<&str>| {
                let clippy = Cmd::cargo().arg("clippy").args(facade).args(choice);
                clippy.args(["--", "-D", "warnings"])
            };
            let bare = Cmd::cargo().arg("test").args(facade);
            choices.map(lint).chain([bare]).collect()
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

/// A command of cargo's on the whole workspace, or with `--quick` on what is quick to build.
fn workspace(args: &Args, command: &str) -> Cmd {
    let cargo = Cmd::cargo().args([command, "--workspace"]);
    match args.quick {
        false => cargo,
        true => {
            let excludes = NOT_QUICK.iter().flat_map(|package| ["--exclude", package]);
            cargo.args(excludes).env(WITHOUT, NOT_QUICK.join(","))
        }
    }
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

/// The features of the facade, but for `default`; a test keeps the lists complete.
const FEATURES: &[&str] = &["native", "reference"];
const FRAMEWORKS: &[&str] = &["burn", "candle"];

/// Packages that `--quick` leaves out: those that need C libraries or a training framework.
const NOT_QUICK: &[&str] = &[
    "phalanx-burn",
    "phalanx-candle",
    "phalanx-with-burn",
    "phalanx-with-candle",
];

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
        assert_eq!(names, [FEATURES, FRAMEWORKS].concat());
    }
}
