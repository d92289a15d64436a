//! The other client: asks at a steady pace and records how long the answers take.

use std::net::SocketAddrV4;
use std::time::{Duration, Instant};

use super::net::{Poller, connect_all};
use super::pairs::{PairClient, Pattern};
use super::{Sample, micros};
use crate::Failure;
use crate::bench::stats::percentile;

/// Time between two questions.
const PACE: Duration = Duration::from_millis(1);
/// The most questions it may be behind; a stall of a minute.
const MAX_BEHIND: u32 = 60_000;

/// Sends a set+get pair every [`PACE`] and checks the value.
///
/// A stalled server keeps it from asking: the questions that were due meanwhile count from when
/// they were due, as they would if each came from a client of its own.
pub(super) struct Probe {
    client: PairClient,
    /// When the next question is due.
    due: Instant,
    /// The question in flight counts from here.
    asked: Option<Instant>,
    latencies: Vec<u64>,
}

impl Probe {
    pub(super) fn new(server: SocketAddrV4, poller: &Poller) -> Result<Self, Failure> {
        let socket = connect_all(server, 1)?.remove(0);
        poller.add(&socket, 0)?;
        Ok(Self {
            client: PairClient::new(0, socket, Pattern::Pipelined, false),
            due: Instant::now(),
            asked: None,
            latencies: Vec::new(),
        })
    }

    /// A window begins: nothing was due before.
    pub(super) fn begin(&mut self) {
        self.due = Instant::now();
    }

    /// Asks if it is time to.
    pub(super) fn ask(&mut self) -> Result<(), Failure> {
        let now = Instant::now();
        if self.asked.is_some() || now < self.due {
            return Ok(());
        }
        self.client.start()?;
        // Waking up late is this process's fault, not the server's.
        self.asked = Some(now);
        self.due = now + PACE;
        Ok(())
    }

    /// An answer may have arrived.
    pub(super) fn listen(&mut self) -> Result<(), Failure> {
        if !self.client.advance()? {
            return Ok(());
        }
        let asked = self.asked.take().ok_or("an answer nobody asked for")?;
        self.record(asked, Instant::now());
        Ok(())
    }

    /// Records an answer, and those that the delayed questions would have had.
    fn record(&mut self, asked: Instant, answered: Instant) {
        let nanos = |since: Instant| answered.saturating_duration_since(since).as_nanos() as u64;
        self.latencies.push(nanos(asked));
        for _ in 0..MAX_BEHIND {
            if self.due >= answered {
                break;
            }
            self.latencies.push(nanos(self.due));
            self.due += PACE;
        }
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.asked.is_some()
    }

    /// Time until the next question.
    pub(super) fn pause(&self) -> Duration {
        match self.asked {
            Some(_) => PACE,
            None => self.due.saturating_duration_since(Instant::now()),
        }
    }

    /// The figures. A question still open counts with the time it has waited.
    pub(super) fn finish(mut self, sample: &mut Sample) {
        if let Some(asked) = self.asked {
            self.record(asked, Instant::now());
            sample.problem = Some("the last question was never answered".into());
        }
        if self.latencies.is_empty() {
            sample.problem = Some("no question was asked".into());
            return;
        }
        self.latencies.sort_unstable();
        sample.note("questions", self.latencies.len() as f64);
        for (name, q) in [("p50_us", 0.5), ("p99_us", 0.99), ("max_us", 1.0)] {
            sample.note(name, micros(percentile(&self.latencies, q)));
        }
    }
}
