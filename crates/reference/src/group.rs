//! The process group.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use phalanx_pg::{
    Call, CallOptions, Capabilities, Engine, Error, ErrorKind, Lane, ProcessGroup, RawWork, Result,
    Splits, group_identity,
};
use phalanx_store::Store;

use crate::connect::{Meeting, Seat};
use crate::member::Member;
use crate::options::Options;
use crate::sockets::Sockets;
use crate::threads::Hall;

/// One rank of a group of threads, or of processes connected by plain TCP.
///
/// Collectives run in a [`Lane`], one after the other; sends and receives go past it. Everything
/// that both need is in the `Member`.
pub struct ReferenceGroup {
    name: String,
    identity: String,
    global_ranks: Vec<usize>,
    lane: Lane,
    member: Arc<Member>,
    /// Where groups split from this one meet.
    meeting: Arc<dyn Meeting>,
    /// Names given to splits so far.
    splits: Splits,
}

impl ReferenceGroup {
    /// All ranks of a group inside this process, to be handed to one thread each.
    ///
    /// ```
    /// use phalanx_pg::{ProcessGroupExt, ReduceOp};
    /// use phalanx_reference::ReferenceGroup;
    ///
    /// std::thread::scope(|scope| {
    ///     for group in ReferenceGroup::threads(4) {
    ///         scope.spawn(move || {
    ///             let mut values = [group.rank() as f32, 1.0];
    ///             group.allreduce_in_place(&mut values, ReduceOp::Sum).unwrap();
    ///             assert_eq!(values, [6.0, 4.0]);
    ///             group.shutdown().unwrap();
    ///         });
    ///     }
    /// });
    /// ```
    pub fn threads(size: usize) -> Vec<Arc<dyn ProcessGroup>> {
        Self::threads_with(size, &Options::default())
    }

    /// As [`threads`](ReferenceGroup::threads), with a name and timeouts of your own.
    pub fn threads_with(size: usize, options: &Options) -> Vec<Arc<dyn ProcessGroup>> {
        let hall: Arc<dyn Meeting> = Arc::new(Hall::default());
        let join = |rank| {
            let seat = first_seat(rank, size, options);
            Self::join(&seat, &hall).expect("every seat is free in a new hall")
        };
        (0..size).map(join).collect()
    }

    /// Rank `rank` of a group of `size` processes (or threads) that share a store.
    ///
    /// Every rank listens on [`Options::bind`], says where in the store, and is connected with
    /// every other when this returns. A name serves one group per store: to form the group again,
    /// use another name, or a [`PrefixStore`](phalanx_store::PrefixStore) per attempt.
    pub fn connect(
        store: Arc<dyn Store>,
        rank: usize,
        size: usize,
        options: &Options,
    ) -> Result<Arc<dyn ProcessGroup>> {
        if rank >= size {
            let what = format!("rank {rank} is not in a group of {size}");
            return Err(Error::invalid(what));
        }
        let sockets: Arc<dyn Meeting> = Arc::new(Sockets {
            store,
            bind: options.bind,
            token: options.token.clone(),
            connect_timeout: options.connect_timeout.min(options.timeout),
        });
        Self::join(&first_seat(rank, size, options), &sockets)
    }

    fn join(seat: &Seat<'_>, meeting: &Arc<dyn Meeting>) -> Result<Arc<dyn ProcessGroup>> {
        let member = meeting.meet(seat).map_err(|err| err.at(seat.place()))?;
        let engine = Arc::clone(&member) as Arc<dyn Engine>;
        let group = Self {
            name: seat.name.clone(),
            identity: seat.identity.clone(),
            global_ranks: seat.members.clone(),
            lane: Lane::new(member.place().clone(), seat.timeout, engine),
            member,
            meeting: Arc::clone(meeting),
            splits: Splits::default(),
        };
        Ok(Arc::new(group))
    }
}

fn first_seat(rank: usize, size: usize, options: &Options) -> Seat<'static> {
    let members: Vec<usize> = (0..size).collect();
    Seat {
        name: options.name.clone(),
        identity: group_identity("", &options.name, &members),
        rank,
        members,
        timeout: options.timeout,
        parent: None,
    }
}

impl ProcessGroup for ReferenceGroup {
    fn rank(&self) -> usize {
        self.member.rank()
    }

    fn size(&self) -> usize {
        self.member.size()
    }

    fn backend(&self) -> &str {
        "reference"
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn global_ranks(&self) -> &[usize] {
        &self.global_ranks
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::all_on_host()
    }

    fn timeout(&self) -> Duration {
        self.member.timeout()
    }

    fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        match call.is_point_to_point() {
            true => self.member.point_to_point(call, options),
            false => self.lane.submit(call, options),
        }
    }

    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
        let place = self.member.place();
        let usable = || match self.member.hopeless(ranks) {
            Some(cause) => Err(Error::broken_by(&cause)),
            None => self.lane.check_usable(),
        };
        let join = |rank| {
            let members: Vec<usize> = ranks.iter().map(|&rank| self.global_ranks[rank]).collect();
            let seat = Seat {
                name: format!("{}/{name}", self.name),
                identity: group_identity(&self.identity, name, &members),
                rank,
                members,
                timeout: self.timeout(),
                parent: Some((&self.member, ranks)),
            };
            Self::join(&seat, &self.meeting)
        };
        let size = self.size();
        self.splits.split(place, size, (ranks, name), usable, join)
    }

    fn abort(&self, reason: &str) {
        // The lane may not have met yet what broke the group before.
        let cause = self.member.broken();
        let cause = cause.unwrap_or_else(|| Error::new(ErrorKind::Aborted, reason));
        self.lane.fail(cause);
    }

    fn shutdown(&self) -> Result<()> {
        let ended = self.member.settle().and_then(|()| {
            let barrier = self.submit(Call::Barrier, &CallOptions::blocking())?;
            barrier.wait()?;
            self.lane.close(self.timeout())
        });
        ended.map_err(|err| err.during("shutdown"))?;
        self.member.say_goodbye();
        Ok(())
    }

    fn sequence(&self) -> u64 {
        self.lane.sequence()
    }

    fn p2p_sequence(&self) -> u64 {
        self.member.p2p_sequence()
    }
}

impl Drop for ReferenceGroup {
    fn drop(&mut self) {
        // Before the lane goes, which would take it for an abort.
        self.member.leave();
    }
}

impl fmt::Debug for ReferenceGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, rank, size) = (&self.name, self.rank(), self.size());
        write!(f, "ReferenceGroup({name:?}, rank {rank} of {size})")
    }
}
