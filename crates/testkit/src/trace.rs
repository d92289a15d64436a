//! What a rank prints of the events in its libraries.

use std::fmt::{self, Write as _};
use std::io::Write as _;

use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::{Targets, filter_fn};
use tracing_subscriber::fmt as log_format;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;

/// The target of events that say what a rank is doing now.
pub(crate) const OP_TARGET: &str = "phalanx::op";

/// The variable with the level (or `Targets` of `tracing-subscriber`, like `info,phalanx=debug`) for all other events.
pub(crate) const LEVEL_VAR: &str = "PHALANX_TESTKIT_LOG";

/// Prints operations as `op ...` lines and other events in the usual form.
///
/// A subscriber that is already there is left alone.
pub(crate) fn install() {
    let level = std::env::var(LEVEL_VAR).unwrap_or_else(|_| "info".into());
    let filter = format!("{level},{OP_TARGET}=off")
        .parse::<Targets>()
        .unwrap_or_else(|err| panic!("{LEVEL_VAR}={level:?} cannot be used: {err}"));
    let events = log_format::layer()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_filter(filter);
    let ops = OpLayer.with_filter(filter_fn(|meta| meta.target() == OP_TARGET));
    let _ = tracing_subscriber::registry()
        .with(ops)
        .with(events)
        .try_init();
}

struct OpLayer;

impl<S: Subscriber> Layer<S> for OpLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut line = Line::default();
        event.record(&mut line);
        // In one write, so that threads do not cut into each other's lines; a rank whose reader is
        // gone is about to be killed.
        let text = format!("op {}{}\n", line.message, line.fields);
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
}

#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
