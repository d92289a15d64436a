//! Ranks that are killed or stopped in the middle of a random mix of calls.
//!
//! `cargo xtask soak chaos` is the same for as long as one likes.

use std::time::Duration;

use phalanx_conformance::chaos::{Fault, Plan, Report, Summary, run_rank};
use phalanx_native::NativeGroup;
use phalanx_testkit::{End, World, is_rank};

const RUNS: u64 = 40;
const MOST_RANKS: usize = 4;

#[test]
fn whoever_dies_or_stops_the_others_learn_who_it_was_and_go_on() {
    let mut summary = Summary::default();
    for seed in 0..RUNS {
        let plan = Plan::new(seed, MOST_RANKS);
        // Half of them with several streams between hosts.
        let streams = if seed % 2 == 0 { "1" } else { "3" };
        let world = World::new(plan.ranks).deadline(Duration::from_secs(120));
        let world = world.env("PHALANX_STREAMS", streams);
        let world = world.env("PHALANX_PIECE", "5000");
        world.check(
            |ctx| {
                let host = format!("host {}", plan.hosts[ctx.rank()]);
                let connect = |init: &_| NativeGroup::connect_as_on(init, &host);
                println!("{}", run_rank(&plan, ctx.rank(), &ctx.store(), &connect));
            },
            |outcome| {
                let mut reports = Vec::new();
                for (rank, outcome_of) in outcome.ranks().iter().enumerate() {
                    let killed = rank == plan.victim && plan.fault != Fault::StopThenResume;
                    match killed {
                        true => assert_eq!(outcome_of.end, End::Signaled(9), "{plan}"),
                        false => {
                            assert_eq!(
                                outcome_of.end,
                                End::Finished,
                                "{plan}\n{}",
                                outcome.report()
                            );
                            reports.extend(Report::find(&outcome_of.log));
                        }
                    }
                }
                let expected = plan.ranks - usize::from(plan.fault != Fault::StopThenResume);
                assert_eq!(reports.len(), expected, "{plan}\n{}", outcome.report());
                summary.add(&plan, &reports);
            },
        );
    }
    println!("{summary}");
    assert!(is_rank() || summary.runs == RUNS as usize);
}
