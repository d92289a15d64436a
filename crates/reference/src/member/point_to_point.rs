//! Sends and receives: matched by peer and tag, outside the order of collectives.

use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_pg::{Call, CallOptions, Error, ErrorKind, MAX_OUTSTANDING, RawWork, Result};

use super::{Member, Phase};
use crate::mailbox::{Data, Label};
use crate::pending::Pending;

impl Member {
    /// Starts a send, a receive or a batch of them.
    pub(crate) fn point_to_point(
        self: &Arc<Self>,
        call: Call,
        options: &CallOptions,
    ) -> Result<RawWork> {
        let timeout = options.timeout.unwrap_or(self.timeout);
        let deadline = Instant::now() + timeout.min(Duration::from_secs(1 << 30));
        let (calls, work) = self.messages.issue(call, |calls| self.admit(calls))?;
        for (call, part) in calls {
            match call {
                Call::Send { data, peer, tag } => match data.as_bytes() {
                    Ok(bytes) => {
                        let data = Arc::new(bytes.to_vec());
                        let send = Pending::new(part, Some(peer), tag, None, deadline);
                        self.send(send, peer, Label::Tag(tag), data);
                    }
                    Err(err) => part.end(Err(err)),
                },
                Call::Recv { buf, peer, tag } => {
                    let receive = Pending::new(part, peer, tag, Some(buf), deadline);
                    self.post(receive);
                }
                other => {
                    let what = format!("{} is not a point-to-point call", other.kind());
                    part.end(Err(Error::unsupported(what)));
                }
            }
        }
        self.watch(deadline)?;
        Ok(work)
    }

    /// Refuses before anything is sent.
    fn admit(&self, calls: &[Call]) -> Result<()> {
        let state = self.state.lock();
        state.check(&self.place)?;
        if state.mailbox.posted() + state.sends.len() + calls.len() > MAX_OUTSTANDING {
            let full = format!("{MAX_OUTSTANDING} operations are outstanding, wait for some");
            return Err(Error::new(ErrorKind::QueueFull, full));
        }
        Ok(())
    }

    fn send(&self, send: Pending, peer: usize, label: Label, data: Data) {
        let mut state = self.state.lock();
        if let Err(err) = state.check(&send.place()) {
            drop(state);
            return send.fail_as(err);
        }
        let ticket = state.ticket();
        state.sends.insert(ticket, send);
        let gone = state.gone[peer].clone();
        drop(state);
        match gone {
            Some(why) => self.fail(&why),
            None => self.transport().send(peer, label, data, Some(ticket)),
        }
    }

    fn post(&self, receive: Pending) {
        let (from, label) = (receive.peer, Label::Tag(receive.tag));
        let mut state = self.state.lock();
        if let Err(err) = state.check(&receive.place()) {
            drop(state);
            return receive.fail_as(err);
        }
        let matched = state.mailbox.post(from, label, receive);
        let gone = from.and_then(|peer| state.gone[peer].clone());
        drop(state);
        match (matched, gone) {
            (Some((receive, letter)), _) => receive.received(&letter),
            (None, Some(why)) => self.fail(&why),
            (None, None) => {}
        }
    }

    /// Waits until no point-to-point operation is left; each ends by its own deadline.
    pub(crate) fn settle(&self) -> Result<()> {
        let mut state = self.state.lock();
        while state.pending().next().is_some() {
            self.settled.wait(&mut state);
        }
        state.check(&self.place)
    }

    /// Has this deadline watched, by one thread for all operations of the group.
    fn watch(self: &Arc<Self>, deadline: Instant) -> Result<()> {
        let mut state = self.state.lock();
        if state.pending().next().is_none() {
            return Ok(());
        }
        match state.next_look {
            Some(look) if look <= deadline => return Ok(()),
            Some(_) => {
                self.clock.notify_all();
                return Ok(());
            }
            None => state.next_look = Some(deadline),
        }
        drop(state);
        let member = Arc::clone(self);
        let thread = std::thread::Builder::new().name("phalanx-deadlines".into());
        let spawned = thread.spawn(move || member.watch_deadlines());
        spawned.map(drop).map_err(|err| {
            let err = Error::new(ErrorKind::Backend, format!("starting a thread: {err}"));
            self.fail(&err);
            err.at(self.place.clone())
        })
    }

    fn watch_deadlines(&self) {
        let mut state = self.state.lock();
        while matches!(state.phase, Phase::Open) {
            let now = Instant::now();
            if let Some(late) = state.take_late(now) {
                let err = late.late().at(late.place());
                drop(state);
                self.fail(&err);
                return late.fail_as(err);
            }
            let first = state.pending().map(|pending| pending.deadline).min();
            let look = first.unwrap_or(now + Duration::from_secs(3600));
            state.next_look = Some(look);
            self.clock.wait_until(&mut state, look);
        }
    }
}
