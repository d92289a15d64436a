//! The process group.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use phalanx_pg::registry::GroupInit;
use phalanx_pg::{
    Call, CallOptions, Capabilities, Engine, Error, ErrorKind, Lane, PeerDeath, Place,
    ProcessGroup, RawWork, Result, Splits,
};

use crate::member::Member;

/// One rank of a group that the system's MPI connects.
///
/// Collectives run in a [`Lane`], one after the other; sends and receives go past it.
///
/// May be used from many threads. Dropping it without a [`shutdown`](ProcessGroup::shutdown)
/// aborts the group for its peers.
pub struct MpiGroup {
    name: String,
    lane: Arc<Lane>,
    member: Arc<Member>,
    /// Names given to splits so far.
    splits: Splits,
}

impl MpiGroup {
    /// All processes that the launcher has started together; rank and size are what MPI says. A
    /// collective call.
    ///
    /// Needs no store. Starts MPI if the program has not; then it is ended when the process ends.
    /// A process that no launcher has started is a world of one; one of several that a launcher
    /// other than MPI's has started (`WORLD_SIZE`) is an error.
    pub fn world(timeout: Duration) -> Result<Arc<dyn ProcessGroup>> {
        let group = Self::named("world", timeout)?;
        let told = std::env::var("WORLD_SIZE").unwrap_or_default();
        if group.size() == 1 && told.parse::<usize>().is_ok_and(|told| told > 1) {
            group.shutdown()?;
            return Err(Error::invalid(format!(
                "this is one of {told} ranks (WORLD_SIZE), but for MPI it is alone; start the ranks \
                 with mpirun, srun or phalanx run --launcher mpirun"
            )));
        }
        Ok(group)
    }

    /// As [`world`](MpiGroup::world), for a program that knows its rank and size from elsewhere:
    /// they must be MPI's.
    pub fn connect(init: &GroupInit) -> Result<Arc<dyn ProcessGroup>> {
        let group = Self::named(&init.name, init.timeout)?;
        let told = (init.rank, init.world_size);
        let own = (group.rank(), group.size());
        if told != own {
            group.shutdown()?;
            return Err(Error::invalid(format!(
                "this is rank {} of {}, but for MPI it is rank {} of {}; start the ranks with \
                 mpirun or srun",
                told.0, told.1, own.0, own.1
            )));
        }
        Ok(group)
    }

    fn named(name: &str, timeout: Duration) -> Result<Arc<Self>> {
        Member::world(name, timeout).map(|member| Self::of(name.to_owned(), member))
    }

    fn of(name: String, member: Arc<Member>) -> Arc<Self> {
        let engine = Arc::clone(&member) as Arc<dyn Engine>;
        let lane = Lane::new(member.place().clone(), member.timeout(), engine);
        let lane = Arc::new(lane);
        member.attach(&lane);
        Arc::new(Self {
            name,
            lane,
            member,
            splits: Splits::default(),
        })
    }
}

impl ProcessGroup for MpiGroup {
    fn rank(&self) -> usize {
        self.member.rank()
    }

    fn size(&self) -> usize {
        self.member.size()
    }

    fn backend(&self) -> &str {
        "mpi"
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn global_ranks(&self) -> &[usize] {
        self.member.members()
    }

    fn capabilities(&self) -> Capabilities {
        let mut known = Capabilities::all_on_host();
        known.on_peer_death = PeerDeath::JobEnds;
        known
    }

    fn timeout(&self) -> Duration {
        self.member.timeout()
    }

    fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        if !call.is_point_to_point() {
            return self.lane.submit(call, options);
        }
        let usable = self.lane.check_usable();
        usable.map_err(|err| err.at(self.member.issued().refused(&call)))?;
        self.member.point_to_point(call, options)
    }

    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
        let place = self.member.place();
        let usable = || self.lane.check_usable();
        let join = |_| {
            let member = self.member.split(ranks, name)?;
            Ok(Self::of(format!("{}/{name}", self.name), member) as Arc<dyn ProcessGroup>)
        };
        let size = self.size();
        self.splits.split(place, size, (ranks, name), usable, join)
    }

    fn abort(&self, reason: &str) {
        self.lane.fail(Error::new(ErrorKind::Aborted, reason));
    }

    fn shutdown(&self) -> Result<()> {
        self.member.messages().settle();
        let ended = self
            .submit(Call::Barrier, &CallOptions::blocking())
            .and_then(RawWork::wait)
            .and_then(|_| self.lane.close(self.timeout()))
            .and_then(|()| self.member.say_goodbye());
        ended.map_err(|err| err.during("shutdown").at(Place::default()))
    }

    fn sequence(&self) -> u64 {
        self.lane.sequence()
    }

    fn p2p_sequence(&self) -> u64 {
        self.member.issued().sequence()
    }
}

impl Drop for MpiGroup {
    fn drop(&mut self) {
        // Before the lane goes, which would take it for an abort.
        if self.lane.check_usable().is_ok() {
            self.member.leave("dropped the group without a shutdown");
        }
    }
}

impl fmt::Debug for MpiGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, rank, size) = (&self.name, self.rank(), self.size());
        write!(f, "MpiGroup({name:?}, rank {rank} of {size})")
    }
}
