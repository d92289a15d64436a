//! Recordings for the tests of this module.

use phalanx_pg::Trace;
use serde_json::{Value, json};

pub(super) const SECOND: u64 = 1_000_000_000;

pub(super) fn stuck(seq: u64, operation: &str, len: usize) -> Value {
    let (sizes, dtypes) = match len {
        0 => (json!([]), json!([])),
        len => (json!([[len]]), json!(["Float"])),
    };
    json!({
        "record_id": seq, "pg_id": 0, "process_group": ["world", "fake"],
        "collective_seq_id": seq, "p2p_seq_id": 0, "op_id": seq, "is_p2p": false,
        "profiling_name": format!("fake:{operation}"),
        "input_sizes": sizes, "input_dtypes": dtypes, "output_sizes": [], "output_dtypes": [],
        "time_created_ns": SECOND + seq * SECOND,
        "time_discovered_started_ns": SECOND + seq * SECOND + SECOND / 10,
        "time_discovered_completed_ns": null, "duration_ms": null, "timeout_ms": 1000,
        "state": "started", "retired": false, "thread_name": "main", "error": null,
        "arrivals": [],
    })
}

pub(super) fn done(seq: u64, operation: &str, len: usize) -> Value {
    let mut entry = stuck(seq, operation, len);
    entry["state"] = json!("completed");
    entry["retired"] = json!(true);
    entry["time_discovered_completed_ns"] = json!(SECOND + seq * SECOND + SECOND / 2);
    entry
}

pub(super) fn trace(rank: usize, world_size: usize, entries: &[Value]) -> Trace {
    let ranks: Vec<usize> = (0..world_size).collect();
    let trace = json!({
        "version": "2.10", "rank": rank, "world_size": world_size, "hostname": "host", "pid": 1,
        "pg_config": {"0": {"name": "world", "desc": "fake", "ranks": format!("{ranks:?}")}},
        "pg_status": {"0": {"last_enqueued_collective": 0, "last_started_collective": 0,
                            "last_completed_collective": 0}},
        "entries": entries,
    });
    serde_json::from_value(trace).expect("a recording")
}
