//! How a rank leaves its group, and how peers do.

use super::*;

impl Member {
    /// Breaks the group, here and for everybody. The first cause stays.
    pub(crate) fn fail(&self, cause: Error) {
        match self.lane.get().and_then(Weak::upgrade) {
            Some(lane) => lane.fail(cause),
            // Being formed, or being dropped.
            None => self.local.break_for(&Notice::of(&cause, self.rank)),
        }
    }

    /// A peer has broken the group.
    pub(crate) fn peer_broke(&self, notice: Notice) {
        let err = notice.to_error();
        let _ = self.told.set(notice);
        self.fail(err);
    }

    /// What broke the group, if it is broken.
    pub(crate) fn broken(&self) -> Option<Error> {
        let lane = self.lane.get().and_then(Weak::upgrade);
        let known = lane.and_then(|lane| lane.broken());
        known.or_else(|| self.local.is_broken().then(|| self.local.cause()))
    }

    /// Leaves in order: all ranks have come to the end.
    pub(crate) fn leave(&self) {
        self.local.leave();
        self.left[self.rank].store(true, Ordering::Release);
        self.tell_all(Kind::Left, &[]);
    }

    /// Whether a rank has left in order.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        let local = self.local.local_rank(rank);
        self.left[rank].load(Ordering::Acquire)
            || local.is_some_and(|local| self.local.has_left(local))
    }

    /// A rank has left in order.
    pub(crate) fn peer_left(&self, rank: usize) {
        self.left[rank].store(true, Ordering::Release);
        if rank != self.rank && self.messages.waits_for(rank) {
            let what = format!("rank {rank} has shut the group down");
            self.fail(Error::new(ErrorKind::PeerLost, what).from_peer(rank));
        }
        self.local.wake_self();
    }

    /// A rank takes no part any more. What it has sent counts; what needs more of it fails.
    pub(crate) fn peer_gone(&self, rank: usize, err: Error) {
        let _ = self.gone[rank].set(err.clone());
        if self.messages.waits_for(rank) {
            self.local.be_quiet();
            self.fail(err);
        }
        self.local.wake_self();
    }

    /// A rank's process has ended: as before, and once nothing is outstanding the group is broken.
    pub(crate) fn peer_died(&self, rank: usize, err: Error) {
        if self.has_left(rank) || self.gone[rank].get().is_some() {
            return;
        }
        if let Some(local) = self.local.local_rank(rank) {
            self.local.mark_dead(local, &err);
        }
        let _ = self.death.set(err.clone());
        self.peer_gone(rank, err.clone());
        self.fail_if_idle(&err);
    }

    pub(super) fn fail_if_idle(&self, err: &Error) {
        let lane = self.lane.get().and_then(Weak::upgrade);
        if lane.is_some_and(|lane| lane.is_idle() && lane.broken().is_none()) {
            self.local.be_quiet();
            self.fail(err.clone());
        }
    }

    /// Takes no part any more, without a shutdown.
    pub(crate) fn drop_out(&self) {
        let rank = self.rank;
        let what = format!("rank {rank} dropped the group without a shutdown");
        let notice = Notice::of(&Error::new(ErrorKind::Aborted, what).from_peer(rank), rank);
        self.local.depart(&notice);
        self.local.be_quiet();
        self.tell_all(Kind::Dropped, &notice.encode());
    }

    /// There may be news that came on another way.
    pub(crate) fn wake_self(&self) {
        self.local.wake_self();
    }

    pub(super) fn tell_all(&self, kind: Kind, payload: &[u8]) {
        for (rank, &world) in self.members.iter().enumerate() {
            if rank != self.rank {
                let frame = Outgoing::new(Head::new(kind, self.id), payload);
                self.domain.links().send(world, frame);
            }
        }
    }
}
