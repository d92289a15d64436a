//! `phalanx bench store`: our store server next to PyTorch's.

pub(crate) mod bare;
mod cases;
mod report;
mod resolver;
mod servers;

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::Stdio;

use super::cpu::{self, Placement};
use super::load::{Sample, Task, Work};
use crate::Failure;
use cases::{CASES, Case, Names};
use report::{Comparison, Outcome};
use resolver::Resolver;
use servers::{Kind, Launcher, Server};

/// PyTorch's server stalls for ten seconds in each.
const MAX_SILENT_ROUNDS: u32 = 3;

/// Measure the store server: set+get pairs, barriers, and what one client feels while others
/// misbehave.
///
/// The same load generator, in a process of its own, measures every server in turn; figures are
/// medians over the rounds. "bare" answers without reading: the roof that the kernel leaves.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// One JSON object per line instead of a table.
    #[arg(long)]
    json: bool,
    /// Also measure PyTorch's libuv server, started with this Python (it needs torch 2.13).
    #[arg(long, value_name = "PYTHON")]
    against_torch: Option<PathBuf>,
    /// Windows per server and case.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Length of a window. Cases that end by themselves (connect, storm, no-dns) do not use it.
    #[arg(long, default_value_t = 1.0, value_parser = parse_seconds)]
    seconds: f64,
    /// Only cases with these names, or names that begin so: pairs, barrier, connect, quiet,
    /// trickle, storm, no-dns.
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    only: Vec<String>,
    /// The processors of server and load generator.
    #[arg(long, value_enum, default_value_t = Placement::Apart)]
    placement: Placement,
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number")?;
    match (0.01..=600.0).contains(&seconds) {
        true => Ok(seconds),
        false => Err("from 0.01 to 600".into()),
    }
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let cases: Vec<&Case> = CASES.iter().filter(|c| c.is_chosen(&args.only)).collect();
    if cases.is_empty() {
        let names = CASES.map(|c| c.name).join(", ");
        return Err(format!("--only names no case; there are {names}").into());
    }
    let session = Session::start(args)?;
    if !args.json {
        report::head().iter().for_each(|line| println!("{line}"));
    }
    let mut failed = Vec::new();
    for case in cases {
        let comparison = session.compare(case)?;
        let lines = match args.json {
            true => comparison
                .json_lines()
                .iter()
                .map(ToString::to_string)
                .collect(),
            false => comparison.table(),
        };
        lines.iter().for_each(|line| println!("{line}"));
        if comparison.outcomes.iter().any(|o| o.problem().is_some()) {
            failed.push(case.name);
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("not verified: {}", failed.join(", ")).into()),
    }
}

/// The servers that live through the whole run.
struct Session<'a> {
    args: &'a Args,
    launcher: Launcher,
    load_processor: Option<usize>,
    servers: Vec<Server>,
}

impl<'a> Session<'a> {
    fn start(args: &'a Args) -> Result<Self, Failure> {
        let processors = args.placement.processors()?;
        if let Some((server, _)) = processors {
            // The servers inherit it; the load generator moves away by itself.
            cpu::pin(server)?;
        }
        let launcher = Launcher::new(args.against_torch.as_deref())?;
        let mut servers = vec![launcher.phalanx()?];
        if args.against_torch.is_some() {
            let libuv = launcher.libuv()?;
            eprintln!("libuv is the server of {}", libuv.version);
            servers.push(libuv);
        }
        Ok(Self {
            args,
            launcher,
            load_processor: processors.map(|(_, load)| load),
            servers,
        })
    }

    fn compare(&self, case: &Case) -> Result<Comparison, Failure> {
        let outcomes = match case.names {
            Names::NotAsked => {
                let bare = match case.work {
                    Work::Pairs { pattern, .. } => Some(self.launcher.bare(pattern)?),
                    _ => None,
                };
                let servers: Vec<&Server> = bare.iter().chain(&self.servers).collect();
                let kinds: Vec<Kind> = servers.iter().map(|s| s.kind).collect();
                self.interleave(case, &kinds, self.args.rounds, |index| {
                    servers[index].rest()?;
                    self.window(case, servers[index], || {})
                })?
            }
            Names::Answered | Names::Silent => self.with_names(case)?,
        };
        Ok(Comparison {
            case: *case,
            placement: self.args.placement,
            outcomes,
        })
    }

    /// Every window has a server of its own: PyTorch's asks no more once a name server failed it.
    fn with_names(&self, case: &Case) -> Result<Vec<Outcome>, Failure> {
        let kinds: Vec<Kind> = self.servers.iter().map(|s| s.kind).collect();
        let resolver = match Resolver::new() {
            Ok(resolver) => resolver,
            Err(failure) => {
                let skip = |&kind| Outcome {
                    kind,
                    samples: Vec::new(),
                    skipped: Some(failure.to_string()),
                };
                return Ok(kinds.iter().map(skip).collect());
            }
        };
        let rounds = match case.names {
            Names::Silent => self.args.rounds.min(MAX_SILENT_ROUNDS),
            _ => self.args.rounds,
        };
        self.interleave(case, &kinds, rounds, |index| {
            resolver.set_silent(false);
            let server = self.launcher.named(kinds[index], &resolver)?;
            server.rest()?;
            let mut sample = self.window(case, &server, || {
                resolver.take_questions();
                resolver.set_silent(case.names == Names::Silent);
            })?;
            let questions = resolver.take_questions() as f64;
            sample.figures.insert("dns_questions".into(), questions);
            Ok(sample)
        })
    }

    /// A window for every server in turn, in the opposite order every other round.
    fn interleave(
        &self,
        case: &Case,
        kinds: &[Kind],
        rounds: u32,
        mut window: impl FnMut(usize) -> Result<Sample, Failure>,
    ) -> Result<Vec<Outcome>, Failure> {
        let outcome = |&kind| Outcome {
            kind,
            samples: Vec::new(),
            skipped: None,
        };
        let mut outcomes: Vec<Outcome> = kinds.iter().map(outcome).collect();
        for round in 0..rounds {
            eprintln!("{}: round {} of {rounds}", case.name, round + 1);
            let mut order: Vec<usize> = (0..kinds.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for index in order {
                outcomes[index].samples.push(window(index)?);
            }
        }
        Ok(outcomes)
    }

    /// One run of the load generator. `on_ready` runs before the window begins, where the case
    /// asks for it.
    fn window(
        &self,
        case: &Case,
        server: &Server,
        on_ready: impl FnOnce(),
    ) -> Result<Sample, Failure> {
        let mut work = case.work;
        if let Work::Pairs { fixed, .. } = &mut work {
            *fixed = server.kind == Kind::Bare;
        }
        let task = Task {
            server: server.addr,
            server_pid: server.pid(),
            processor: self.load_processor,
            seconds: self.args.seconds,
            work,
        };
        let mut load = self
            .launcher
            .own()
            .args(["bench", "load"])
            .arg(serde_json::to_string(&task)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut stdin = load.stdin.take().expect("stdin is a pipe");
        let mut stdout = BufReader::new(load.stdout.take().expect("stdout is a pipe"));
        let mut line = String::new();
        stdout.read_line(&mut line)?;
        if line == "ready\n" {
            on_ready();
            stdin.write_all(b"go\n")?;
            line.clear();
            stdout.read_line(&mut line)?;
        }
        let status = load.wait()?;
        if !status.success() {
            return Err(format!("the load generator failed: {status}").into());
        }
        Ok(serde_json::from_str(&line)?)
    }
}
