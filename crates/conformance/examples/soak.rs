//! The whole product of the process group suite on the reference backend, threads and processes.
//!
//! ```text
//! soak [--ranks 1,2,3,4,8] [--minutes N]
//! ```
//!
//! Every case runs in a world of its own. After the given time no further case is started, and the
//! last line says how many were left out. `cargo xtask soak conformance` builds and runs it.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use phalanx_conformance::group::{Case, Level, Report, cases, run_cases};
use phalanx_pg::ProcessGroup;
use phalanx_reference::{Options, ReferenceGroup};
use phalanx_store::{TcpStore, TcpStoreOptions, TcpStoreServer};

/// Longer than any case takes: a world that is not done by then hangs.
const CASE_LIMIT: Duration = Duration::from_secs(3600);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [word, case, rank, size, port] = &args[..]
        && word == "rank"
    {
        return one_process(case, number(rank), number(size), number(port) as u16);
    }
    let (mut sizes, mut minutes) = (vec![1, 2, 3, 4, 8], usize::MAX);
    for pair in args.chunks(2) {
        match pair {
            [name, value] if name == "--ranks" => sizes = value.split(',').map(number).collect(),
            [name, value] if name == "--minutes" => minutes = number(value),
            other => panic!("unknown arguments {other:?}: soak [--ranks 1,2] [--minutes N]"),
        }
    }
    soak(
        &sizes,
        Duration::from_secs(60).saturating_mul(minutes.min(1 << 20) as u32),
    )
}

fn number(text: &str) -> usize {
    text.parse()
        .unwrap_or_else(|_| panic!("{text:?} is not a number"))
}

fn soak(sizes: &[usize], limit: Duration) -> ExitCode {
    let start = Instant::now();
    let (mut passed, mut skipped, mut left_out, mut operations) = (0, 0, 0, 0);
    for &size in sizes {
        for (how, run) in [("threads", by_threads as Run), ("processes", by_processes)] {
            for case in cases() {
                if start.elapsed() >= limit {
                    left_out += 1;
                    continue;
                }
                let began = Instant::now();
                let Some(outcome) = run(&case, size) else {
                    println!("FAILED {how} {size}: {}", case.name());
                    return ExitCode::FAILURE;
                };
                let seconds = began.elapsed().as_secs_f64();
                let (name, count) = (case.name(), outcome.operations);
                let word = if outcome.passed { "ok  " } else { "skip" };
                println!(
                    "{word} {how:9} {size} ranks {count:7} collectives {seconds:8.2} s  {name}"
                );
                passed += usize::from(outcome.passed);
                skipped += usize::from(!outcome.passed);
                operations += count;
            }
        }
    }
    let minutes = start.elapsed().as_secs_f64() / 60.0;
    println!("{operations} collectives on each rank in {minutes:.1} minutes");
    println!("{passed} cases passed, {skipped} skipped, {left_out} left out for want of time");
    ExitCode::SUCCESS
}

/// How a case ended on rank 0.
struct Outcome {
    passed: bool,
    operations: u64,
}

/// Runs a case in a world of so many ranks; `None` if it failed.
type Run = fn(&Case, usize) -> Option<Outcome>;

fn by_threads(case: &Case, size: usize) -> Option<Outcome> {
    let outcomes = std::thread::scope(|scope| {
        let groups = ReferenceGroup::threads(size).into_iter();
        let ranks: Vec<_> = groups
            .map(|group| scope.spawn(move || one(case, &group)))
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().ok())
            .collect::<Option<Vec<_>>>()
    });
    outcomes?.into_iter().next()
}

fn by_processes(case: &Case, size: usize) -> Option<Outcome> {
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let server = TcpStoreServer::start(&[addr], None).expect("a store for the ranks");
    let port = server.local_addr().port().to_string();
    let exe = std::env::current_exe().expect("the path of this program");
    let start = |rank: usize| {
        let mut command = Command::new(&exe);
        command.args([
            "rank",
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
fn one_process(case: &str, rank: usize, size: usize, port: u16) -> ExitCode {
    let case = cases()
        .into_iter()
        .find(|known| known.name() == case)
        .expect("a known case");
    let store = TcpStore::connect(&TcpStoreOptions::new("127.0.0.1", port)).expect("the store");
    let options = Options::default();
    let group = ReferenceGroup::connect(Arc::new(store), rank, size, &options).expect("a group");
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
