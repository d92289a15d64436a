//! Events on standard error, for programs without a subscriber of their own.

use std::io::IsTerminal;

use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

/// Prints the events that `PHALANX_LOG` asks for, or those of `default` where it is not set or makes
/// no sense: levels and targets as in `info`, `buckets,graph` or `warn,buckets=debug`.
///
/// All crates tell what they do through [`tracing`], so a program with a subscriber sees it there and
/// has no use for this: then it changes nothing and says `false`.
///
/// ```
/// phalanx::log::init("warn"); // PHALANX_LOG=buckets,graph shows how gradients are bucketed
/// ```
pub fn init(default: &str) -> bool {
    let asked = std::env::var("PHALANX_LOG").ok();
    let parse = |text: &str| text.parse::<Targets>().ok().filter(|_| !text.is_empty());
    let events = asked.as_deref().and_then(parse);
    let events = events.or_else(|| parse(default)).unwrap_or_default();
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    let registry = tracing_subscriber::registry();
    registry.with(lines.with_filter(events)).try_init().is_ok()
}
