//! What the recordings say together. Plain data in, plain data out.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_pg::{Trace, TraceEntry, TraceState};
use serde::Serialize;

use super::{last_moment, operation};

/// The answer of `phalanx trace`.
#[derive(Debug, Serialize)]
pub(super) struct Analysis {
    pub(super) world_size: usize,
    /// Ranks that left a recording.
    pub(super) recorded: Vec<usize>,
    pub(super) not_recorded: Vec<usize>,
    pub(super) groups: Vec<Group>,
    pub(super) disagreements: Vec<Disagreement>,
    /// Sends and receives that are not finished.
    pub(super) point_to_point: Vec<Pending>,
    /// What broke a group, by rank.
    pub(super) errors: BTreeMap<usize, Vec<String>>,
}

/// How far the ranks of a group came.
#[derive(Debug, Serialize)]
pub(super) struct Group {
    pub(super) name: String,
    pub(super) backend: String,
    pub(super) ranks: Vec<usize>,
    /// The newest collective that any rank has called and that is not finished everywhere.
    pub(super) front: Option<Front>,
}

#[derive(Debug, Serialize)]
pub(super) struct Front {
    pub(super) seq: u64,
    pub(super) operation: String,
    /// Ranks that called it and are not through.
    pub(super) waiting: Vec<Waiting>,
    /// Ranks that finished it.
    pub(super) through: Vec<usize>,
    /// Ranks that have not called it.
    pub(super) behind: Vec<Behind>,
    /// Ranks without a recording that were never seen to reach it.
    pub(super) unseen: Vec<usize>,
}

#[derive(Debug, Serialize)]
pub(super) struct Waiting {
    pub(super) rank: usize,
    pub(super) since_ns: u64,
    /// Until it failed, or else until the end of all recordings.
    pub(super) waited_ms: u64,
    pub(super) state: TraceState,
    pub(super) error: Option<String>,
}

/// A send or a receive that nobody has answered.
#[derive(Debug, Serialize)]
pub(super) struct Pending {
    pub(super) rank: usize,
    pub(super) group: String,
    pub(super) operation: String,
    pub(super) since_ns: u64,
    pub(super) error: Option<String>,
}

/// A rank whose turn it is.
#[derive(Debug, Serialize)]
pub(super) struct Behind {
    pub(super) rank: usize,
    /// The last collective of the group that it called.
    pub(super) last: Option<Last>,
}

#[derive(Debug, Serialize)]
pub(super) struct Last {
    pub(super) seq: u64,
    pub(super) operation: String,
    pub(super) called_ns: u64,
    pub(super) finished_ns: Option<u64>,
}

/// Ranks that called different things at the same place.
#[derive(Debug, Serialize)]
pub(super) struct Disagreement {
    pub(super) group: String,
    pub(super) seq: u64,
    /// What was called, and by which ranks.
    pub(super) sides: Vec<Side>,
}

#[derive(Debug, Serialize)]
pub(super) struct Side {
    pub(super) call: String,
    pub(super) ranks: Vec<usize>,
}

pub(super) fn analyse(traces: &[Trace]) -> Analysis {
    let world_size = traces.iter().map(|trace| trace.world_size).max();
    let world_size = world_size.unwrap_or(0);
    let recorded: Vec<usize> = traces.iter().map(|trace| trace.rank).collect();
    let not_recorded = (0..world_size).filter(|rank| !recorded.contains(rank));
    let groups = groups(traces);
    Analysis {
        world_size,
        not_recorded: not_recorded.collect(),
        disagreements: groups
            .iter()
            .flat_map(|group| disagreements(&group.name, &group.members))
            .collect(),
        point_to_point: traces.iter().flat_map(pending).collect(),
        errors: traces
            .iter()
            .map(|trace| (trace.rank, errors(trace)))
            .filter(|(_, errors)| !errors.is_empty())
            .collect(),
        groups: groups.iter().map(|group| group.summary(traces)).collect(),
        recorded,
    }
}

fn pending(trace: &Trace) -> impl Iterator<Item = Pending> {
    let unfinished = trace
        .entries
        .iter()
        .filter(|entry| entry.is_p2p && entry.state != TraceState::Completed);
    unfinished.map(|entry| Pending {
        rank: trace.rank,
        group: entry.process_group.0.clone(),
        operation: describe(entry),
        since_ns: entry.time_created_ns,
        error: entry.error.clone(),
    })
}

fn errors(trace: &Trace) -> Vec<String> {
    let of_groups = trace.pg_status.iter().filter_map(|(id, status)| {
        let name = trace.pg_config.get(id).map_or("?", |config| &config.name);
        Some(format!("{name}: {}", status.error.as_ref()?))
    });
    of_groups.collect()
}

/// A group with the collectives of each rank, by sequence number.
struct Members<'a> {
    name: String,
    backend: String,
    ranks: Vec<usize>,
    members: BTreeMap<usize, BTreeMap<u64, &'a TraceEntry>>,
}

/// Groups are the same if they have one name and one set of ranks; ids differ between ranks.
fn groups(traces: &[Trace]) -> Vec<Members<'_>> {
    let mut groups: BTreeMap<(String, String), Members<'_>> = BTreeMap::new();
    for trace in traces {
        for (id, config) in &trace.pg_config {
            let key = (config.name.clone(), config.ranks.clone());
            let group = groups.entry(key).or_insert_with(|| Members {
                name: config.name.clone(),
                backend: config.desc.clone(),
                ranks: serde_json::from_str(&config.ranks).unwrap_or_default(),
                members: BTreeMap::new(),
            });
            let own = trace.entries.iter().filter(|entry| entry.pg_id == *id);
            let collectives = own.filter(|entry| !entry.is_p2p);
            let by_seq = collectives.map(|entry| (entry.collective_seq_id, entry));
            group.members.insert(trace.rank, by_seq.collect());
        }
    }
    groups.into_values().collect()
}

impl Members<'_> {
    fn summary(&self, traces: &[Trace]) -> Group {
        Group {
            name: self.name.clone(),
            backend: self.backend.clone(),
            ranks: self.ranks.clone(),
            front: self.front(last_moment(traces)),
        }
    }

    fn front(&self, end: u64) -> Option<Front> {
        // The oldest that is not finished everywhere: what comes after it waits for it.
        let newest = self.members.values().filter_map(|m| m.keys().last());
        let newest = *newest.max()?;
        let unfinished = |seq: &u64| {
            let mut calls = self.members.values().filter_map(|member| member.get(seq));
            calls.any(|entry| entry.state != TraceState::Completed)
                || self.members.values().any(|m| m.keys().last() < Some(seq))
        };
        let oldest = self.members.values().filter_map(|m| m.keys().next()).max();
        let seq = (*oldest?..=newest).find(unfinished).or_else(|| {
            // All that have a recording are through; is somebody without one missing?
            let missing = self
                .ranks
                .iter()
                .any(|rank| !self.members.contains_key(rank));
            missing.then_some(newest)
        })?;
        let called = self.members.values().find_map(|member| member.get(&seq))?;
        let mut front = Front {
            seq,
            operation: describe(called),
            waiting: vec![],
            through: vec![],
            behind: vec![],
            unseen: self.unseen(seq),
        };
        for (&rank, member) in &self.members {
            match member.get(&seq) {
                Some(entry) if entry.state == TraceState::Completed => front.through.push(rank),
                Some(entry) => {
                    let since_ns = entry.time_created_ns;
                    let until = entry.time_discovered_completed_ns.unwrap_or(end);
                    front.waiting.push(Waiting {
                        rank,
                        since_ns,
                        waited_ms: until.saturating_sub(since_ns) / 1_000_000,
                        state: entry.state,
                        error: entry.error.clone(),
                    });
                }
                None => front.behind.push(Behind {
                    rank,
                    last: member.values().next_back().map(|entry| Last {
                        seq: entry.collective_seq_id,
                        operation: describe(entry),
                        called_ns: entry.time_created_ns,
                        finished_ns: entry.time_discovered_completed_ns,
                    }),
                }),
            }
        }
        Some(front)
    }

    /// Ranks of which there is no recording, and no peer saw them arrive at `seq`.
    fn unseen(&self, seq: u64) -> Vec<usize> {
        let entries = self.members.values().filter_map(|member| member.get(&seq));
        let arrived: BTreeSet<usize> = entries
            .flat_map(|entry| entry.arrivals.iter())
            .filter_map(|arrival| self.ranks.get(arrival.rank).copied())
            .collect();
        let missing = self.ranks.iter().copied();
        missing
            .filter(|rank| !self.members.contains_key(rank) && !arrived.contains(rank))
            .collect()
    }
}

fn disagreements(
    group: &str,
    members: &BTreeMap<usize, BTreeMap<u64, &TraceEntry>>,
) -> Vec<Disagreement> {
    let mut by_seq: BTreeMap<u64, BTreeMap<String, Vec<usize>>> = BTreeMap::new();
    for (&rank, member) in members {
        for (&seq, entry) in member {
            let calls = by_seq.entry(seq).or_default();
            calls.entry(describe(entry)).or_default().push(rank);
        }
    }
    let differing = by_seq.into_iter().filter(|(_, calls)| calls.len() > 1);
    differing
        .map(|(seq, calls)| Disagreement {
            group: group.to_owned(),
            seq,
            sides: calls
                .into_iter()
                .map(|(call, ranks)| Side { call, ranks })
                .collect(),
        })
        .collect()
}

/// The call as far as it is the same on all ranks: `all_reduce Float x 1000`.
fn describe(entry: &TraceEntry) -> String {
    let name = operation(entry);
    let (inputs, outputs) = (&entry.input_sizes, &entry.output_sizes);
    // Of these, one side is the root's alone, or differs by rank.
    let sizes: &[[usize; 1]] = match name {
        "scatter" | "_reduce_scatter_base" => outputs,
        "all_to_all" => &[],
        _ if inputs.is_empty() => outputs,
        _ => inputs,
    };
    let dtypes = match entry.input_dtypes.is_empty() {
        true => &entry.output_dtypes,
        false => &entry.input_dtypes,
    };
    let dtype = dtypes.first().map(String::as_str);
    let lengths: Vec<String> = sizes.iter().map(|[len]| len.to_string()).collect();
    match (dtype, lengths.is_empty()) {
        (None, _) => name.to_owned(),
        (Some(dtype), true) => format!("{name} {dtype}"),
        (Some(dtype), false) => format!("{name} {dtype} x {}", lengths.join("+")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::*;
    use super::*;

    #[test]
    fn the_rank_that_has_not_called_is_behind() {
        let traces = [
            trace(0, 2, &[done(0, "all_reduce", 8), stuck(1, "all_reduce", 8)]),
            trace(1, 2, &[done(0, "all_reduce", 8)]),
        ];
        let analysis = analyse(&traces);
        assert!(analysis.disagreements.is_empty());
        let front = analysis.groups[0].front.as_ref().unwrap();
        assert_eq!(
            (front.seq, front.operation.as_str()),
            (1, "all_reduce Float x 8")
        );
        assert_eq!(front.waiting.len(), 1);
        assert_eq!(front.waiting[0].rank, 0);
        assert_eq!(front.behind[0].rank, 1);
        assert_eq!(front.behind[0].last.as_ref().unwrap().seq, 0);
    }

    #[test]
    fn the_oldest_unfinished_call_is_what_the_others_wait_for() {
        let traces = [
            trace(0, 2, &[stuck(4, "broadcast", 1), stuck(5, "barrier", 0)]),
            trace(1, 2, &[stuck(4, "broadcast", 1)]),
        ];
        let analysis = analyse(&traces);
        let front = analysis.groups[0].front.as_ref().unwrap();
        assert_eq!((front.seq, front.waiting.len()), (4, 2));
        assert!(front.behind.is_empty());
    }

    #[test]
    fn a_rank_without_a_recording_is_looked_for_among_arrivals() {
        let mut waiting = stuck(3, "all_reduce", 8);
        waiting["arrivals"] = serde_json::json!([{"rank": 2, "time_ns": SECOND}]);
        let traces = [trace(0, 3, &[waiting])];
        let analysis = analyse(&traces);
        assert_eq!(analysis.not_recorded, [1, 2]);
        assert_eq!(analysis.groups[0].front.as_ref().unwrap().unseen, [1]);
    }

    #[test]
    fn different_calls_lengths_and_types_are_disagreements() {
        let mut doubles = stuck(2, "all_reduce", 8);
        doubles["input_dtypes"] = serde_json::json!(["Double"]);
        let traces = [
            trace(
                0,
                3,
                &[
                    stuck(0, "all_reduce", 8),
                    stuck(1, "barrier", 0),
                    stuck(2, "all_reduce", 8),
                ],
            ),
            trace(
                1,
                3,
                &[stuck(0, "all_reduce", 9), stuck(1, "broadcast", 4), doubles],
            ),
            trace(
                2,
                3,
                &[
                    stuck(0, "all_reduce", 8),
                    stuck(1, "barrier", 0),
                    stuck(2, "all_reduce", 8),
                ],
            ),
        ];
        let found = analyse(&traces).disagreements;
        assert_eq!(found.iter().map(|d| d.seq).collect::<Vec<_>>(), [0, 1, 2]);
        let sides: Vec<_> = found[0]
            .sides
            .iter()
            .map(|s| (s.call.as_str(), &s.ranks))
            .collect();
        assert_eq!(
            sides,
            [
                ("all_reduce Float x 8", &vec![0, 2]),
                ("all_reduce Float x 9", &vec![1])
            ]
        );
    }

    #[test]
    fn a_message_that_never_comes_is_told_beside_the_collectives() {
        let mut receive = stuck(1, "recv 0<-1", 8);
        receive["is_p2p"] = true.into();
        let traces = [
            trace(0, 2, &[done(0, "barrier", 0), receive]),
            trace(1, 2, &[done(0, "barrier", 0)]),
        ];
        let analysis = analyse(&traces);
        assert!(analysis.groups[0].front.is_none());
        let [pending] = &analysis.point_to_point[..] else {
            panic!("{analysis:?}");
        };
        assert_eq!(
            (pending.rank, pending.operation.as_str()),
            (0, "recv 0<-1 Float x 8")
        );
    }

    #[test]
    fn what_differs_by_rank_is_no_disagreement() {
        let with = |outputs: &[usize]| {
            let mut entry = done(0, "gather", 8);
            entry["output_sizes"] = outputs.iter().map(|&len| vec![len]).collect();
            entry
        };
        let traces = [trace(0, 2, &[with(&[16])]), trace(1, 2, &[with(&[])])];
        let analysis = analyse(&traces);
        assert!(analysis.disagreements.is_empty(), "{analysis:?}");
        assert!(analysis.groups[0].front.is_none(), "all is finished");
    }
}
