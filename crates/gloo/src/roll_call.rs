//! Who has not come, when an operation runs out of time: gloo does not know.

use std::time::{Duration, Instant};

use phalanx_pg::Error;

use crate::frame::Saying;
use crate::member::Member;

/// How long answers may take. Processes answer at once, whatever their callers do, unless they
/// stand still.
const ANSWERS: Duration = Duration::from_millis(500);

impl Member {
    /// The error of collective `seq` that has run out of time, with those who have not come to it.
    pub(crate) fn blame(&self, err: Error, seq: u64) -> Error {
        let gloos = err.message();
        if self.domain().service.is_none() {
            let what = format!("not all ranks came in time, or not to the same call: {gloos}");
            return Error::new(err.kind(), what);
        }
        match &self.call_roll(seq)[..] {
            [] => {
                let what = "all ranks came, but the data did not; do they call the same, with the \
                            same root? PHALANX_DEBUG=detail tells";
                Error::new(err.kind(), format!("{what}: {gloos}"))
            }
            absent => Error::of_ranks(err.kind(), absent, &format!("did not come: {gloos}")),
        }
    }

    /// Those who say that they have not come to collective `seq`, or say nothing.
    fn call_roll(&self, seq: u64) -> Vec<usize> {
        self.tell_all(&Saying::HasCome(seq));
        let end = Instant::now() + ANSWERS;
        let (state, changed) = self.state();
        let mut state = state.lock();
        let answered = |rank: usize| (seq, rank);
        while self
            .others()
            .any(|rank| !state.answers.contains_key(&answered(rank)))
        {
            if changed.wait_until(&mut state, end).timed_out() {
                break;
            }
        }
        let came = |rank: &usize| state.answers.get(&answered(*rank)) == Some(&true);
        self.others().filter(|rank| !came(rank)).collect()
    }
}
