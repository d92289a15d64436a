//! What a suite cannot do without and a machine may lack.

use crate::Failure;
use crate::nccl;
use crate::shell::Cmd;

/// Something that must be there for a suite.
pub(super) struct Need {
    what: &'static str,
    is_there: fn() -> bool,
    how_to_get: &'static str,
    /// The packages of Debian and Ubuntu that have it, if they may be installed here.
    packages: &'static [&'static str],
}

/// What will be done about something that is not there.
pub(super) enum Remedy {
    /// These packages are installed with apt-get.
    Install(&'static [&'static str]),
    /// The suites that need it are skipped, for this reason.
    Skip(String),
}

impl Need {
    /// What will be done about it if it is not there; nothing is done yet.
    pub(super) fn remedy(&self) -> Option<Remedy> {
        if (self.is_there)() {
            return None;
        }
        Some(match self.packages {
            packages @ [_, ..] if may_install() => Remedy::Install(packages),
            _ => Remedy::Skip(format!("no {}; {}", self.what, self.how_to_get)),
        })
    }

    /// What to tell the reader if it is not there and cannot be had.
    pub(super) fn missing(&self) -> Option<String> {
        if (self.is_there)() {
            return None;
        }
        let installed = match self.packages {
            [] => Ok(()),
            packages => install(packages),
        };
        let Self {
            what, how_to_get, ..
        } = self;
        let missing = match installed {
            Ok(()) => format!("no {what}; {how_to_get}"),
            Err(failure) => format!("no {what} ({failure}); {how_to_get}"),
        };
        (!(self.is_there)()).then_some(missing)
    }
}

/// Whether packages are installed here: as root, on Debian and Ubuntu.
fn may_install() -> bool {
    shell("test $(id -u) = 0 && apt-get --version")
}

/// Installs packages where that is known to work.
fn install(packages: &[&str]) -> Result<(), Failure> {
    if !may_install() {
        return Ok(());
    }
    println!(
        "installing {} with apt-get, which this suite needs",
        packages.join(" ")
    );
    let apt = |args: &[&str]| -> Result<(), Failure> {
        let apt = Cmd::new("apt-get").env("DEBIAN_FRONTEND", "noninteractive");
        match apt.args(args).status()?.success() {
            true => Ok(()),
            false => Err(format!("apt-get {} failed", args[0]).into()),
        }
    };
    apt(&["update", "-q"])?;
    let install = ["install", "-q", "-y", "--no-install-recommends"];
    apt(&[&install, packages].concat())
}

fn shell(line: &str) -> bool {
    Cmd::new("sh").args(["-c", line]).succeeds()
}

pub(super) const RUSTFMT: Need = Need {
    what: "rustfmt",
    is_there: || Cmd::cargo().args(["fmt", "--version"]).succeeds(),
    how_to_get: "rustup component add rustfmt",
    packages: &[],
};

pub(super) const CLIPPY: Need = Need {
    what: "clippy",
    is_there: || Cmd::cargo().args(["clippy", "--version"]).succeeds(),
    how_to_get: "rustup component add clippy",
    packages: &[],
};

pub(super) const NAMESPACES: Need = Need {
    what: "network namespaces",
    is_there: || shell("unshare --net true && command -v nsenter && command -v ip"),
    how_to_get: "run as root, with util-linux and iproute2",
    packages: &[],
};

pub(super) const GLOO: Need = Need {
    what: "libgloo with its headers, or no C++ compiler",
    is_there: || {
        let header = "gloo/rendezvous/context.h";
        let places = "\"$GLOO_INCLUDE_DIR\" /usr/include /usr/local/include";
        shell(&format!(
            "c++ --version && for d in {places}; do test -n \"$d\" && test -e \"$d/{header}\" && exit 0; \
             done; exit 1"
        ))
    },
    how_to_get: "apt-get install libgloo-dev g++, or see docs/backends.md",
    packages: &["libgloo-dev", "g++"],
};

pub(super) const MPI: Need = Need {
    what: "MPI with its compiler and launcher, or no libclang",
    is_there: || {
        // `libclang-cpp` is another library.
        shell(
            "mpicc --version && mpirun --version && { test -n \"$LIBCLANG_PATH\" || \
             ls /usr/lib/llvm-*/lib /usr/lib* /usr/lib/* 2>/dev/null | \
             grep -qE '^libclang(-[0-9.]+)?\\.so'; }",
        )
    },
    how_to_get: "apt-get install libopenmpi-dev openmpi-bin libclang-dev, or see docs/backends.md",
    packages: &["libopenmpi-dev", "openmpi-bin", "libclang-dev"],
};

pub(super) const NCCL: Need = Need {
    what: "NCCL in the cache directory",
    is_there: || nccl::WHEELS.is_there(),
    how_to_get: "`cargo xtask test --require-all` fetches it (305 MB)",
    packages: &[],
};

pub(super) const C_COMPILER: Need = Need {
    what: "C compiler",
    is_there: || Cmd::new("cc").arg("--version").succeeds(),
    how_to_get: "on Debian: apt-get install gcc",
    packages: &[],
};
