//! What the tests of this crate share.
#![allow(dead_code, reason = "not every test binary uses all of it")]

use std::sync::Arc;
use std::time::Duration;

use phalanx_native::NativeGroup;
use phalanx_pg::registry::GroupInit;
use phalanx_pg::{Buffer, DType, Device, ProcessGroup};
use phalanx_testkit::{End, Outcome, Rank, World};
use rustix::process::{Pid, Signal, getpid, kill_process};

/// Below the world's deadline, so that an error names the operation.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
pub(crate) const DEADLINE: Duration = Duration::from_secs(240);

pub(crate) fn init(ctx: &Rank) -> GroupInit {
    let mut init = GroupInit::new(ctx.store(), ctx.rank(), ctx.size());
    init.timeout = TIMEOUT;
    init
}

pub(crate) fn connect(ctx: &Rank) -> Arc<dyn ProcessGroup> {
    NativeGroup::connect(&init(ctx)).unwrap()
}

/// What makes even small messages travel on several streams between hosts.
pub(crate) const STREAMS: [(&str, &str); 2] = [("PHALANX_STREAMS", "3"), ("PHALANX_PIECE", "200")];

/// A world whose ranks have several streams between hosts.
pub(crate) fn striped(size: usize) -> World {
    let world = World::new(size).deadline(DEADLINE);
    let vars = STREAMS.into_iter();
    vars.fold(world, |world, (name, value)| world.env(name, value))
}

/// As if each rank were on the host that `hosts` says.
pub(crate) fn connect_across(ctx: &Rank, hosts: &[&str]) -> Arc<dyn ProcessGroup> {
    NativeGroup::connect_as_on(&init(ctx), hosts[ctx.rank()]).unwrap()
}

/// Memory of the group, full of one number.
pub(crate) fn registered(group: &Arc<dyn ProcessGroup>, len: usize, value: f32) -> Buffer {
    let mut buffer = group.allocate(Device::Cpu, DType::F32, len).unwrap();
    buffer.as_mut_slice::<f32>().unwrap().fill(value);
    buffer
}

/// No goodbye, no unwinding.
pub(crate) fn die() -> ! {
    signal_self(Signal::KILL);
    unreachable!("nobody survives that");
}

/// Stands still until somebody [resumes](resume) it.
pub(crate) fn stop(ctx: &Rank) {
    let pid = getpid().as_raw_pid().to_string();
    ctx.store().set("stopped", pid.as_bytes()).unwrap();
    signal_self(Signal::STOP);
}

/// Lets the rank go on that has stopped.
pub(crate) fn resume(ctx: &Rank) {
    let pid = ctx.store().get("stopped").unwrap();
    let pid: i32 = String::from_utf8(pid).unwrap().parse().unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::CONT).unwrap();
}

fn signal_self(signal: Signal) {
    kill_process(getpid(), signal).unwrap();
    // Another thread may be the one that it reaches first.
    std::thread::sleep(Duration::from_millis(200));
}

/// All of these have come to their end.
pub(crate) fn finished(outcome: &Outcome, ranks: &[usize]) {
    for &rank in ranks {
        let end = &outcome.rank(rank).end;
        assert_eq!(*end, End::Finished, "{}", outcome.report());
    }
}
