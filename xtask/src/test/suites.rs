//! The table of suites.

use super::Args;
use crate::shell::Cmd;

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

/// For the command line's help and checks.
pub(super) fn names() -> Vec<&'static str> {
    SUITES.iter().map(|suite| suite.name).collect()
}
