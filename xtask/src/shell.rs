//! Running other programs from the top of the work tree, with their output in sight.

use std::ffi::OsStr;
use std::fmt;
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};

use crate::Failure;

/// The top of the work tree.
pub(crate) fn root() -> PathBuf {
    // Asked at run time, because a target directory may be shared by several clones.
    let here = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let here = here.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    here.parent().map(Into::into).unwrap_or(here)
}

/// Where cargo puts what it builds.
pub(crate) fn target_dir() -> PathBuf {
    let chosen = std::env::var_os("CARGO_TARGET_DIR").filter(|dir| !dir.is_empty());
    // Joined: a relative one is meant from where cargo runs.
    root().join(chosen.unwrap_or_else(|| "target".into()))
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
        Self::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
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
            write!(f, "{}='{value}' ", name.display())?;
        }
        // The full path of cargo tells nobody anything.
        let program = PathBuf::from(self.0.get_program());
        write!(f, "{}", program.file_name().unwrap_or_default().display())?;
        for arg in self.0.get_args() {
            write!(f, " {}", arg.display())?;
        }
        Ok(())
    }
}
