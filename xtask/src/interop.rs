//! `cargo xtask interop`: Phalanx and a real PyTorch on two ends of every protocol.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::shell::{Cmd, root, target_dir};
use crate::slurm::Cluster;
use crate::{Failure, cache};

/// The version whose protocol the store speaks.
const TORCH: &str = "2.13.0";
/// What it takes, measured.
const TORCH_DISK: &str = "about 5 GB on disk, 2.5 GB to download";
/// A test that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(300);

/// Test against a real PyTorch: its clients on our store server, our client on its servers, a
/// Rust program under torchrun, PyTorch ranks under phalanx run, gloo groups that meet through our
/// store, one file store shared, one gloo group of a Rust and a PyTorch rank.
///
/// The last one needs Debian's PyTorch 1.13, which links the same libgloo as we do: it is installed
/// with apt-get as root on a Debian that has it, and skipped elsewhere. The first run makes a virtual environment with torch 2.13.0 in the user's cache directory.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A Python that has torch 2.13.0, instead of the one in the cache directory
    #[arg(long, value_name = "PYTHON")]
    python: Option<PathBuf>,

    /// Run only the tests whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

/// What rank 0 of an example with digits ends with.
const SAME_PARAMETERS: &str = "ranks 2, identical parameters sha256";

/// One test: a name, and what it runs.
type Test = (&'static str, fn(&Setup) -> Result<(), Failure>);

const TESTS: &[Test] = &[
    ("pytorch clients on our server", clients_on_our_server),
    ("our client on our server with a token", |setup| {
        setup.suite_on("phalanx", Some("a token for this run"))
    }),
    ("our client on pytorch's libuv server", |setup| {
        setup.suite_on("libuv", None)
    }),
    ("our client on pytorch's legacy server", |setup| {
        setup.suite_on("legacy", None)
    }),
    (
        "a token is refused with a clear error by pytorch's server",
        token_on_torch,
    ),
    ("a rust program under torchrun", |setup| {
        setup.torchrun(&[], &[], 1)
    }),
    ("a rust program under torchrun after a restart", |setup| {
        setup.torchrun(&["--max-restarts", "1"], &["--fail-before", "1"], 2)
    }),
    ("the readme's program under torchrun", |setup| {
        let allreduce = setup.built.join("examples/allreduce");
        let mut torchrun = command(&setup.python);
        torchrun.args(TORCHRUN).arg(allreduce);
        lines_with(torchrun, "of 2: [1.0, 2.0]", 2)
    }),
    ("training with ddp under torchrun", |setup| {
        setup.trains("digits", &["--epochs", "2"], SAME_PARAMETERS)
    }),
    ("training with burn under torchrun", |setup| {
        setup.build_example("burn_digits")?;
        setup.build_example("burn_chars")?;
        setup.trains("burn_digits", &["--epochs", "1"], SAME_PARAMETERS)?;
        setup.trains("burn_chars", &["--steps", "3"], "step 3 of 3")
    }),
    ("training with candle under torchrun", |setup| {
        setup.build_example("candle_digits")?;
        setup.build_example("candle_chars")?;
        setup.trains("candle_digits", &["--epochs", "1"], SAME_PARAMETERS)?;
        setup.trains("candle_chars", &["--steps", "3"], "step 3 of 3")
    }),
    ("the readme's program under srun", under_srun),
    ("pytorch ranks train under phalanx run", |setup| {
        setup.train_torch(&[], &[], 0)
    }),
    (
        "pytorch ranks train under phalanx run after a restart",
        |setup| setup.train_torch(&["--max-restarts", "1"], &["--fail-before", "1"], 1),
    ),
    (
        "a gloo group of pytorch ranks meets through our server",
        gloo,
    ),
    ("one file store from both sides", file_store),
    ("a gloo group of a rust rank and a pytorch rank", mixed_gloo),
];

pub(crate) fn run(args: &Args) -> Result<ExitCode, Failure> {
    let python = match &args.python {
        Some(python) => python.clone(),
        None => environment()?,
    };
    let setup = Setup::build(python)?;
    let chosen = |(name, _): &&Test| args.only.as_ref().is_none_or(|text| name.contains(text));
    let mut failures = Vec::new();
    let mut lines = Vec::new();
    for (name, test) in TESTS.iter().filter(chosen) {
        println!("\n=== {name}");
        let start = Instant::now();
        let result = test(&setup);
        let skipped = result
            .as_ref()
            .err()
            .and_then(|err| err.downcast_ref::<Skipped>());
        let verdict = match (&result, skipped) {
            (Ok(()), _) => "ok",
            (Err(_), Some(_)) => "skipped",
            (Err(_), None) => "FAILED",
        };
        if let Some(Skipped(why)) = skipped {
            println!("=== {name}: skipped: {why}");
            lines.push(format!("skipped           {name}: {why}"));
            continue;
        }
        lines.push(format!(
            "{verdict:<7} {:6.1} s  {name}",
            start.elapsed().as_secs_f64()
        ));
        if let Err(failure) = result {
            println!("=== {name}: {failure}");
            failures.push(*name);
        }
    }
    println!("\n{}\n", lines.join("\n"));
    let skipped = lines.iter().filter(|line| line.starts_with("skipped"));
    let skipped = skipped.count();
    println!(
        "{} passed, {} failed, {skipped} skipped",
        lines.len() - failures.len() - skipped,
        failures.len(),
    );
    Ok(match failures.is_empty() && !lines.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// A test that cannot be run here, and why.
#[derive(Debug)]
struct Skipped(String);

impl std::fmt::Display for Skipped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skipped {}

/// The virtual environment with PyTorch, made if need be.
fn environment() -> Result<PathBuf, Failure> {
    let dir = cache::dir(&format!("torch-{TORCH}"))?;
    let python = dir.join("bin/python");
    let check = format!("import torch; assert torch.__version__.split('+')[0] == '{TORCH}'");
    if Cmd::new(&python).args(["-c", &check]).succeeds() {
        return Ok(python);
    }
    println!(
        "installing torch {TORCH} into {} ({TORCH_DISK})",
        dir.display()
    );
    let made = Cmd::new("python3")
        .args(["-m", "venv"])
        .arg(&dir)
        .status()?;
    if !made.success() {
        return Err("python3 -m venv failed; on Debian: apt-get install python3-venv".into());
    }
    let torch = format!("torch=={TORCH}");
    let pip = Cmd::new(&python).args(["-m", "pip", "install", "--no-cache-dir", &torch, "numpy"]);
    match pip.status()?.success() && Cmd::new(&python).args(["-c", &check]).succeeds() {
        true => Ok(python),
        false => Err(format!("torch {TORCH} could not be installed; is there a network?").into()),
    }
}

/// torchrun with two ranks.
const TORCHRUN: [&str; 5] = [
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "--no-python",
];

/// The programs of both sides.
struct Setup {
    python: PathBuf,
    /// `target/debug`, wherever that is.
    built: PathBuf,
}

impl Setup {
    fn build(python: PathBuf) -> Result<Self, Failure> {
        let packages = [
            "-p",
            "phalanx-cli",
            "-p",
            "phalanx-store",
            "-p",
            "phalanx-conformance",
            "-p",
            "phalanx",
        ];
        let build = Cmd::cargo()
            .arg("build")
            .args(packages)
            .args(["--bins", "--examples"]);
        if !build.status()?.success() {
            return Err("the Rust side does not build".into());
        }
        Ok(Self {
            python,
            built: target_dir().join("debug"),
        })
    }

    fn example(&self, name: &str) -> Command {
        command(&self.built.join("examples").join(name))
    }

    /// A Python program of ours.
    fn script(&self, name: &str) -> Command {
        let mut python = command(&self.python);
        python.arg(root().join("xtask/interop").join(name));
        // Its warnings about every timeout that a test provokes.
        python.env("TORCH_CPP_LOG_LEVEL", "ERROR");
        python
    }

    fn server(&self, kind: &str, token: Option<&str>) -> Result<Server, Failure> {
        let mut server = match kind {
            "phalanx" => {
                let mut server = command(&self.built.join("phalanx"));
                server.args(["store", "--bind", "127.0.0.1:0"]);
                server
            }
            kind => {
                let mut server = self.script("torch_server.py");
                server.arg(kind);
                server
            }
        };
        server.envs(token.map(|token| ("PHALANX_TOKEN", token)));
        Server::start(server)
    }

    /// The store suite through our client.
    fn suite_on(&self, kind: &str, token: Option<&str>) -> Result<(), Failure> {
        let server = self.server(kind, token)?;
        let mut client = self.example("store_client");
        client.args(["127.0.0.1", &server.port, kind]);
        client.envs(token.map(|token| ("PHALANX_TOKEN", token)));
        succeed(client)
    }

    /// Two ranks of the example `meet`; `attempts` is how often they should have met.
    /// Builds an example that takes long and that not every run needs.
    fn build_example(&self, example: &str) -> Result<(), Failure> {
        let build = Cmd::cargo().args(["build", "--workspace", "--example", example]);
        match build.status()?.success() {
            true => Ok(()),
            false => Err(format!("{example} does not build").into()),
        }
    }

    /// Two ranks of an example under torchrun; one of them prints a line with `expected`.
    fn trains(&self, example: &str, args: &[&str], expected: &str) -> Result<(), Failure> {
        let mut torchrun = command(&self.python);
        let program = self.built.join("examples").join(example);
        torchrun.args(TORCHRUN).arg(program).args(args);
        lines_with(torchrun, expected, 1)
    }

    fn torchrun(&self, flags: &[&str], args: &[&str], attempts: usize) -> Result<(), Failure> {
        let mut torchrun = command(&self.python);
        torchrun
            .args(TORCHRUN)
            .args(flags)
            .arg(self.built.join("examples/meet"))
            .args(args);
        lines_with(torchrun, "sum of ranks 1;", 2 * attempts)
    }

    /// Two PyTorch ranks that train with our launcher; `attempt` is the one that succeeds.
    fn train_torch(&self, flags: &[&str], args: &[&str], attempt: usize) -> Result<(), Failure> {
        let script = self.script("torch_ddp.py");
        let mut run = command(&self.built.join("phalanx"));
        run.args(["run", "--nproc", "2", "--no-token"]).args(flags);
        run.arg("--").arg(script.get_program());
        run.args(script.get_args()).args(args);
        run.env("TORCH_CPP_LOG_LEVEL", "ERROR");
        lines_with(
            run,
            &format!("trained, attempt {attempt}, replicas equal"),
            2,
        )
    }
}

/// Under a real SLURM if it is installed; otherwise with the variables that it sets.
fn under_srun(setup: &Setup) -> Result<(), Failure> {
    let allreduce = setup.built.join("examples/allreduce");
    let text = "of 2: [1.0, 2.0]";
    if let Some(cluster) = Cluster::start()? {
        let mut srun = cluster.command("srun");
        srun.args(["--ntasks", "2", "--overcommit"]).arg(allreduce);
        return lines_with(srun, text, 2);
    }
    println!("simulated: SLURM is not installed (on Debian: slurmctld slurmd slurm-client)");
    let script = "for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank \"$0\" & done; wait";
    let mut ranks = command(Path::new("sh"));
    ranks.args(["-c", script]).arg(allreduce).envs([
        ("SLURM_JOB_ID", std::process::id().to_string().as_str()),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_NTASKS", "2"),
        ("SLURM_NNODES", "1"),
        ("SLURM_NODEID", "0"),
        ("SLURM_STEP_NODELIST", "localhost"),
    ]);
    lines_with(ranks, text, 2)
}

fn clients_on_our_server(setup: &Setup) -> Result<(), Failure> {
    let server = setup.server("phalanx", None)?;
    let mut clients = setup.script("torch_clients.py");
    clients.args(["127.0.0.1", &server.port]);
    succeed(clients)
}

fn token_on_torch(setup: &Setup) -> Result<(), Failure> {
    for kind in ["libuv", "legacy"] {
        let server = setup.server(kind, None)?;
        let mut client = setup.example("meet");
        client
            .env("PHALANX_TOKEN", "a token")
            .env("MASTER_ADDR", "127.0.0.1");
        client
            .env("MASTER_PORT", &server.port)
            .env("RANK", "0")
            .env("WORLD_SIZE", "1");
        client.env("TORCHELASTIC_USE_AGENT_STORE", "True");
        let output = client.output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        println!("{kind}: {}", said.trim_end());
        if output.status.success() || !said.contains("unset PHALANX_TOKEN") {
            return Err(format!("no clear error from the {kind} server").into());
        }
    }
    Ok(())
}

fn gloo(setup: &Setup) -> Result<(), Failure> {
    let server = setup.server("phalanx", None)?;
    let ranks = ["0", "1"].map(|rank| {
        let mut rank_of_two = setup.script("torch_gloo.py");
        rank_of_two.env("RANK", rank).env("WORLD_SIZE", "2");
        rank_of_two
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &server.port);
        rank_of_two.env("TORCHELASTIC_USE_AGENT_STORE", "True");
        rank_of_two
    });
    succeed_together(ranks)
}

/// Debian's PyTorch, which links the system's libgloo.
const DEBIAN_PYTHON: &str = "/usr/bin/python3";
const DEBIAN_TORCH_DISK: &str = "about 190 MB to download, 840 MB on disk";

fn debian_torch() -> Result<(), Failure> {
    let check = "import torch; assert torch.__version__.startswith('1.13')";
    let is_there = || Cmd::new(DEBIAN_PYTHON).args(["-c", check]).succeeds();
    if is_there() {
        return Ok(());
    }
    let line = "test $(id -u) = 0 && apt-cache madison python3-torch | grep -q '| 1\\.13'";
    if !Cmd::new("sh").args(["-c", line]).succeeds() {
        let why = "it needs Debian's python3-torch 1.13, and root to install it".into();
        return Err(Skipped(why).into());
    }
    println!("installing python3-torch with apt-get ({DEBIAN_TORCH_DISK})");
    let install = ["install", "-q", "-y", "python3-torch", "libgloo-dev", "g++"];
    let apt = Cmd::new("apt-get").env("DEBIAN_FRONTEND", "noninteractive");
    match apt.args(install).status()?.success() && is_there() {
        true => Ok(()),
        false => Err("python3-torch could not be installed; is there a network?".into()),
    }
}

fn mixed_gloo(setup: &Setup) -> Result<(), Failure> {
    debian_torch()?;
    let build = ["build", "-p", "phalanx-gloo", "--example", "with_pytorch"];
    if !Cmd::cargo().args(build).status()?.success() {
        return Err("the gloo backend does not build".into());
    }
    let dir = cache::dir("interop")?;
    for (ours, theirs) in [("1", "0"), ("0", "1")] {
        let path = dir.join(format!("mixed-{}-{ours}", std::process::id()));
        let mut rust = setup.example("with_pytorch");
        rust.arg(&path).arg(ours);
        let mut python = command(Path::new(DEBIAN_PYTHON));
        python.arg(root().join("xtask/interop/mixed_gloo.py"));
        python.arg(&path).arg(theirs);
        succeed_together([rust, python])?;
        // Python ends without a word to its store now and then, and the file stays.
        let _ = std::fs::remove_file(&path);
    }
    Ok(())
}

fn file_store(setup: &Setup) -> Result<(), Failure> {
    let dir = cache::dir("interop")?;
    let path = dir.join(format!("filestore-{}", std::process::id()));
    for order in [["python", "rust"], ["rust", "python"]] {
        let mut roles = ["first", "second"].into_iter();
        let peers = order.map(|side| {
            let mut peer = match side {
                "python" => setup.script("filestore.py"),
                _ => setup.example("filestore_peer"),
            };
            peer.arg(&path).args(roles.next());
            peer
        });
        succeed_together(peers)?;
        if path.exists() {
            return Err(format!("{} is left over", path.display()).into());
        }
    }
    Ok(())
}

/// A server that ends with this value.
struct Server {
    child: Child,
    port: String,
}

impl Server {
    fn start(mut command: Command) -> Result<Self, Failure> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().ok_or("no output to read")?;
        let mut server = Self {
            child,
            port: String::new(),
        };
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let port = line
            .trim_end()
            .rsplit_once(':')
            .filter(|_| line.starts_with("listening on"));
        server.port = port
            .ok_or("the server did not say where it listens")?
            .1
            .to_owned();
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself; then there is nothing to end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.stdin(Stdio::null());
    command
}

fn succeed(command: Command) -> Result<(), Failure> {
    succeed_together([command])
}

/// Runs all of them at the same time, to their ends or the limit.
fn succeed_together<const N: usize>(commands: [Command; N]) -> Result<(), Failure> {
    let mut children = Vec::new();
    for mut command in commands {
        children.push(
            command
                .spawn()
                .map_err(|err| format!("{command:?}: {err}"))?,
        );
    }
    let deadline = Instant::now() + LIMIT;
    let mut result = Ok(());
    for child in &mut children {
        match wait_until(child, deadline)? {
            Some(status) if status.success() => {}
            Some(status) => result = Err(format!("one side ended with {status}").into()),
            None => {
                child.kill()?;
                child.wait()?;
                result = Err(format!("no end after {} s", LIMIT.as_secs()).into());
            }
        }
    }
    result
}

fn wait_until(child: &mut Child, deadline: Instant) -> Result<Option<ExitStatus>, Failure> {
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(child.try_wait()?)
}

/// Runs it; that many lines of its output have to contain `text`.
fn lines_with(command: Command, text: &str, expected: usize) -> Result<(), Failure> {
    let output = read(command)?;
    let found = output.lines().filter(|line| line.contains(text)).count();
    match found == expected {
        true => Ok(()),
        false => Err(format!("{found} lines say {text:?}, not {expected}").into()),
    }
}

/// Runs it and returns its standard output, which is shown too.
fn read(mut command: Command) -> Result<String, Failure> {
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let stdout = child.stdout.take().ok_or("no output to read")?;
    let reader = std::thread::spawn(move || {
        let mut all = String::new();
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            println!("{line}");
            all.push_str(&line);
            all.push('\n');
        }
        all
    });
    let Some(status) = wait_until(&mut child, Instant::now() + LIMIT)? else {
        child.kill()?;
        child.wait()?;
        return Err(format!("no end after {} s", LIMIT.as_secs()).into());
    };
    let output = reader.join().map_err(|_| "reading its output failed")?;
    match status.success() {
        true => Ok(output),
        false => Err(format!("it ended with {status}").into()),
    }
}
