//! Small reductions and barriers: every rank gets every host's partial sum and adds them up.

use phalanx_pg::{Buffer, Done, ReduceOp, Result};

use super::Job;
use super::wire::{Outgoing, Script};
use crate::host::PerRank;
use crate::kernels::{self, Source};
use crate::room::Room;

struct Small<'a> {
    job: &'a Job<'a>,
    /// This host's partial sum.
    own: *const u8,
    bytes: usize,
    /// By host.
    theirs: Vec<Room>,
    sent: bool,
}

impl Job<'_> {
    pub(super) fn barrier(&self) -> Result<Done> {
        self.exchange_small(std::ptr::dangling(), 0)?;
        Ok(Done::default())
    }

    /// An all-reduce of inputs that nobody overwrites meanwhile.
    pub(super) fn reduce_small(
        &self,
        buf: &Buffer,
        op: ReduceOp,
        sources: &PerRank<Source>,
    ) -> Result<()> {
        let (kernels, dtype, len) = (self.local.seat.kernels, buf.dtype(), buf.len());
        let bytes = len * kernels::wide_size(dtype);
        let mut own = Room::new(bytes);
        // SAFETY: the sources are the inputs that the ranks of this host have announced, and stay
        // until they are all done; the destination is as long as a wide element for each.
        unsafe { kernels::partial(kernels, op, dtype, sources, own.as_mut_ptr(), len) };
        let theirs = self.exchange_small(own.as_ptr(), bytes)?;
        let partials: PerRank<*const u8> = theirs
            .iter()
            .enumerate()
            .map(|(host, theirs)| match host == self.between.here {
                true => own.as_ptr(),
                false => theirs.as_ptr(),
            })
            .collect();
        let to = [buf.as_ptr().as_ptr()];
        let size = self.local.seat.size;
        // SAFETY: every partial sum is as long as the buffer in wide elements, and the buffer is
        // this operation's.
        unsafe { kernels::finish(kernels, op, dtype, &partials, &to, len, size) };
        Ok(())
    }

    /// Everybody's partial sums, by host; the own one is left out.
    fn exchange_small(&self, own: *const u8, bytes: usize) -> Result<Vec<Room>> {
        let here = self.between.here;
        let room = |host| match host == here {
            true => Room::new(0),
            false => Room::new(bytes),
        };
        let mut script = Small {
            job: self,
            own,
            bytes,
            theirs: (0..self.between.hosts.len()).map(room).collect(),
            sent: false,
        };
        self.exchange(&mut script)?;
        Ok(script.theirs)
    }
}

impl Script for Small<'_> {
    fn expected(&self, from: usize) -> usize {
        let between = self.job.between;
        let (host, _) = between.seat_of(from);
        let theirs = &between.hosts[host];
        usize::from(theirs[self.job.local.me() % theirs.len()] == from)
    }

    fn place(&mut self, from: usize, _: u32, len: usize, _: &mut Outgoing) -> Option<*mut u8> {
        let (host, _) = self.job.between.seat_of(from);
        (len == self.bytes).then(|| self.theirs[host].as_mut_ptr())
    }

    fn arrived(&mut self, _: usize, _: u32, _: &mut Outgoing) {}

    fn work(&mut self, out: &mut Outgoing) -> bool {
        if std::mem::replace(&mut self.sent, true) {
            return false;
        }
        let (between, local) = (self.job.between, self.job.local);
        for (rank, _) in between.remote() {
            let (_, place) = between.seat_of(rank);
            if place % local.ranks() == local.me() {
                out.push(rank, 0, self.own, self.bytes);
            }
        }
        true
    }
}
