//! Runs a test body in one real process per rank, under a watchdog.
//!
//! Bugs of distributed code live between processes: in what a rank sees when another one is slow,
//! wrong or dead. So a test here says how many ranks it wants and what each does, and the harness
//! starts that many processes by executing the test binary again:
//!
//! ```no_run
//! use std::time::Duration;
//! use phalanx_testkit::World;
//!
//! #[test]
//! fn every_rank_sees_what_rank_0_said() {
//!     World::new(4).deadline(Duration::from_secs(20)).run(|ctx| {
//!         if ctx.rank() == 0 {
//!             ctx.store().set("word", b"phalanx").unwrap();
//!         }
//!         assert_eq!(ctx.store().get("word").unwrap(), b"phalanx");
//!     });
//! }
//! ```
//!
//! # What to know when writing such a test
//!
//! * Everything before [`World::run`] runs in the test's process *and again in every rank*; the
//!   body runs in the ranks only. A value that must be the same for all (a path, a random number)
//!   is handed over with [`World::env`] and read with [`Rank::var`]; for files there is
//!   [`Rank::dir`].
//! * The test is found again by the name of the body's closure, so the closure stands in the test
//!   function. Called from a helper, name the test with [`World::test_name`].
//! * A test may start several worlds, also in a loop or from several threads (then from different
//!   lines). In a rank, those that are not its own do nothing; [`is_rank`] tells the rest of the
//!   test.
//! * Ranks that are meant to die need [`World::check`].
//!
//! # What the harness promises
//!
//! * No hang: after the deadline all ranks are killed, and the report has every rank's log and its
//!   last operation (the last `tracing` event with the target `phalanx::op`, see [`Rank::op`]).
//! * The rank that failed first is reported first.
//! * No process survives, not even if the test itself is killed with SIGKILL.
//! * A rank that ran no test is an error, not a success.
//!
//! Not there: ranks on several machines, and systems other than Linux (death signals, pidfds).
#![forbid(unsafe_code)]

mod call;
mod child;
mod crew;
mod log;
mod outcome;
mod process;
mod supervise;
mod trace;
mod world;

pub use child::{Rank, is_rank};
pub use log::Log;
pub use outcome::{End, Outcome, RankOutcome};
pub use process::{Proc, Signal};
pub use world::World;
