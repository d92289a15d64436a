//! Who has not come, when a hello runs out of time: each rank hears only from a few others.

use std::time::{Duration, Instant};

use phalanx_pg::{Error, ErrorKind, Result};

use crate::hello::Hello;
use crate::member::{Member, Needs, Pace, WORDS};

/// How long answers may take. Ranks that wait for something look at once; the others are those
/// that are asked for.
const ANSWERS: Duration = Duration::from_millis(500);

/// What is said, before the number of the collective; words have numbers of their own, below.
const HAS_COME: u8 = 16;
const NO: u8 = 17;
const YES: u8 = 18;

fn saying(kind: u8, seq: u64) -> Vec<u8> {
    [&[kind][..], &seq.to_le_bytes()].concat()
}

impl Member {
    /// The error of collective `seq`, with those who have not come to it.
    pub(crate) fn blame(&self, hello: &Hello, seq: u64) -> Error {
        let absent = match self.size() {
            2 => Ok(vec![hello.awaited()]),
            _ => self.call_roll(hello, seq),
        };
        match absent {
            Ok(absent) if absent.is_empty() => {
                let awaited = hello.awaited();
                let what = format!("all ranks came, but rank {awaited} is slow to say so");
                Error::new(ErrorKind::Timeout, what)
            }
            Ok(absent) => Error::of_ranks(ErrorKind::Timeout, &absent, "did not come in time"),
            // Another rank was faster.
            Err(err) => err,
        }
    }

    /// Those of whom nobody has heard, and who say that they have not come or say nothing.
    fn call_roll(&self, hello: &Hello, seq: u64) -> Result<Vec<usize>> {
        let ranks = (0..self.size()).filter(|&rank| rank != self.rank());
        let mut asked: Vec<usize> = ranks.filter(|&rank| !hello.knows(rank)).collect();
        for &rank in &asked {
            self.say(rank, WORDS, saying(HAS_COME, seq));
        }
        let end = Instant::now() + ANSWERS;
        let mut pace = Pace::new();
        while Instant::now() < end && !self.have_all_answered(&asked, seq) {
            if pace.step() {
                self.look_around(Needs::All(seq))?;
            }
        }
        let state = self.state().lock();
        asked.retain(|&rank| state.answers.get(&(seq, rank)) != Some(&true));
        Ok(asked)
    }

    fn have_all_answered(&self, asked: &[usize], seq: u64) -> bool {
        let state = self.state().lock();
        let mut asked = asked.iter();
        asked.all(|&rank| state.answers.contains_key(&(seq, rank)))
    }

    /// Answers who asks, or takes in the answer.
    pub(crate) fn hear_roll(&self, from: usize, bytes: &[u8]) {
        let Some((&kind, number)) = bytes.split_first() else {
            return;
        };
        let Ok(number) = number.try_into() else {
            return;
        };
        let seq = u64::from_le_bytes(number);
        let mut state = self.state().lock();
        match kind {
            HAS_COME => {
                let answer = if seq < state.begun { YES } else { NO };
                drop(state);
                self.say(from, WORDS, saying(answer, seq));
            }
            _ => drop(state.answers.insert((seq, from), kind == YES)),
        }
    }
}
