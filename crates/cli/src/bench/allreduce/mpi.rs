//! Programs in C and C++ that call the libraries without us, and MPI's launchers.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::Failure;
use crate::bench::cache;

const PROGRAM: &str = include_str!("competitors/allreduce_mpi.c");

const GLOO_PROGRAM: &str = include_str!("competitors/allreduce_gloo.cc");

const INTEL_VERSION: &str = "2021.19.0";
const INTEL_SIZE: &str = "132 MB to download, 350 MB on disk";

/// A measuring program and how it is started.
pub(crate) struct Mpi {
    launcher: PathBuf,
    program: PathBuf,
    intel: bool,
}

impl Mpi {
    /// Open MPI as the system has it. `dir` takes the program.
    pub(crate) fn open(dir: &Path) -> Result<Self, Failure> {
        let program = dir.join("allreduce_openmpi");
        let compiler = find(&["mpicc.openmpi", "mpicc"]);
        let launcher = find(&["mpirun.openmpi", "mpirun"]);
        let (Some(compiler), Some(launcher)) = (compiler, launcher) else {
            return Err(
                "no mpicc and mpirun; on Debian: apt-get install libopenmpi-dev openmpi-bin".into(),
            );
        };
        let hint = "; on Debian: apt-get install libopenmpi-dev";
        compile(Command::new(compiler), &dir.join(SOURCE), &program, &[])
            .map_err(|failure| format!("{failure}{hint}"))?;
        Ok(Self {
            launcher,
            program,
            intel: false,
        })
    }

    /// Intel MPI from the package registry of Python, in the user's cache directory. Its compiler
    /// wrapper is not needed: one header and one library are all there is to it.
    pub(crate) fn intel(dir: &Path) -> Result<Self, Failure> {
        let root = intel_root()?;
        let program = dir.join("allreduce_intelmpi");
        let library = root.join("lib/libmpi.so.12");
        let flags = [
            format!("-I{}", root.join("include").display()),
            library.display().to_string(),
            format!("-Wl,-rpath,{}", root.join("lib").display()),
        ];
        compile(Command::new("cc"), &dir.join(SOURCE), &program, &flags)?;
        Ok(Self {
            launcher: root.join("bin/mpiexec.hydra"),
            program,
            intel: true,
        })
    }

    /// Starts `ranks` ranks that report at `socket`. Ranks pin themselves, the launchers do not.
    pub(crate) fn command(
        &self,
        socket: &Path,
        ranks: usize,
        processors: Option<&[usize]>,
    ) -> Command {
        let mut command = match self.intel {
            true => {
                let mut command = Command::new(&self.launcher);
                command.env("I_MPI_FABRICS", "shm").env("I_MPI_PIN", "off");
                command.arg("-n").arg(ranks.to_string());
                command
            }
            false => mpirun(&self.launcher, ranks, processors),
        };
        command.arg(&self.program).arg(socket);
        command.arg(list(processors));
        command
    }
}

/// Open MPI's launcher, to be followed by the program. It pins nobody, and starts more ranks than
/// there are processors if it has to.
fn mpirun(launcher: &Path, ranks: usize, processors: Option<&[usize]>) -> Command {
    let mut command = Command::new(launcher);
    command.args(["--bind-to", "none"]);
    if processors.is_none() {
        command.arg("--oversubscribe");
    }
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1");
    command.env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command.arg("-n").arg(ranks.to_string());
    command
}

/// The launcher that starts ranks of our own backend on MPI.
pub(crate) fn own_launcher(ranks: usize, processors: Option<&[usize]>) -> Result<Command, Failure> {
    let launcher = find(&["mpirun", "mpirun.openmpi"]);
    let launcher = launcher.ok_or("no mpirun; on Debian: apt-get install openmpi-bin")?;
    Ok(mpirun(&launcher, ranks, processors))
}

/// Builds the program that calls libgloo without us. `dir` takes it.
pub(crate) fn bare_gloo(dir: &Path) -> Result<PathBuf, Failure> {
    let (source, program) = (dir.join("allreduce_gloo.cc"), dir.join("allreduce_libgloo"));
    let compiler = find(&["c++", "g++"]).ok_or("no c++; on Debian: apt-get install g++")?;
    let flags = ["-std=c++17", "-lgloo", "-lpthread"].map(str::to_owned);
    compile(Command::new(compiler), &source, &program, &flags)
        .map_err(|failure| format!("{failure}; on Debian: apt-get install libgloo-dev"))?;
    Ok(program)
}

/// The name of the program's text.
const SOURCE: &str = "allreduce_mpi.c";

/// Processors as an argument of the competitors: by rank, or nothing.
pub(crate) fn list(processors: Option<&[usize]>) -> String {
    let numbers = processors
        .unwrap_or_default()
        .iter()
        .map(ToString::to_string);
    numbers.collect::<Vec<_>>().join(",")
}

fn find(names: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let dirs: Vec<_> = std::env::split_paths(&path).collect();
    let files = names
        .iter()
        .flat_map(|name| dirs.iter().map(move |dir| dir.join(name)));
    files.into_iter().find(|file| file.is_file())
}

fn compile(
    mut compiler: Command,
    source: &Path,
    program: &Path,
    flags: &[String],
) -> Result<(), Failure> {
    let text = match source.ends_with(SOURCE) {
        true => PROGRAM,
        false => GLOO_PROGRAM,
    };
    std::fs::write(source, text)?;
    compiler
        .arg("-O3")
        .arg("-o")
        .arg(program)
        .arg(source)
        .args(flags);
    let output = compiler
        .output()
        .map_err(|err| format!("{:?}: {err}", compiler.get_program()))?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let text = String::from_utf8_lossy(&output.stderr);
            let error = text
                .lines()
                .find(|line| {
                    ["error", "cannot find"]
                        .iter()
                        .any(|word| line.contains(word))
                })
                .unwrap_or("");
            Err(format!("{:?} failed: {error}", compiler.get_program()).into())
        }
    }
}

/// Where Intel MPI is, installed if need be.
fn intel_root() -> Result<PathBuf, Failure> {
    let root = cache::dir(&format!("impi-{INTEL_VERSION}"))
        .ok_or("neither XDG_CACHE_HOME nor HOME is set; set one of them")?;
    if root.join("complete").is_file() {
        return Ok(root);
    }
    eprintln!(
        "installing Intel MPI {INTEL_VERSION} into {} ({INTEL_SIZE})",
        root.display()
    );
    // An environment of its own, because pip keeps libraries and programs of a wheel there only.
    let packages = ["impi-rt", "impi-devel"].map(|name| format!("{name}=={INTEL_VERSION}"));
    let installed = succeeds(
        Command::new("python3")
            .args(["-m", "venv", "--clear"])
            .arg(&root),
    ) && succeeds(
        Command::new(root.join("bin/python"))
            .args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-cache-dir",
                "--no-deps",
            ])
            .args(packages),
    );
    if !installed {
        let _ = std::fs::remove_dir_all(&root);
        return Err(
            "Intel MPI could not be installed; is there python3 with venv, and a network?".into(),
        );
    }
    std::fs::write(root.join("complete"), "")?;
    Ok(root)
}

fn succeeds(command: &mut Command) -> bool {
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}
