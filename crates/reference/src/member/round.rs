//! Collectives: one exchange of messages after the other, in the lane's turn.

use parking_lot::MutexGuard;
use phalanx_pg::{Call, Done, Engine, Error, ErrorKind, Result, Turn};

use super::{Member, Phase, State, closed};
use crate::collective::{self, Exchange};
use crate::mailbox::{Data, Label};

/// Collectives, in the thread of the [`Lane`](phalanx_pg::Lane).
impl Engine for Member {
    fn run(&self, call: Call, turn: &Turn) -> Result<Done> {
        collective::run(call, turn.seq, &Round { member: self, turn })
    }

    fn interrupt(&self, cause: &Error) {
        self.fail(cause);
    }
}

/// A member during one collective.
struct Round<'a> {
    member: &'a Member,
    turn: &'a Turn,
}

impl Exchange for Round<'_> {
    fn rank(&self) -> usize {
        self.member.rank
    }

    fn size(&self) -> usize {
        self.member.size
    }

    fn exchange(&self, part: u32, outgoing: Vec<Data>) -> Result<Vec<Data>> {
        let label = Label::Collective {
            seq: self.turn.seq,
            part,
        };
        let member = self.member;
        let mut own = Data::default();
        for (peer, data) in outgoing.into_iter().enumerate() {
            match peer == member.rank {
                true => own = data,
                false => member.launch(peer, label, data),
            }
        }
        let mut state = member.state.lock();
        let mut came = Vec::with_capacity(member.size);
        for peer in 0..member.size {
            came.push(match peer == member.rank {
                true => std::mem::take(&mut own),
                false => self.receive(&mut state, peer, label)?,
            });
        }
        self.sent(&mut state);
        Ok(came)
    }
}

impl Member {
    fn launch(&self, peer: usize, label: Label, data: Data) {
        let mut state = self.state.lock();
        let ticket = state.ticket();
        if !state.deaf[peer] {
            state.flying.insert(ticket, peer);
        }
        drop(state);
        self.transport().send(peer, label, data, Some(ticket));
    }
}

impl Round<'_> {
    /// Waits until what this rank has to give is out of its hands: a process may end as soon as its
    /// last operation is through. Nothing that goes wrong with that concerns this operation.
    fn sent(&self, state: &mut MutexGuard<'_, State>) {
        while !state.flying.is_empty() && matches!(state.phase, Phase::Open) {
            let (arrived, deadline) = (&self.member.arrived, self.turn.deadline);
            if arrived.wait_until(state, deadline).timed_out() {
                return;
            }
        }
    }

    fn receive(
        &self,
        state: &mut MutexGuard<'_, State>,
        peer: usize,
        label: Label,
    ) -> Result<Data> {
        loop {
            if let Some(letter) = state.mailbox.take(Some(peer), label) {
                return Ok(letter.data);
            }
            match &state.phase {
                Phase::Open => {}
                Phase::Closed => return Err(closed()),
                Phase::Broken(cause) => return Err(Error::because(cause)),
            }
            if let Some(why) = self.hopeless(state, peer, label) {
                return Err(why);
            }
            let (arrived, deadline) = (&self.member.arrived, self.turn.deadline);
            let late = arrived.wait_until(state, deadline).timed_out();
            if late && !state.mailbox.holds(peer, label) && matches!(state.phase, Phase::Open) {
                return Err(self.late(state, peer, label));
            }
        }
    }

    /// The ranks that have not come; those before `first` have.
    fn missing(&self, state: &State, first: usize, label: Label) -> impl Iterator<Item = usize> {
        let others = (first..self.member.size).filter(|&peer| peer != self.member.rank);
        others.filter(move |&peer| !state.mailbox.holds(peer, label))
    }

    /// Why somebody who has not come will not.
    fn hopeless(&self, state: &State, first: usize, label: Label) -> Option<Error> {
        let mut missing = self.missing(state, first, label);
        missing.find_map(|peer| state.gone[peer].clone())
    }

    /// Names everybody who has not come.
    fn late(&self, state: &State, first: usize, label: Label) -> Error {
        let missing = self.missing(state, first, label);
        let missing: Vec<String> = missing.map(|peer| peer.to_string()).collect();
        let ranks = if missing.len() == 1 { "rank" } else { "ranks" };
        let what = format!("{ranks} {} did not come in time", missing.join(", "));
        Error::new(ErrorKind::Timeout, what).from_peer(first)
    }
}
