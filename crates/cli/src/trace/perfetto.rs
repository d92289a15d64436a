//! Recordings as trace events, which ui.perfetto.dev and chrome://tracing read.

use phalanx_pg::{Trace, TraceEntry};
use serde_json::{Value, json};

use super::{last_moment, operation};

/// One process per rank, one track per group; an operation waits in its queue, then runs.
pub(super) fn events(traces: &[Trace]) -> Value {
    let end = last_moment(traces);
    let all = traces.iter().flat_map(|trace| &trace.entries);
    let start = all.map(|entry| entry.time_created_ns).min().unwrap_or(0);
    let mut events = Vec::new();
    for trace in traces {
        let rank = trace.rank;
        let name = format!("rank {rank} ({}, pid {})", trace.hostname, trace.pid);
        events.push(json!({
            "ph": "M", "name": "process_name", "pid": rank, "args": {"name": name},
        }));
        events.push(json!({
            "ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank},
        }));
        for entry in &trace.entries {
            events.extend(phases(rank, entry, start, end));
        }
    }
    json!({"displayTimeUnit": "ms", "traceEvents": events})
}

/// Operations may overlap, so each phase is a pair of asynchronous events with an id of its own.
fn phases(rank: usize, entry: &TraceEntry, start: u64, end: u64) -> Vec<Value> {
    let done = entry.time_discovered_completed_ns;
    let begun = entry.time_discovered_started_ns;
    let name = format!("{} #{}", operation(entry), entry.collective_seq_id);
    let queued = (entry.time_created_ns, begun.or(done).unwrap_or(end));
    let running = begun.map(|begun| (begun, done.unwrap_or(end)));
    let group = &entry.process_group.0;
    let unfinished = if done.is_none() { " (unfinished)" } else { "" };
    let tracks = [("queued", Some(queued)), ("running", running)];
    let spans = tracks
        .into_iter()
        .filter_map(|(phase, span)| Some((phase, span?)));
    spans
        .filter(|(phase, (from, to))| *phase == "running" || from < to)
        .flat_map(|(phase, (from, to))| {
            let event = |ph: &str, at: u64| {
                json!({
                    "ph": ph,
                    "cat": format!("{group} {phase}"),
                    "name": format!("{name}{unfinished}"),
                    "id": format!("{rank}.{}.{}.{phase}", entry.pg_id, entry.record_id),
                    "pid": rank,
                    "tid": entry.pg_id,
                    "ts": at.saturating_sub(start) as f64 / 1e3,
                    "args": {
                        "state": entry.state, "error": entry.error, "input": entry.input_sizes,
                        "dtype": entry.input_dtypes, "output": entry.output_sizes,
                        "thread": entry.thread_name,
                    },
                })
            };
            [event("b", from), event("e", to.max(from))]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::samples::*;
    use super::*;

    #[test]
    fn every_phase_begins_and_ends_on_its_rank() {
        let traces = [
            trace(0, 2, &[done(0, "all_reduce", 8), stuck(1, "all_reduce", 8)]),
            trace(1, 2, &[done(0, "all_reduce", 8)]),
        ];
        let all = events(&traces);
        let events = all["traceEvents"].as_array().unwrap();
        let of = |ph: &str| events.iter().filter(|e| e["ph"] == ph).collect::<Vec<_>>();
        assert_eq!(of("M").len(), 4);
        let (begins, ends) = (of("b"), of("e"));
        assert_eq!(begins.len(), ends.len());
        for (begin, end) in begins.iter().zip(&ends) {
            assert_eq!((&begin["id"], &begin["cat"]), (&end["id"], &end["cat"]));
            assert!(begin["ts"].as_f64() <= end["ts"].as_f64(), "{begin} {end}");
        }
        let names: Vec<&str> = begins.iter().map(|e| e["name"].as_str().unwrap()).collect();
        assert!(names.contains(&"all_reduce #1 (unfinished)"), "{names:?}");
        let first = begins.iter().find(|e| e["cat"] == "world running").unwrap();
        assert_eq!(first["ts"].as_f64(), Some(100_000.0));
    }
}
