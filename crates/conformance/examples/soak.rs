//! The whole product of the process group suite on one backend.
//!
//! ```text
//! soak [--backend reference] [--ranks 1,2,3,4,8] [--minutes N]
//! ```
//!
//! Every case runs in a world of its own: processes that meet through the registry, and for the
//! reference backend threads too. A case that fails is counted and the rest go on. After the given
//! time no further case is started, and the last line says how many were left out. `cargo xtask
//! soak conformance` builds and runs it.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use phalanx_conformance::group::{Case, Level, Report, cases, run_cases};
use phalanx_pg::ProcessGroup;
use phalanx_pg::registry::{self, GroupInit};
use phalanx_reference::ReferenceGroup;
use phalanx_store::{TcpStore, TcpStoreOptions, TcpStoreServer};

/// Longer than any case takes: a world that is not done by then hangs.
const CASE_LIMIT: Duration = Duration::from_secs(3600);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [word, backend, case, rank, size, port] = &args[..]
        && word == "rank"
    {
        let (rank, size, port) = (number(rank), number(size), number(port) as u16);
        return one_process(backend, case, rank, size, port);
    }
    let mut soak = Soak {
        backend: "reference".to_owned(),
        sizes: vec![1, 2, 3, 4, 8],
        limit: Duration::MAX,
    };
    for pair in args.chunks(2) {
        match pair {
            [name, value] if name == "--backend" => soak.backend.clone_from(value),
            [name, value] if name == "--ranks" => {
                soak.sizes = value.split(',').map(number).collect();
            }
            [name, value] if name == "--minutes" => {
                soak.limit = Duration::from_secs(60 * number(value) as u64);
            }
            other => panic!(
                "unknown arguments {other:?}: soak [--backend B] [--ranks 1,2] [--minutes N]"
            ),
        }
    }
    let known = phalanx::backends();
    if !known.contains(&soak.backend) {
        eprintln!(
            "no backend {:?} (known: {})",
            soak.backend,
            known.join(", ")
        );
        return ExitCode::FAILURE;
    }
    soak.run()
}

fn number(text: &str) -> usize {
    text.parse()
        .unwrap_or_else(|_| panic!("{text:?} is not a number"))
}

/// What to run, for how long.
struct Soak {
    backend: String,
    sizes: Vec<usize>,
    limit: Duration,
}

#[derive(Default)]
struct Tally {
    passed: usize,
    skipped: usize,
    failed: usize,
    left_out: usize,
    collectives: u64,
}

impl Soak {
    fn run(&self) -> ExitCode {
        let start = Instant::now();
        let mut tally = Tally::default();
        let threads = (self.backend == "reference").then_some(("threads", by_threads as Run));
        let forms: Vec<(&str, Run)> = threads
            .into_iter()
            .chain([("processes", by_processes as Run)])
            .collect();
        let total = self.sizes.len() * forms.len() * cases().len();
        let mut number = 0;
        for &size in &self.sizes {
            for &(form, run) in &forms {
                for case in cases() {
                    number += 1;
                    if start.elapsed() >= self.limit {
                        tally.left_out += 1;
                        continue;
                    }
                    let began = Instant::now();
                    let outcome = run(&self.backend, &case, size);
                    let seconds = began.elapsed().as_secs_f64();
                    let (word, count) = tally.add(&outcome);
                    println!(
                        "[{number:3}/{total}] {word:7} {form:9} {size} ranks {count:6} \
                         collectives {seconds:7.1} s  {}",
                        case.name()
                    );
                }
            }
        }
        self.summary(&tally, start.elapsed())
    }

    fn summary(&self, tally: &Tally, time: Duration) -> ExitCode {
        let Tally {
            passed,
            skipped,
            failed,
            left_out,
            collectives,
        } = tally;
        let sizes: Vec<String> = self.sizes.iter().map(usize::to_string).collect();
        println!(
            "{} with {} ranks: {passed} cases passed, {failed} failed, {skipped} skipped, \
             {left_out} left out for want of time; {collectives} collectives on each rank in \
             {:.1} minutes",
            self.backend,
            sizes.join(", "),
            time.as_secs_f64() / 60.0
        );
        match failed {
            0 => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        }
    }
}

impl Tally {
    /// Counts an outcome; a word for it, and its collectives.
    fn add(&mut self, outcome: &Option<Outcome>) -> (&'static str, u64) {
        let Some(Outcome { passed, operations }) = *outcome else {
            self.failed += 1;
            return ("FAILED", 0);
        };
        self.passed += usize::from(passed);
        self.skipped += usize::from(!passed);
        self.collectives += operations;
        (if passed { "ok" } else { "skipped" }, operations)
    }
}

/// How a case ended on rank 0.
struct Outcome {
    passed: bool,
    operations: u64,
}

/// Runs a case with a backend in a world of so many ranks; `None` if it failed.
type Run = fn(&str, &Case, usize) -> Option<Outcome>;

fn by_threads(_: &str, case: &Case, size: usize) -> Option<Outcome> {
    let outcomes = std::thread::scope(|scope| {
        let groups = ReferenceGroup::threads(size).into_iter();
        let ranks: Vec<_> = groups
            .map(|group| scope.spawn(move || one(case, &group)))
            .collect();
        let ends: Vec<_> = ranks.into_iter().map(|rank| rank.join().ok()).collect();
        ends.into_iter().collect::<Option<Vec<_>>>()
    });
    outcomes?.into_iter().next()
}

fn by_processes(backend: &str, case: &Case, size: usize) -> Option<Outcome> {
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let server = TcpStoreServer::start(&[addr], None).expect("a store for the ranks");
    let port = server.local_addr().port().to_string();
    let exe = std::env::current_exe().expect("the path of this program");
    let start = |rank: usize| {
        let mut command = Command::new(&exe);
        command.args([
            "rank",
            backend,
            case.name(),
            &rank.to_string(),
            &size.to_string(),
            &port,
        ]);
        command
            .stdout(Stdio::piped())
            .spawn()
            .expect("start a rank")
    };
    let mut ranks: Vec<Child> = (0..size).map(start).collect();
    let end = Instant::now() + CASE_LIMIT;
    let mut fine = true;
    while ranks
        .iter_mut()
        .any(|rank| matches!(rank.try_wait(), Ok(None)))
    {
        if Instant::now() >= end {
            eprintln!("the ranks are not done after {CASE_LIMIT:?}");
            fine = false;
            ranks.iter_mut().for_each(|rank| drop(rank.kill()));
        }
        sleep(Duration::from_millis(2));
    }
    let outputs: Vec<_> = ranks.into_iter().map(Child::wait_with_output).collect();
    let done = outputs
        .iter()
        .all(|o| o.as_ref().is_ok_and(|o| o.status.success()));
    let text = String::from_utf8_lossy(&outputs[0].as_ref().ok()?.stdout).into_owned();
    let (word, count) = text.trim().split_once(' ')?;
    (fine && done).then_some(Outcome {
        passed: word == "passed",
        operations: count.parse().ok()?,
    })
}

/// A rank that is a process: says on standard output what became of the case.
fn one_process(backend: &str, case: &str, rank: usize, size: usize, port: u16) -> ExitCode {
    let known = cases().into_iter().find(|known| known.name() == case);
    let case = known.expect("a known case");
    let store = TcpStore::connect(&TcpStoreOptions::new("127.0.0.1", port)).expect("the store");
    phalanx::backends(); // which makes the built-in ones known
    let init = GroupInit::new(Arc::new(store), rank, size);
    let group = registry::create(backend, &init).expect("a group");
    let Outcome { passed, operations } = one(&case, &group);
    println!("{} {operations}", if passed { "passed" } else { "skipped" });
    ExitCode::SUCCESS
}

/// Runs the case as one rank.
fn one(case: &Case, group: &Arc<dyn ProcessGroup>) -> Outcome {
    // The case's own group is seen here only, and knows how many collectives it was asked for.
    let seen = Mutex::new(None);
    let report: Report = run_cases(group, Level::Full, &[*case], &|fresh| {
        *seen.lock().expect("nobody panics with it") = Some(Arc::clone(&fresh));
        fresh
    });
    group.shutdown().expect("an orderly end");
    let seen = seen.into_inner().expect("nobody panics with it");
    Outcome {
        passed: report.skipped.is_empty(),
        operations: seen.map_or(0, |group| group.sequence()),
    }
}
