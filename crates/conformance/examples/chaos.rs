//! Many runs in which a rank is killed or stopped in the middle of a random mix of calls.
//!
//! ```text
//! chaos [--backend native] [--runs 100] [--ranks 4] [--seed 0]
//! ```
//!
//! A run that goes wrong is printed with what its ranks said, and counted. `cargo xtask soak chaos`
//! builds and runs it.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_conformance::chaos::{Fault, Plan, Report, Summary, run_rank};
use phalanx_pg::registry::{self, GroupInit};
use phalanx_store::{Store, TcpStore, TcpStoreOptions, TcpStoreServer};
use phalanx_testkit::Proc;

/// Longer than all waits of a run together.
const RUN_LIMIT: Duration = Duration::from_secs(120);

/// A line about how far it is, this often.
const PROGRESS: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [word, backend, seed, ranks, rank, port] = &args[..]
        && word == "rank"
    {
        let plan = Plan::new(number(seed), number(ranks) as usize);
        one_process(backend, &plan, number(rank) as usize, number(port) as u16);
        return ExitCode::SUCCESS;
    }
    let mut soak = Soak {
        backend: "native".to_owned(),
        runs: 100,
        ranks: 4,
        seed: 0,
    };
    for pair in args.chunks(2) {
        match pair {
            [name, value] if name == "--backend" => soak.backend.clone_from(value),
            [name, value] if name == "--runs" => soak.runs = number(value),
            [name, value] if name == "--ranks" => soak.ranks = number(value),
            [name, value] if name == "--seed" => soak.seed = number(value),
            other => panic!(
                "unknown arguments {other:?}: chaos [--backend B] [--runs N] [--ranks N] [--seed S]"
            ),
        }
    }
    soak.run()
}

fn number(text: &str) -> u64 {
    text.parse()
        .unwrap_or_else(|_| panic!("{text:?} is not a number"))
}

struct Soak {
    backend: String,
    runs: u64,
    /// At most.
    ranks: u64,
    seed: u64,
}

impl Soak {
    fn run(&self) -> ExitCode {
        let mut summary = Summary::default();
        let mut said = Instant::now();
        for seed in self.seed..self.seed + self.runs {
            let plan = Plan::new(seed, self.ranks as usize);
            match self.one(&plan) {
                Ok(reports) => summary.add(&plan, &reports),
                Err(Failure { hung, story }) => {
                    let word = if hung { "HANG" } else { "WRONG" };
                    println!("{word} in {plan}\n{story}");
                    summary.add_failure(&plan, hung);
                }
            }
            if said.elapsed() > PROGRESS {
                said = Instant::now();
                println!("[{}/{}] {summary}", summary.runs, self.runs);
            }
        }
        println!("{summary}");
        match summary.is_clean() {
            true => ExitCode::SUCCESS,
            false => ExitCode::FAILURE,
        }
    }

    fn one(&self, plan: &Plan) -> Result<Vec<Report>, Failure> {
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let server = TcpStoreServer::start(&[addr], None).expect("a store for the ranks");
        let port = server.local_addr().port().to_string();
        let exe = std::env::current_exe().expect("the path of this program");
        let start = |rank: usize| {
            let mut command = Command::new(&exe);
            let (seed, ranks) = (plan.seed.to_string(), self.ranks.to_string());
            command.args([
                "rank",
                &self.backend,
                &seed,
                &ranks,
                &rank.to_string(),
                &port,
            ]);
            command.env("PHALANX_HOST_ID", format!("host {}", plan.hosts[rank]));
            Proc::spawn(command).expect("start a rank")
        };
        let mut ranks: Vec<Proc> = (0..plan.ranks).map(start).collect();
        let end = Instant::now() + RUN_LIMIT;
        let mut hung = false;
        for rank in &mut ranks {
            let left = end.saturating_duration_since(Instant::now());
            hung |= rank.wait_for(left).expect("a child").is_none();
        }
        ranks.iter_mut().for_each(|rank| drop(rank.kill()));
        let logs: Vec<String> = ranks.iter().map(|rank| rank.log().text()).collect();
        let ended = |(rank, log): (usize, &String)| match rank == plan.victim {
            true if plan.fault != Fault::StopThenResume => true,
            _ => ranks[rank].status().is_some_and(|it| it.success()) && Report::find(log).is_some(),
        };
        if !hung && logs.iter().enumerate().all(ended) {
            for line in logs.iter().flat_map(|log| log.lines()) {
                if line.starts_with("not the one") {
                    println!("{line}, in {plan}");
                }
            }
            return Ok(logs.iter().filter_map(|log| Report::find(log)).collect());
        }
        let story = logs.iter().enumerate();
        let story =
            story.map(|(rank, log)| format!("rank {rank}: {:?}\n{log}", ranks[rank].status()));
        Err(Failure {
            hung,
            story: story.collect::<Vec<_>>().join("\n"),
        })
    }
}

struct Failure {
    hung: bool,
    story: String,
}

fn one_process(backend: &str, plan: &Plan, rank: usize, port: u16) {
    let store = TcpStore::connect(&TcpStoreOptions::new("127.0.0.1", port)).expect("the store");
    let store: Arc<dyn Store> = Arc::new(store);
    phalanx::backends(); // which makes the built-in ones known
    let connect = |init: &GroupInit| registry::create(backend, init);
    println!("{}", run_rank(plan, rank, &store, &connect));
}
