//! The process group.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_pg::registry::GroupInit;
use phalanx_pg::{
    Buffer, Call, CallOptions, Capabilities, DType, Device, Engine, Error, ErrorKind, Lane,
    ProcessGroup, RawWork, Result, Splits, group_identity,
};

use crate::domain::Domain;
use crate::host_map::Notes;
use crate::kernels::Kernels;
use crate::meet;
use crate::member::{Member, Seat};

/// One rank of a group: shared memory inside a host, TCP between hosts.
///
/// Collectives run in a [`Lane`], one after the other; sends and receives go past it.
///
/// May be used from many threads. Dropping it without a [`shutdown`](ProcessGroup::shutdown)
/// aborts the group for its peers.
pub struct NativeGroup {
    name: String,
    identity: String,
    lane: Arc<Lane>,
    member: Arc<Member>,
    /// Names given to splits so far.
    splits: Splits,
    capabilities: Capabilities,
}

impl NativeGroup {
    /// Meets the other ranks in the store and connects with them. A collective call.
    ///
    /// Ranks on one host share memory. Which ones are is found out; the variable
    /// `PHALANX_HOST_ID` overrides it.
    pub fn connect(init: &GroupInit) -> Result<Arc<dyn ProcessGroup>> {
        Self::connect_from(init, Notes::of_this_process())
    }

    /// As if this process were on a host of its own by this name, with all others that say the
    /// same: for tests of what happens between hosts.
    pub fn connect_as_on(init: &GroupInit, host: &str) -> Result<Arc<dyn ProcessGroup>> {
        let notes = Notes::of_this_process().map(|notes| Notes {
            host: host.to_owned(),
            ..notes
        });
        Self::connect_from(init, notes)
    }

    fn connect_from(init: &GroupInit, notes: Result<Notes>) -> Result<Arc<dyn ProcessGroup>> {
        let place = phalanx_pg::Place::of_group(&init.name, init.rank);
        let group = notes.and_then(|notes| Self::connect_world(init, notes));
        group.map_err(|err| err.at(place))
    }

    fn connect_world(init: &GroupInit, notes: Notes) -> Result<Arc<dyn ProcessGroup>> {
        if init.rank >= init.world_size {
            let what = format!(
                "rank {} is not in a group of {}",
                init.rank, init.world_size
            );
            return Err(Error::invalid(what));
        }
        let kernels = Kernels::detect().map_err(Error::invalid)?;
        let members: Vec<usize> = (0..init.world_size).collect();
        let seat = Seat {
            name: init.name.clone(),
            identity: group_identity("", &init.name, &members),
            rank: init.rank,
            members,
            timeout: init.timeout,
            parent: None,
        };
        let world = meet::meet(init, notes, &format!("phalanx/native{}", seat.identity))?;
        let (store, token) = (Arc::clone(&init.store), init.token.clone());
        let domain = Domain::start(init.rank, world, kernels, store, token)?;
        Self::join(&domain, &seat)
    }

    fn join(domain: &Arc<Domain>, seat: &Seat<'_>) -> Result<Arc<dyn ProcessGroup>> {
        let member = Member::join(domain, seat).map_err(|err| err.at(seat.place()))?;
        let engine = Arc::clone(&member) as Arc<dyn Engine>;
        let lane = Arc::new(Lane::new(seat.place(), seat.timeout, engine));
        member.attach(&lane);
        let mut capabilities = Capabilities::all_on_host();
        capabilities.scattered = member.works_on_scattered_memory();
        Ok(Arc::new(Self {
            name: seat.name.clone(),
            identity: seat.identity.clone(),
            lane,
            member,
            splits: Splits::default(),
            capabilities,
        }))
    }
}

impl ProcessGroup for NativeGroup {
    fn rank(&self) -> usize {
        self.member.rank()
    }

    fn size(&self) -> usize {
        self.member.size()
    }

    fn backend(&self) -> &str {
        "native"
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn global_ranks(&self) -> &[usize] {
        self.member.members()
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn timeout(&self) -> Duration {
        self.member.timeout()
    }

    fn allocate(&self, device: Device, dtype: DType, len: usize) -> Result<Buffer> {
        let place = || self.member.place().clone();
        match device {
            Device::Cpu => {
                let arenas = &self.member.domain().arenas;
                arenas.allocate(dtype, len).map_err(|err| err.at(place()))
            }
            other => {
                let what = format!("native has no memory on {other}");
                Err(Error::unsupported(what).at(place()))
            }
        }
    }

    fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        match call.is_point_to_point() {
            true => {
                let usable = self.lane.check_usable();
                usable.map_err(|err| err.at(self.member.messages().issued().refused(&call)))?;
                self.member.point_to_point(call, options)
            }
            false => self.lane.submit(call, options),
        }
    }

    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
        let place = self.member.place();
        let usable = || {
            self.lane.check_usable()?;
            match self.member.broken() {
                Some(cause) => Err(Error::broken_by(&cause)),
                None => Ok(()),
            }
        };
        let join = |rank| {
            let members: Vec<usize> = ranks
                .iter()
                .map(|&rank| self.global_ranks()[rank])
                .collect();
            let seat = Seat {
                name: format!("{}/{name}", self.name),
                identity: group_identity(&self.identity, name, &members),
                rank,
                members,
                timeout: self.timeout(),
                parent: Some(&self.member),
            };
            Self::join(self.member.domain(), &seat)
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
        let deadline = Instant::now() + self.timeout().min(Duration::from_secs(1 << 30));
        let ended = self.member.messages().settle(deadline).and_then(|()| {
            let barrier = self.submit(Call::Barrier, &CallOptions::blocking())?;
            barrier.wait()?;
            self.lane.close(self.timeout())
        });
        ended.map_err(|err| err.during("shutdown"))?;
        self.member.leave();
        Ok(())
    }

    fn sequence(&self) -> u64 {
        self.lane.sequence()
    }

    fn p2p_sequence(&self) -> u64 {
        self.member.messages().issued().sequence()
    }
}

impl Drop for NativeGroup {
    fn drop(&mut self) {
        // Before the lane goes, which would take it for an abort.
        let over = matches!(self.lane.check_usable(), Err(err) if err.kind() == ErrorKind::Closed);
        if !over && self.member.broken().is_none() {
            self.member.drop_out();
        }
    }
}

impl fmt::Debug for NativeGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, rank, size) = (&self.name, self.rank(), self.size());
        write!(f, "NativeGroup({name:?}, rank {rank} of {size})")
    }
}
