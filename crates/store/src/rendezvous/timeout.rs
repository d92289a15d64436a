//! How long a job waits: `PHALANX_TIMEOUT`.

use std::time::Duration;

use super::vars::{self, Lookup, shown};
use crate::error::{Result, StoreError};
use crate::store::DEFAULT_TIMEOUT;

const VARIABLE: &str = "PHALANX_TIMEOUT";

/// The two waits of a job.
///
/// The store's is never the longer one: otherwise a collective would be given up while the store
/// call that is to explain the failure still waits.
///
/// ```
/// use std::time::Duration;
/// use phalanx_store::rendezvous::Timeouts;
///
/// let timeouts = Timeouts::new(Duration::from_secs(300), Duration::from_secs(60));
/// assert_eq!(timeouts.store(), Duration::from_secs(60));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    store: Duration,
    group: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self::new(DEFAULT_TIMEOUT, Self::DEFAULT_GROUP)
    }
}

impl Timeouts {
    /// How long a collective may take unless told otherwise: 30 minutes, as in PyTorch.
    pub const DEFAULT_GROUP: Duration = Duration::from_secs(30 * 60);

    /// Both waits; `store` is cut to `group`.
    pub fn new(store: Duration, group: Duration) -> Self {
        Self {
            store: store.min(group),
            group,
        }
    }

    /// How long the ranks wait for each other to join, and a store call for its answer.
    pub fn store(&self) -> Duration {
        self.store
    }

    /// How long an operation of a process group may take.
    pub fn group(&self) -> Duration {
        self.group
    }

    /// `PHALANX_TIMEOUT` for both waits, or the defaults if it is not set.
    pub fn from_env() -> Result<Self> {
        Self::from_lookup(&vars::from_process)
    }

    pub(super) fn from_lookup(lookup: Lookup<'_>) -> Result<Self> {
        let Some(text) = vars::Vars::new(lookup).text(VARIABLE) else {
            return Ok(Self::default());
        };
        match parse_duration(&text) {
            Some(limit) => Ok(Self::new(limit, limit)),
            None => Err(StoreError::Invalid(format!(
                "{VARIABLE}={} is not a time; write a whole number above 0 with ms, s, m or h \
                 (seconds if there is none), for example {VARIABLE}=90s",
                shown(&text)
            ))),
        }
    }
}

/// `300`, `90s`, `500ms`, `5m`, `1h`. Zero is refused: a wait that never waits is a typing error,
/// and "for ever" does not exist.
fn parse_duration(text: &str) -> Option<Duration> {
    let digits = text.find(|c: char| !c.is_ascii_digit());
    let (number, unit) = text.split_at(digits.unwrap_or(text.len()));
    let number: u64 = number.parse().ok().filter(|&n| n > 0)?;
    match unit.trim_start() {
        "ms" => Some(Duration::from_millis(number)),
        "" | "s" => Some(Duration::from_secs(number)),
        "m" => number.checked_mul(60).map(Duration::from_secs),
        "h" => number.checked_mul(3600).map(Duration::from_secs),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Timeouts> {
        Timeouts::from_lookup(&|name| (name == VARIABLE).then(|| text.to_owned()))
    }

    #[test]
    fn every_unit_is_understood() {
        for (text, ms) in [
            ("300", 300_000),
            ("90s", 90_000),
            ("500ms", 500),
            ("5m", 300_000),
            ("1h", 3_600_000),
            (" 7 s ", 7_000),
        ] {
            let timeouts = read(text).unwrap();
            assert_eq!(timeouts.store(), Duration::from_millis(ms), "{text}");
            assert_eq!(timeouts.group(), Duration::from_millis(ms), "{text}");
        }
    }

    #[test]
    fn unset_and_empty_give_the_defaults() {
        assert_eq!(read("").unwrap(), Timeouts::default());
        assert_eq!(Timeouts::default().store(), Duration::from_secs(300));
        assert_eq!(Timeouts::default().group(), Duration::from_secs(1800));
    }

    #[test]
    fn a_bad_value_is_named_and_shown() {
        for text in [
            "0",
            "5 days",
            "-1",
            "1.5s",
            "ms",
            "1hh",
            "99999999999999999999",
            "9999999999999999999h",
        ] {
            let message = read(text).unwrap_err().to_string();
            assert!(message.contains("PHALANX_TIMEOUT"), "{message}");
            assert!(message.contains(text), "{message}");
        }
    }
}
