//! What the documentation says about threads, checked by the compiler.

use std::sync::Arc;

use phalanx_pg::registry::{GroupInit, Registry, Selection};
use phalanx_pg::*;

fn send<T: Send>() {}
fn shared<T: Send + Sync>() {}

#[test]
fn groups_and_what_belongs_to_them_are_shared_by_threads() {
    shared::<Arc<dyn ProcessGroup>>();
    shared::<(FakeGroup, Checked, Recorded, Faulty, ByDevice)>();
    shared::<Configured<'static, dyn ProcessGroup>>();
    shared::<(Lane, Recorder, SignalDump, Registry, GroupInit)>();
}

#[test]
fn memory_moves_between_threads_and_is_read_by_many() {
    shared::<(Buffer, Frozen, Sparse, Done)>();
    send::<Call>();
}

#[test]
fn operations_may_end_on_another_thread() {
    send::<(RawWork, Work<Buffer>, Work<std::cell::Cell<u8>>)>();
    shared::<(WorkStatus, Completer)>();
}

#[test]
fn the_rest_is_plain_data() {
    shared::<(Error, ErrorKind, Place, State, Times)>();
    shared::<(CallKind, CallOptions, Mode, Payload, Turn)>();
    shared::<(DType, Device, ReduceOp, Capabilities, PeerDeath)>();
    shared::<(Set<DType>, Fault, FaultPlan, RecorderOptions, Selection)>();
    shared::<(Trace, TraceEntry, TraceState, GroupConfig, GroupStatus)>();
    shared::<Arrival>();
}
