//! How the group ends for the ranks on this host.

use super::*;

impl Local {
    /// Breaks the group for everybody on this host; the first cause stays.
    pub(crate) fn break_for(&self, notice: &Notice) {
        self.write_notice(notice);
        let own = self.me() as u32 + 1;
        let abort = self.control.abort();
        let _ = abort.compare_exchange(0, own, Ordering::AcqRel, Ordering::Acquire);
        self.control.ring_all();
    }

    /// Takes no part any more, for this reason. What was done before counts, also for peers who
    /// have not got so far.
    pub(crate) fn depart(&self, notice: &Notice) {
        self.write_notice(notice);
        self.control
            .presence(self.me())
            .store(DROPPED, Ordering::Release);
        self.control.ring_all();
    }

    pub(super) fn write_notice(&self, notice: &Notice) {
        // It may be dropped by one thread while another hears that a peer is lost.
        self.noticed.call_once(|| {
            let bytes = notice.encode();
            let (len, to) = self.control.notice(self.me());
            // SAFETY: the room holds the longest notice; only this rank writes it, once, and
            // nobody reads it before the length is set.
            unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
            len.store(bytes.len() as u32, Ordering::Release);
        });
    }

    pub(super) fn notice_of(&self, rank: usize) -> Option<Notice> {
        let (len, from) = self.control.notice(rank);
        let len = (len.load(Ordering::Acquire) as usize).min(NOTICE);
        let mut bytes = vec![0; len];
        // SAFETY: inside the segment; written once, before the length.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(from, len) };
        Notice::decode(&bytes, self.seat.size)
    }

    /// What broke the group, as the first rank said.
    pub(crate) fn cause(&self) -> Error {
        let first = self.control.abort().load(Ordering::Acquire) as usize;
        let rank = first.checked_sub(1).filter(|&rank| rank < self.ranks());
        let notice = rank.and_then(|rank| self.notice_of(rank));
        let unknown = || Error::new(ErrorKind::Aborted, "the group was aborted");
        notice.map_or_else(unknown, |notice| notice.to_error())
    }

    /// Why a rank that is gone does not come, for an operation that needs it.
    pub(super) fn gone(&self, rank: usize) -> Error {
        self.quiet.store(true, Ordering::Release);
        let name = self.seat.ranks[rank];
        let lost = |what: &str| {
            let what = format!("rank {name} {what}");
            Error::new(ErrorKind::PeerLost, what).from_peer(name)
        };
        match self.control.presence(rank).load(Ordering::Acquire) {
            LEFT => lost("has shut the group down"),
            DROPPED => {
                let notice = self.notice_of(rank);
                notice.map_or_else(|| lost("has left the group"), |notice| notice.to_error())
            }
            // Another process may have noticed first.
            _ => match self.lost[rank].get() {
                Some(err) => err.clone(),
                None => lost("is lost: its process has ended"),
            },
        }
    }

    /// Whether an operation failed because a peer is gone.
    pub(crate) fn is_quiet(&self) -> bool {
        self.quiet.load(Ordering::Acquire)
    }

    /// The group will end because a peer is gone.
    pub(crate) fn be_quiet(&self) {
        self.quiet.store(true, Ordering::Release);
    }

    /// A rank's process has ended, or cannot be understood any more.
    pub(crate) fn mark_dead(&self, rank: usize, err: &Error) {
        let _ = self.lost[rank].set(err.clone());
        let presence = self.control.presence(rank);
        let _ = presence.compare_exchange(JOINED, DEAD, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Whether the group is broken.
    pub(crate) fn is_broken(&self) -> bool {
        self.control.abort().load(Ordering::Acquire) != 0
    }

    /// Says that this rank leaves in order.
    pub(crate) fn leave(&self) {
        self.control
            .presence(self.me())
            .store(LEFT, Ordering::Release);
    }

    /// Whether a rank has left in order.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.control.presence(rank).load(Ordering::Acquire) == LEFT
    }

    /// There may be news that came on another way.
    pub(crate) fn wake_self(&self) {
        self.control.ring_one(self.me());
    }
}
