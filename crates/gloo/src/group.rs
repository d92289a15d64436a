//! The process group.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use phalanx_pg::registry::GroupInit;
use phalanx_pg::{
    Call, CallKind, CallOptions, Capabilities, Engine, Error, ErrorKind, Lane, PeerDeath, Place,
    ProcessGroup, RawWork, ReduceOp, Result, Splits, group_identity,
};

use crate::collective::Order;
use crate::connect;
use crate::links::Service;
use crate::member::{Domain, Member, Seat};

/// Collectives of a group that may be on their way at the same time: their messages carry their
/// numbers. As many as PyTorch's.
const WORKERS: usize = 2;

/// One rank of a group whose bytes the system's libgloo carries.
///
/// Collectives run in a [`Lane`], two at a time; sends and receives go past it.
///
/// May be used from many threads. Dropping it without a [`shutdown`](ProcessGroup::shutdown)
/// aborts the group for its peers.
pub struct GlooGroup {
    name: String,
    identity: String,
    lane: Arc<Lane>,
    member: Arc<Member>,
    /// Names given to splits so far.
    splits: Splits,
}

impl GlooGroup {
    /// Meets the other ranks in the store and connects with them. A collective call.
    pub fn connect(init: &GroupInit) -> Result<Arc<dyn ProcessGroup>> {
        let place = Place::of_group(&init.name, init.rank);
        Self::connect_world(init).map_err(|err| err.at(place))
    }

    fn connect_world(init: &GroupInit) -> Result<Arc<dyn ProcessGroup>> {
        let (rank, size) = (init.rank, init.world_size);
        if rank >= size {
            let what = format!("rank {rank} is not in a group of {size}");
            return Err(Error::invalid(what));
        }
        let limit = init.timeout.min(init.store.timeout());
        let members: Vec<usize> = (0..size).collect();
        let identity = group_identity("", &init.name, &members);
        let prefix = format!("phalanx/gloo{identity}");
        let device = connect::device(init.bind)?;
        let service = Service::start(init, &format!("{prefix}/links"), limit)?;
        let domain = Arc::new(Domain {
            service: Some(service),
            device,
            store: init.store.second_handle()?,
            order: Order::Ranks,
        });
        let seat = Seat {
            name: init.name.clone(),
            prefix: format!("{prefix}/gloo"),
            identity,
            rank,
            members,
            timeout: init.timeout,
            limit,
            parent: None,
        };
        Self::join(&domain, &seat)
    }

    /// One rank of a group with PyTorch ranks: gloo's bytes and nothing else.
    ///
    /// The store is the one that the others meet in, and `prefix` where their addresses are in it:
    /// `0/0` for `init_process_group("gloo", store=...)` of PyTorch 1.13. Whatever else PyTorch
    /// does through the store is for the caller to do. Both sides need the same gloo, by its
    /// version.
    ///
    /// Reductions are gloo's own here, with its order of summation, and there are no connections
    /// beside gloo's: an error says that a rank is gone, and not which one. What PyTorch does in
    /// ways of its own is not supported: splits, reduce-scatter, all-to-all, batches.
    pub fn connect_with_pytorch(init: &GroupInit, prefix: &str) -> Result<Arc<dyn ProcessGroup>> {
        let members: Vec<usize> = (0..init.world_size).collect();
        let seat = Seat {
            name: init.name.clone(),
            prefix: prefix.to_owned(),
            identity: group_identity("", &init.name, &members),
            rank: init.rank,
            members,
            timeout: init.timeout,
            limit: init.timeout.min(init.store.timeout()),
            parent: None,
        };
        let domain = Domain {
            service: None,
            device: connect::device(init.bind)?,
            store: Arc::clone(&init.store),
            order: Order::Library,
        };
        Self::join(&Arc::new(domain), &seat)
    }

    fn join(domain: &Arc<Domain>, seat: &Seat<'_>) -> Result<Arc<dyn ProcessGroup>> {
        let place = Place::of_group(&seat.name, seat.rank);
        let member = Member::join(domain, seat).map_err(|err| err.at(place.clone()))?;
        let engine = Arc::clone(&member) as Arc<dyn Engine>;
        let lane = Lane::with_workers(WORKERS, place, seat.timeout, engine);
        let lane = Arc::new(lane);
        member.attach(&lane);
        Ok(Arc::new(Self {
            name: seat.name.clone(),
            identity: seat.identity.clone(),
            lane,
            member,
            splits: Splits::default(),
        }))
    }
}

impl ProcessGroup for GlooGroup {
    fn rank(&self) -> usize {
        self.member.rank()
    }

    fn size(&self) -> usize {
        self.member.size()
    }

    fn backend(&self) -> &str {
        "gloo"
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn global_ranks(&self) -> &[usize] {
        self.member.members()
    }

    fn capabilities(&self) -> Capabilities {
        let mut known = Capabilities::all_on_host();
        if self.member.domain().order == Order::Library {
            use CallKind::{AllToAll, Batch, ReduceScatter};
            let calls = [AllToAll, Batch, ReduceScatter].into_iter();
            known.calls = calls.fold(known.calls, |known, call| known.without(call));
            let by_us = [ReduceOp::Avg, ReduceOp::PremulSum(1.0)].into_iter();
            known.ops = by_us.fold(known.ops, |known, op| known.without(op));
            // It comes at once, but does not say who died.
            known.on_peer_death = PeerDeath::Timeout;
        }
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
        let usable = || match self.member.domain().order {
            Order::Ranks => self.lane.check_usable(),
            Order::Library => {
                let what = "a group with PyTorch ranks cannot be split";
                Err(Error::unsupported(what))
            }
        };
        let join = |rank| {
            let members = ranks.iter().map(|&rank| self.global_ranks()[rank]);
            let members: Vec<usize> = members.collect();
            let identity = group_identity(&self.identity, name, &members);
            let seat = Seat {
                name: format!("{}/{name}", self.name),
                prefix: format!("phalanx/gloo{identity}"),
                identity,
                rank,
                members,
                timeout: self.timeout(),
                limit: self.timeout().min(self.member.domain().store.timeout()),
                parent: Some(&self.member),
            };
            Self::join(self.member.domain(), &seat)
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
            .and_then(|_| self.lane.close(self.timeout()));
        ended.map_err(|err| err.during("shutdown"))?;
        self.member.say_goodbye();
        self.member.end_messages();
        Ok(())
    }

    fn sequence(&self) -> u64 {
        self.lane.sequence()
    }

    fn p2p_sequence(&self) -> u64 {
        self.member.issued().sequence()
    }
}

impl Drop for GlooGroup {
    fn drop(&mut self) {
        // Before the lane goes, which would take it for an abort.
        if self.lane.check_usable().is_ok() {
            self.member.leave();
        }
    }
}

impl fmt::Debug for GlooGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, rank, size) = (&self.name, self.rank(), self.size());
        write!(f, "GlooGroup({name:?}, rank {rank} of {size})")
    }
}
