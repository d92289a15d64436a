//! How a rank leaves a group, and what those do who still need it.

use std::time::{Duration, Instant};

use parking_lot::MutexGuard;
use phalanx_pg::{Error, ErrorKind, Notice, Word};

use crate::frame::Saying;
use crate::member::{Member, State};

/// How long those who leave wait for those who are still busy with what was given to them.
const LINGER: Duration = Duration::from_secs(2);

/// How long they wait for their messages to be asked for: gloo sends none before.
const FLUSH: Duration = Duration::from_secs(10);

/// Between two looks at the messages.
const GLANCE: Duration = Duration::from_millis(5);

impl Member {
    /// Ends what waits for a rank that has left, once everybody else has what that rank gave:
    /// closing the connections would take it away.
    pub(crate) fn look_around(&self) {
        let mut state = self.state().0.lock();
        let mut running = state.running.iter();
        let needed = running.find_map(|&seq| state.leaver(seq));
        let Some(cause) = needed.or_else(|| self.unsent(&state)) else {
            state.held = None;
            return;
        };
        let since = *state.held.get_or_insert_with(Instant::now);
        if !self.all_past(&state) && since.elapsed() < LINGER {
            return;
        }
        tracing::debug!(target: "phalanx::gloo", "{:?} gives up: {cause}", self.place());
        state.quiet = true;
        drop(state);
        self.fail(cause);
    }

    /// Why a message that a caller waits for will not come, if its rank has left and all that it
    /// sent is here.
    fn unsent(&self, state: &State) -> Option<Error> {
        self.others().find_map(|rank| {
            let (_, err) = state.left[rank].as_ref()?;
            let sent = state.closing[rank]?;
            let in_vain =
                self.messages().received_from(rank) >= sent && self.messages().waits_for(rank);
            in_vain.then(|| err.clone())
        })
    }

    fn all_past(&self, state: &State) -> bool {
        let mut others = self.others();
        others.all(|rank| state.past[rank] || state.left[rank].is_some())
    }

    /// Tells the others that they may close their connections, if this rank needs them no more.
    pub(crate) fn say_past_if_so(&self, mut state: MutexGuard<'_, State>) {
        let finished = state.finished;
        if state.said_past || state.leaver(finished).is_none() {
            return;
        }
        state.said_past = true;
        drop(state);
        self.tell_all(&Saying::Word(Word::Past));
    }

    /// Leaves in order, when all ranks have come to the end.
    pub(crate) fn say_goodbye(&self) {
        self.state().0.lock().quiet = true;
        self.tell_all(&Saying::Word(Word::Past));
        self.linger(&mut Vec::new());
    }

    /// Leaves a group that was not shut down; nothing if it is broken.
    pub(crate) fn leave(&self) {
        let rank = self.rank();
        let what = format!("rank {rank} dropped the group without a shutdown");
        let notice = Notice::of(&Error::new(ErrorKind::Aborted, what).from_peer(rank), rank);
        let mut state = self.state().0.lock();
        state.quiet = true;
        let finished = state.finished;
        drop(state);
        self.tell_all(&Saying::Word(Word::Left(finished, notice)));
        let mut open: Vec<usize> = self.others().collect();
        self.linger(&mut open);
        for rank in open {
            self.tell(rank, &Saying::Closing(self.messages().sent_to(rank)));
        }
    }

    /// Waits for those who still need what was given to them, and until those in `open`, whom it
    /// tells then, have asked for all messages.
    fn linger(&self, open: &mut Vec<usize>) {
        let start = Instant::now();
        let (state, changed) = self.state();
        loop {
            open.retain(|&rank| match self.messages().all_sent_to(rank) {
                Some(sent) => {
                    self.tell(rank, &Saying::Closing(sent));
                    false
                }
                None => true,
            });
            let mut state = state.lock();
            // Who has left, or has ended, asks for nothing.
            open.retain(|&rank| state.left[rank].is_none() && state.closing[rank].is_none());
            let waited = start.elapsed();
            let past = self.domain().service.is_none() || self.all_past(&state);
            if (past || waited >= LINGER) && (open.is_empty() || waited >= FLUSH) {
                return;
            }
            changed.wait_for(&mut state, GLANCE);
        }
    }

    /// Collectives are over for good: nothing of the group is left to wake.
    pub(crate) fn end_messages(&self) {
        self.messages().abort();
    }
}
