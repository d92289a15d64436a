//! Libraries and compilers of others from PyPI, into the user's cache directory.

use std::path::PathBuf;

use crate::shell::Cmd;
use crate::{Failure, cache};

/// Wheels that belong together. One list serves all kinds of machines.
pub(crate) struct Wheels {
    /// What it is, for the reader.
    pub(crate) what: &'static str,
    /// Its directory in the cache, which tells versions apart.
    pub(crate) dir: &'static str,
    /// What it takes, measured.
    pub(crate) size: &'static str,
    /// Packages with their versions, and the digests of their files: for x86-64 and for ARM.
    pub(crate) packages: &'static [(&'static str, [&'static str; 2])],
    /// Files that are there if all is.
    pub(crate) files: &'static [&'static str],
}

impl Wheels {
    /// Where the files are, or would be.
    pub(crate) fn path(&self) -> Result<PathBuf, Failure> {
        cache::dir(self.dir)
    }

    pub(crate) fn is_there(&self) -> bool {
        let there = |dir: PathBuf| self.files.iter().all(|file| dir.join(file).exists());
        self.path().is_ok_and(there)
    }

    /// Downloads them unless they are there.
    pub(crate) fn fetch(&self) -> Result<(), Failure> {
        if self.is_there() {
            return Ok(());
        }
        let target = self.path()?;
        let Self { what, size, .. } = self;
        println!("fetching {what} into {} ({size})", target.display());
        let list = target.join("requirements.txt");
        std::fs::write(&list, self.requirements())?;
        let install = [
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--only-binary",
            ":all:",
        ];
        let pip = Cmd::new("python3").args(install).arg("--require-hashes");
        let pip = pip.arg("--upgrade").arg("--target").arg(&target);
        match pip.arg("--requirement").arg(&list).status()?.success() {
            true => Ok(()),
            false => Err("pip failed; on Debian: apt-get install python3-pip".into()),
        }
    }

    fn requirements(&self) -> String {
        let line = |(package, hashes): &(&str, [&str; 2])| {
            let hashes = hashes.map(|hash| format!(" --hash=sha256:{hash}"));
            format!("{package}{}\n", hashes.concat())
        };
        self.packages.iter().map(line).collect()
    }
}
