//! Running other programs from the top of the work tree, with their output in sight.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;

use crate::Failure;

/// The top of the work tree.
///
/// Of the clone that is meant, not of the clone that this program was built in: a target directory
/// may be shared by several. Under `cargo run` and `cargo test` cargo names a package of that clone;
/// which package depends on who runs this program, so the top is searched for above it. Started from
/// a shell, the current directory says which clone, and outside of any clone only the build can.
pub(crate) fn root() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let built_in = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let starts = package.into_iter().chain(std::env::current_dir().ok());
    let top = starts
        .chain([built_in.clone()])
        .find_map(|dir| top_above(&dir));
    // A clone that was moved away after the build: the commands that need it say what is missing.
    top.unwrap_or(built_in)
}

/// The nearest directory, from `dir` up, that is the top of a work tree of this project.
fn top_above(dir: &Path) -> Option<PathBuf> {
    let is_top = |dir: &&Path| {
        let has = |file: &str| dir.join(file).is_file();
        has("Cargo.toml") && has("xtask/src/shell.rs") && has("crates/phalanx/Cargo.toml")
    };
    dir.ancestors().find(is_top).map(Into::into)
}

/// Where cargo puts what it builds, as an absolute path.
///
/// Cargo is asked: besides `CARGO_TARGET_DIR` any of its configuration files may say it.
pub(crate) fn target_dir() -> PathBuf {
    static TARGET_DIR: OnceLock<PathBuf> = OnceLock::new();
    let ask = || -> Result<PathBuf, Failure> {
        let metadata = ["metadata", "--format-version=1", "--no-deps", "--offline"];
        let text = Cmd::new(cargo_program()).args(metadata).read()?;
        let metadata: serde_json::Value = serde_json::from_str(&text)?;
        let dir = metadata["target_directory"].as_str();
        Ok(dir
            .ok_or("cargo metadata names no target directory")?
            .into())
    };
    let default = |failure: Failure| {
        eprintln!("{failure}; taking `target` for cargo's target directory");
        root().join("target")
    };
    TARGET_DIR
        .get_or_init(|| ask().unwrap_or_else(default))
        .clone()
}

/// The cargo that runs this program.
fn cargo_program() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// A word as one would type it in a shell.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// Names the packages that tests are built without, for the programs that they build themselves.
pub(crate) const WITHOUT: &str = "PHALANX_WITHOUT";

/// Cargo's arguments to build on what the tests around this were built from, if there are tests
/// around this: other packages mean other features, and everything built again.
pub(crate) fn as_in_tests() -> Option<Vec<String>> {
    let packages = std::env::var(WITHOUT).ok()?;
    let packages = packages.split(',').filter(|package| !package.is_empty());
    let left_out = packages.flat_map(|package| ["--exclude".into(), package.into()]);
    Some(["--workspace".into()].into_iter().chain(left_out).collect())
}

/// A command to run at the top of the work tree.
pub(crate) struct Cmd(Command);

impl Cmd {
    pub(crate) fn new(program: impl AsRef<OsStr>) -> Self {
        let mut command = Command::new(program);
        command.current_dir(root()).stdin(Stdio::null());
        Self(command)
    }

    /// The cargo that runs this program.
    pub(crate) fn cargo() -> Self {
        let cargo = Self::new(cargo_program());
        // Tests run in their package's directory, and the cargo that they start would take a relative
        // path from there.
        match std::env::var_os("CARGO_TARGET_DIR") {
            Some(dir) if !dir.is_empty() && Path::new(&dir).is_relative() => {
                cargo.env("CARGO_TARGET_DIR", target_dir())
            }
            _ => cargo,
        }
    }

    /// The cargo of another toolchain.
    pub(crate) fn cargo_of(toolchain: &str) -> Self {
        // Not $CARGO: only rustup's own cargo knows toolchains.
        Self::new("cargo").arg(format!("+{toolchain}"))
    }

    pub(crate) fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.0.arg(arg);
        self
    }

    pub(crate) fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.0.args(args);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.0.env(name, value);
        self
    }

    /// Runs it in a directory of the work tree.
    pub(crate) fn inside(mut self, dir: &str) -> Self {
        self.0.current_dir(root().join(dir));
        self
    }

    /// Whether it runs and succeeds; nothing is shown.
    pub(crate) fn succeeds(mut self) -> bool {
        let command = self.0.stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }

    /// Its standard output; an error if it fails. What it says on standard error is shown.
    pub(crate) fn read(mut self) -> Result<String, Failure> {
        let shown = self.to_string();
        let output = self.0.stderr(Stdio::inherit()).output();
        let output = output.map_err(|err| format!("{shown}: {err}"))?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => Err(format!("{shown}: {}", output.status).into()),
        }
    }

    /// Runs it with its output going to the terminal.
    pub(crate) fn status(mut self) -> Result<ExitStatus, Failure> {
        let shown = self.to_string();
        println!("$ {shown}");
        self.0
            .status()
            .map_err(|err| format!("{shown}: {err}").into())
    }

    /// Runs it, passes its output on line by line as it comes, and shows `each` every line.
    pub(crate) fn stream(mut self, mut each: impl FnMut(&str)) -> Result<ExitStatus, Failure> {
        let shown = self.to_string();
        println!("$ {shown}");
        if std::io::stdout().is_terminal() {
            self.0.env("CARGO_TERM_COLOR", "always");
        }
        let (output, write_end) = std::io::pipe()?;
        self.0.stdout(write_end.try_clone()?).stderr(write_end);
        let child = self.0.spawn();
        let mut child = child.map_err(|err| format!("{shown}: {err}"))?;
        // It holds write ends of the pipe; with them the output would never end.
        drop(self);

        let mut output = BufReader::new(output);
        let mut line = Vec::new();
        while output.read_until(b'\n', &mut line)? > 0 {
            std::io::stdout().write_all(&line)?;
            std::io::stdout().flush()?;
            each(String::from_utf8_lossy(&line).trim_end());
            line.clear();
        }
        Ok(child.wait()?)
    }
}

impl fmt::Display for Cmd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in self.0.get_envs() {
            let value = value.unwrap_or_default().display();
            write!(f, "{}={} ", name.display(), quoted(&value.to_string()))?;
        }
        // The full path of cargo tells nobody anything.
        let program = PathBuf::from(self.0.get_program());
        write!(f, "{}", program.file_name().unwrap_or_default().display())?;
        for arg in self.0.get_args() {
            write!(f, " {}", quoted(&arg.display().to_string()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_top_is_found_from_every_package_and_from_nowhere_else() {
        let top = root();
        for package in [
            "",
            "xtask",
            "tests/with-burn",
            "crates/phalanx",
            "tests/consumer/src",
        ] {
            assert_eq!(
                top_above(&top.join(package)),
                Some(top.clone()),
                "{package}"
            );
        }
        assert_eq!(top_above(Path::new("/")), None);
        assert_eq!(top_above(top.parent().expect("a directory above")), None);
    }

    #[test]
    fn a_command_is_shown_as_one_would_type_it() {
        let cmd = Cmd::new("/usr/bin/cargo").args(["run", "--", "a b", "it's", ""]);
        let cmd = cmd.env("DIR", "/with space");
        assert_eq!(
            cmd.to_string(),
            r"DIR='/with space' cargo run -- 'a b' 'it'\''s' ''"
        );
    }
}
