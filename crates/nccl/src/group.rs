//! The process group.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_sys::Nccl;
use phalanx_pg::registry::GroupInit;
use phalanx_pg::{
    Buffer, Call, CallOptions, Capabilities, DType, Device as Where, Error, ErrorKind, PeerDeath,
    Place, ProcessGroup, RawWork, ReduceOp, Result, Splits,
};
use phalanx_store::Store;

use crate::board::Board;
use crate::core::{Core, Seat};
use crate::driver::{Device, device_count};
use crate::memory;
use crate::options::Options;
use crate::watchdog;

/// How long dropping a group waits for its end: the others are told, communicators aborted.
const FAREWELL: Duration = Duration::from_secs(5);

/// One rank of a group that communicates by NCCL, on one device.
///
/// Collectives share a communicator and a stream; sends and receives have a communicator and a
/// stream for every peer. Operations run behind what is on their buffers' streams; `wait` makes
/// those streams wait, `synchronize` and `wait_for` the host.
///
/// May be used from many threads. Dropping it without a [`shutdown`](ProcessGroup::shutdown)
/// aborts the group for its peers.
pub struct NcclGroup {
    name: String,
    identity: String,
    global_ranks: Vec<usize>,
    core: Arc<Core>,
    /// A connection of this backend's own, shared by all groups split from one.
    store: Arc<dyn Store>,
    /// Names given to splits so far.
    splits: Splits,
}

impl NcclGroup {
    /// Joins the group of all ranks on this process's device. A collective call only if
    /// [`Options::eager`] asks for it: otherwise ranks meet at the first operation.
    pub fn connect(init: &GroupInit) -> Result<Arc<dyn ProcessGroup>> {
        Self::connect_with(init, &Options::default())
    }

    /// As [`connect`](NcclGroup::connect), with options of your own.
    pub fn connect_with(init: &GroupInit, options: &Options) -> Result<Arc<dyn ProcessGroup>> {
        let place = Place::of_group(&init.name, init.rank);
        Self::join_world(init, options).map_err(|err| err.at(place))
    }

    fn join_world(init: &GroupInit, options: &Options) -> Result<Arc<dyn ProcessGroup>> {
        if init.rank >= init.world_size {
            let (rank, size) = (init.rank, init.world_size);
            return Err(Error::invalid(format!(
                "rank {rank} is not in a group of {size}"
            )));
        }
        options.check().map_err(Error::invalid)?;
        // The driver first: on a machine without a GPU that is what there is to say.
        let ordinal = match options.device {
            Some(ordinal) => ordinal,
            None => default_device(device_count()?, init.rank)?,
        };
        let device = Device::open(ordinal)?;
        let nccl = Nccl::get().map_err(|err| Error::unsupported(err.to_string()))?;
        let members: Vec<usize> = (0..init.world_size).collect();
        let store = init.store.second_handle()?;
        let seat = Seat {
            place: Place::of_group(&init.name, init.rank),
            rank: init.rank,
            size: init.world_size,
            timeout: init.timeout,
        };
        let identity = identity("", &init.name, &members);
        let join = Join {
            name: init.name.clone(),
            identity,
            members,
            store,
        };
        Self::join(join, seat, options, nccl, &device, None)
    }

    fn join(
        join: Join,
        seat: Seat,
        options: &Options,
        nccl: &'static Nccl,
        device: &Arc<Device>,
        origin: Option<&Arc<Core>>,
    ) -> Result<Arc<dyn ProcessGroup>> {
        let prefix = format!("phalanx/nccl{}", join.identity);
        let board = Board::new(&join.store, &prefix, seat.rank, seat.size);
        let core = Core::new(seat, options, nccl, device, board)?;
        watchdog::start(&core)?;
        let group = Self {
            name: join.name,
            identity: join.identity,
            global_ranks: join.members,
            core,
            store: join.store,
            splits: Splits::default(),
        };
        if options.eager {
            group.core.connect_now(origin)?;
        }
        Ok(Arc::new(group))
    }

    /// The NCCL library's version, as it counts: 22907 is 2.29.7.
    pub fn library_version(&self) -> i32 {
        self.core.nccl.version
    }
}

/// What a new group is made of, besides this rank's seat.
struct Join {
    name: String,
    identity: String,
    members: Vec<usize>,
    store: Arc<dyn Store>,
}

/// The device of a process that was not told: the only one that it sees, else its local rank's.
fn default_device(count: usize, rank: usize) -> Result<u32> {
    let local = std::env::var("LOCAL_RANK").ok();
    let local = local.and_then(|text| text.parse::<usize>().ok());
    let ordinal = match (count, local) {
        (1, _) => 0,
        (_, Some(local)) => local,
        (_, None) => rank % count.max(1),
    };
    match ordinal < count {
        true => Ok(ordinal as u32),
        false => Err(Error::invalid(format!(
            "local rank {ordinal} has no device: this process sees {count}; start fewer ranks, or \
             set CUDA_VISIBLE_DEVICES or Options::device"
        ))),
    }
}

/// The identity of the group `name` of these members, split from the group `parent`: disjoint
/// groups may have the same name, and names may look like identities.
fn identity(parent: &str, name: &str, members: &[usize]) -> String {
    let members: Vec<String> = members.iter().map(usize::to_string).collect();
    format!("{parent}/{}:{name}[{}]", name.len(), members.join(","))
}

/// What every group of this backend can do, known without a device: what NCCL has no type or
/// operator for is refused before anything is sent.
pub fn capabilities() -> Capabilities {
    let mut known = Capabilities::all_on_host();
    known.dtypes = known.dtypes.without(DType::I16);
    for op in [ReduceOp::BitAnd, ReduceOp::BitOr, ReduceOp::BitXor] {
        known.ops = known.ops.without(op);
    }
    known.lacks = &[(DType::Complex64, ReduceOp::Product)];
    (known.cpu, known.cuda) = (false, true);
    known.recv_any = false;
    known.tags = false;
    known.fixed_order = false;
    known.on_peer_death = PeerDeath::Timeout;
    known
}

impl ProcessGroup for NcclGroup {
    fn rank(&self) -> usize {
        self.core.rank
    }

    fn size(&self) -> usize {
        self.core.size
    }

    fn backend(&self) -> &str {
        "nccl"
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn global_ranks(&self) -> &[usize] {
        &self.global_ranks
    }

    fn capabilities(&self) -> Capabilities {
        capabilities()
    }

    fn timeout(&self) -> Duration {
        self.core.timeout
    }

    fn device(&self) -> Where {
        Where::Cuda(self.core.device.ordinal)
    }

    fn allocate(&self, device: Where, dtype: DType, len: usize) -> Result<Buffer> {
        let own = self.device();
        let allocated = match device == own {
            true => memory::allocate(&self.core.device, dtype, len, &self.core.home),
            false => Err(Error::unsupported(format!(
                "nccl has no memory on {device}, the group's device is {own}"
            ))),
        };
        allocated.map_err(|err| err.at(self.core.place.clone()))
    }

    fn copy(&self, from: &Buffer, range: Range<usize>, to: &mut Buffer, at: usize) -> Result<()> {
        let to_host = from.device() != Where::Cpu && to.device() == Where::Cpu;
        let copied = memory::copy(&self.core.device, from, range, to, at);
        // The host has waited for the stream, which may have gone on because an operation was
        // aborted: the cause was there before. Then the values are anybody's guess.
        let broken = self.core.cause().filter(|_| to_host);
        let known = broken.map_or(Ok(()), |cause| Err(Error::broken_by(&cause.error)));
        copied
            .and(known)
            .map_err(|err| err.at(self.core.place.clone()))
    }

    fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        self.core.submit(call, options)
    }

    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
        let core = &self.core;
        let usable = || core.check_usable();
        let join = |rank| {
            let members: Vec<usize> = ranks.iter().map(|&rank| self.global_ranks[rank]).collect();
            let full_name = format!("{}/{name}", self.name);
            let seat = Seat {
                place: Place::of_group(&full_name, rank),
                rank,
                size: ranks.len(),
                timeout: core.timeout,
            };
            let join = Join {
                name: full_name,
                identity: identity(&self.identity, name, &members),
                members,
                store: Arc::clone(&self.store),
            };
            let join = |origin| {
                let (options, nccl, device) = (&core.options, core.nccl, &core.device);
                Self::join(join, seat, options, nccl, device, origin)
            };
            // All ranks of a communicator have to be there to split it, at the same place among its
            // operations; of a part of them the trait does not ask that.
            match core.options.eager && ranks.len() == core.size {
                true => core.between_collectives(|| join(Some(core))),
                false => join(None),
            }
        };
        self.splits
            .split(&core.place, core.size, (ranks, name), usable, join)
    }

    fn abort(&self, reason: &str) {
        self.core.fail(Error::new(ErrorKind::Aborted, reason), true);
    }

    fn shutdown(&self) -> Result<()> {
        let core = &self.core;
        let deadline = Instant::now() + core.timeout.min(Duration::from_secs(1 << 30));
        let ended = core.settle(deadline).and_then(|()| {
            self.submit(Call::Barrier, &CallOptions::default())?
                .wait()?;
            core.close();
            core.finalize(deadline)
        });
        ended.map_err(|err| err.during("shutdown").at(core.place.clone()))
    }

    fn sequence(&self) -> u64 {
        self.core.sequence()
    }

    fn p2p_sequence(&self) -> u64 {
        self.core.p2p_sequence()
    }
}

impl Drop for NcclGroup {
    fn drop(&mut self) {
        let core = &self.core;
        if core.is_closed() {
            return;
        }
        if core.cause().is_none() {
            tracing::debug!("group {:?} is dropped without a shutdown", self.name);
            let _current = core.device.bind();
            if let Err(err) = core.board.leave(core.finished()) {
                tracing::debug!("the others could not be told: {err}");
            }
            let dropped = "the group was dropped without a shutdown";
            core.fail(Error::new(ErrorKind::Aborted, dropped), false);
        }
        core.await_silence(FAREWELL);
    }
}

impl fmt::Debug for NcclGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, rank, size) = (&self.name, self.core.rank, self.core.size);
        write!(
            f,
            "NcclGroup({name:?}, rank {rank} of {size} on {:?})",
            self.core.device
        )
    }
}

#[cfg(test)]
mod tests {
    use phalanx_pg::CallKind;

    use super::*;

    #[test]
    fn what_nccl_lacks_is_not_claimed() {
        let known = capabilities();
        assert!(!known.dtypes.contains(DType::I16) && !known.cpu && known.cuda);
        assert!(known.reduces(DType::Complex64, ReduceOp::Sum));
        assert!(!known.reduces(DType::Complex64, ReduceOp::Product));
        assert!(known.calls.contains(CallKind::AllToAll));
        assert!(!known.ops.contains(ReduceOp::BitXor));
    }

    #[test]
    fn disjoint_groups_of_one_name_differ() {
        assert_ne!(identity("", "half", &[0, 1]), identity("", "half", &[2, 3]));
    }
}
