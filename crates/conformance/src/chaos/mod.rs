//! Ranks that die or stop in the middle of things.
//!
//! One run: two to four processes work through a random mix of calls, everybody the same by the
//! run's seed. At a random moment one of them is killed or stopped, by a signal. Every other must
//! get an error of the right kind that names it, at once or at the timeout; whatever has come to an
//! end before must be right. Then they form a new group and use it, while the stopped one goes on
//! and has to find out that it is alone.
//!
//! Every rank, a process of its own, calls [`run_rank`] and prints the [`Report`]. Whoever starts
//! the processes puts the reports together with [`Summary`], and watches for hangs.

mod mix;
mod plan;
mod report;

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use phalanx_pg::registry::GroupInit;
use phalanx_pg::{Error, ErrorKind, ProcessGroup, ProcessGroupExt};
use phalanx_store::{PrefixStore, Store};
use rustix::process::{Pid, Signal, getpid, kill_process};

use mix::Mix;
pub use plan::{Fault, Plan};
pub use report::{Report, Summary};

/// Longer than an error may take: nobody noticed.
const UNNOTICED: Duration = Duration::from_secs(20);

/// How long survivors wait for each other.
const STORE_LIMIT: Duration = Duration::from_secs(30);

/// Operations of the group that the survivors form.
const AFTERWARDS: usize = 12;

/// Connects one rank with its peers by the backend under test.
pub type Connect<'a> = &'a dyn Fn(&GroupInit) -> phalanx_pg::Result<Arc<dyn ProcessGroup>>;

/// One rank of one run. The rank that the plan wants dead may not return.
///
/// # Panics
///
/// If a result is wrong, or an error is missing or not the right one.
pub fn run_rank(plan: &Plan, rank: usize, store: &Arc<dyn Store>, connect: Connect<'_>) -> Report {
    let pid = getpid().as_raw_pid().to_string();
    store.set(&pid_key(rank), pid.as_bytes()).expect("a store");
    let world = join(plan, store, "first", rank, plan.ranks, connect);
    world.barrier().expect("nothing has happened yet");
    // Sleeps at first, then says when it was.
    let saboteur = (rank == plan.saboteur()).then(|| {
        let (plan, store) = (plan.clone(), store.second_handle().expect("a store"));
        std::thread::spawn(move || sabotage(&plan, &*store))
    });
    let mut mix = Mix::new(plan, &world);
    let err = work_until_it_fails(plan, &mut mix);
    let failed_at = now();
    let part_errors = std::mem::take(&mut mix.part_errors);
    drop(mix);
    if let Some(saboteur) = saboteur {
        saboteur.join().expect("the signal is sent");
    }
    if rank == plan.victim {
        println!("the one that was stopped ends with: {err}");
        return Report::resumed();
    }
    for err in &part_errors {
        // Whoever has lost the world first leaves the part too.
        let cause = err.cause().unwrap_or(err);
        let left = cause.kind() == ErrorKind::Aborted && cause.message().contains("dropped");
        if !left {
            check(plan, &world, err);
        }
    }
    let direct = check(plan, &world, &err);
    let fault_at = store.get_for("fault", STORE_LIMIT).expect("it happened");
    let fault_at: u128 = String::from_utf8_lossy(&fault_at).parse().expect("a time");
    let later = world.barrier().expect_err("a broken group stays broken");
    assert!(!later.leaves_group_usable(), "{later}");
    drop(world);

    let survivors: Vec<usize> = (0..plan.ranks).filter(|&r| r != plan.victim).collect();
    store
        .barrier_for("all have failed", survivors.len(), STORE_LIMIT)
        .expect("every survivor gets an error");
    if rank == plan.saboteur() {
        match plan.fault {
            Fault::Kill => {}
            Fault::StopThenKill => signal(store.as_ref(), plan.victim, Signal::KILL),
            Fault::StopThenResume => signal(store.as_ref(), plan.victim, Signal::CONT),
        }
    }
    let own = survivors.iter().position(|&r| r == rank).expect("it lives");
    afterwards(plan, store, own, survivors.len(), connect);
    let after = Duration::from_nanos(failed_at.saturating_sub(fault_at) as u64);
    Report::failed(plan, after, direct)
}

fn join(
    plan: &Plan,
    store: &Arc<dyn Store>,
    name: &str,
    rank: usize,
    size: usize,
    connect: Connect<'_>,
) -> Arc<dyn ProcessGroup> {
    let store = PrefixStore::new(name, store.second_handle().expect("a store"));
    let mut init = GroupInit::new(Arc::new(store), rank, size);
    // Connecting is not what is tested, and machines may be busy.
    init.timeout = plan.timeout.max(STORE_LIMIT);
    init.name = name.to_owned();
    connect(&init).unwrap_or_else(|err| panic!("connecting {name}: {err}"))
}

/// Waits for the moment, strikes, and says when it was.
fn sabotage(plan: &Plan, store: &dyn Store) {
    std::thread::sleep(plan.delay);
    let at = now();
    match plan.fault {
        Fault::Kill => signal(store, plan.victim, Signal::KILL),
        Fault::StopThenKill | Fault::StopThenResume => signal(store, plan.victim, Signal::STOP),
    }
    store
        .set("fault", at.to_string().as_bytes())
        .expect("a store");
}

fn pid_key(rank: usize) -> String {
    format!("pid/{rank}")
}

fn signal(store: &dyn Store, rank: usize, signal: Signal) {
    let pid = store.get_for(&pid_key(rank), STORE_LIMIT).expect("a pid");
    let pid = String::from_utf8_lossy(&pid)
        .parse()
        .ok()
        .and_then(Pid::from_raw);
    kill_process(pid.expect("a pid"), signal).expect("it has not been waited for");
}

fn work_until_it_fails(plan: &Plan, mix: &mut Mix<'_>) -> Error {
    let start = Instant::now();
    loop {
        if let Err(err) = mix.step() {
            return err;
        }
        let limit = plan.delay + plan.timeout.min(UNNOTICED) + UNNOTICED;
        assert!(start.elapsed() < limit, "nobody noticed: {plan}");
    }
}

/// Whether the error names the victim; panics if it is not an error that a survivor may get.
fn check(plan: &Plan, world: &Arc<dyn ProcessGroup>, err: &Error) -> bool {
    // Of an operation on a group that was broken before, or of one that was to be split from it.
    let err = err.cause().unwrap_or(err);
    let named = err.peer().map(|peer| mix::world_rank(world, err, peer));
    let expected = match plan.fault {
        Fault::Kill => ErrorKind::PeerLost,
        _ => ErrorKind::Timeout,
    };
    assert_eq!(err.kind(), expected, "{err:?} in {plan}");
    assert!(named.is_some(), "{err} names nobody in {plan}");
    let direct = named == Some(plan.victim);
    // Who waits for a rank that waits for the one that is stopped may run out of time first.
    let may_be_indirect = plan.fault != Fault::Kill && plan.ranks > 2;
    assert!(direct || may_be_indirect, "{err} names {named:?} in {plan}");
    if !direct {
        println!("not the one that was stopped: {err}");
    }
    direct
}

/// What nobody who was left behind can disturb.
fn afterwards(plan: &Plan, store: &Arc<dyn Store>, rank: usize, size: usize, connect: Connect<'_>) {
    let group = join(plan, store, "second", rank, size, connect);
    let mut mix = Mix::afterwards(plan, &group);
    for _ in 0..AFTERWARDS {
        mix.step()
            .unwrap_or_else(|err| panic!("the new group fails in {plan}: {err}"));
    }
    mix.finish().expect("the new group works");
    drop(mix);
    group.shutdown().expect("an orderly end");
}

fn now() -> u128 {
    // Of the machine, for it is compared with other processes'.
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().as_nanos()
}
