//! How communicators come to be, in a thread of their own: with ids through the store, or from the
//! communicator of a group of the same ranks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_sys::ncclUniqueId;
use phalanx_pg::{Error, ErrorKind, Result};

use crate::channel::{Channel, Line};
use crate::comm::{Comm, Patience, failure};
use crate::core::Core;

impl Core {
    /// Has the channel's communicator made with ids.
    pub(crate) fn start_connecting(self: &Arc<Self>, channel: &Arc<Channel>) -> Result<()> {
        let (core, channel) = (Arc::clone(self), Arc::clone(channel));
        self.in_a_thread(move || core.connect(&channel))
    }

    /// Runs `connect`, whose failure breaks the group.
    fn in_a_thread(
        self: &Arc<Self>,
        connect: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let core = Arc::clone(self);
        let connect = move || {
            if let Err(err) = connect() {
                core.fail(err.during("connecting"), true);
            }
        };
        let named = std::thread::Builder::new().name("phalanx-nccl-connect".into());
        named.spawn(connect).map(drop).map_err(|err| {
            let err = Error::new(ErrorKind::Backend, format!("starting a thread: {err}"));
            self.fail(err.clone(), true);
            err
        })
    }

    /// Makes the channel's communicator, with PyTorch's keys. Ends when the group breaks, which it
    /// does when an operation has waited for too long. On a thread that ends afterwards: a failure
    /// leaves it inside one of the library's group calls.
    fn connect(&self, channel: &Channel) -> Result<()> {
        let _current = self.device.bind()?;
        let patience = || self.patience(Instant::now(), Duration::MAX);
        let (mut ids, rank, size) = match channel.line {
            Line::All => (self.collective_ids(&patience)?, self.rank, self.size),
            Line::To(peer) => {
                let key = format!("{}:{peer}", self.rank);
                (vec![self.id(&key, true, &patience)?], 0, 2)
            }
            Line::From(peer) => {
                let key = format!("{peer}:{}", self.rank);
                (vec![self.id(&key, false, &patience)?], 1, 2)
            }
        };
        let comm = Comm::join(self.nccl, &mut ids, rank, size, &patience)?;
        channel.connected(comm, &|since, timeout| self.patience(since, timeout))
    }

    /// The ids of the communicator of all ranks: one, or for many ranks several, made by ranks
    /// that are spread over all.
    fn collective_ids(&self, patience: Patience<'_>) -> Result<Vec<ncclUniqueId>> {
        let roots = self.size.div_ceil(self.options.ranks_per_root);
        if roots < 2 || self.nccl.ncclCommInitRankScalable.is_none() {
            return Ok(vec![self.id("0", self.rank == 0, patience)?]);
        }
        let root = |index: usize| index * self.size / roots;
        let ids = (0..roots).map(|index| {
            let key = format!("UniqueNCCLID:{index}");
            self.id(&key, self.rank == root(index), patience)
        });
        // Every rank makes its own before it waits for others': the keys are in root order.
        ids.collect()
    }

    fn id(&self, key: &str, make: bool, patience: Patience<'_>) -> Result<ncclUniqueId> {
        if !make {
            return self.board.get_id(key, patience);
        }
        let mut id = ncclUniqueId::EMPTY;
        // SAFETY: it points to room for an id.
        let code = unsafe { (self.nccl.ncclGetUniqueId)(&mut id) };
        let made = self.nccl.check("ncclGetUniqueId", code);
        made.map_err(|err| failure(&err))?;
        self.board.put_id(key, id)?;
        Ok(id)
    }

    /// Makes the communicator of all ranks now; with an `origin` from its one, which is that of a
    /// group of the same ranks. All of them do, between the same two collectives of the origin's.
    pub(crate) fn connect_now(self: &Arc<Self>, origin: Option<&Arc<Core>>) -> Result<()> {
        if self.collectives.claim() {
            match origin.cloned() {
                None => self.start_connecting(&self.collectives)?,
                Some(origin) => {
                    let core = Arc::clone(self);
                    self.in_a_thread(move || core.connect_from(&origin))?;
                }
            }
        }
        let since = Instant::now();
        while !self.collectives.is_connected() {
            let waited = self.patience(since, self.timeout);
            let waited = waited.and_then(|()| origin.map_or(Ok(()), |it| it.check_usable()));
            waited.inspect_err(|err| self.fail(err.clone(), true))?;
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn connect_from(&self, origin: &Core) -> Result<()> {
        let _current = self.device.bind()?;
        let patience = || self.patience(Instant::now(), Duration::MAX);
        let comm = origin.collectives.split(self.rank, &patience)?;
        let patient = |since, timeout| self.patience(since, timeout);
        self.collectives.connected(comm, &patient)
    }

    /// Runs `split` here among the collectives: none is in progress, and none begins before it is
    /// over. Its failure breaks this group too, whose communicator other ranks may be splitting.
    pub(crate) fn between_collectives<T>(&self, split: impl FnOnce() -> Result<T>) -> Result<T> {
        let since = Instant::now();
        let _order = self.take_order(self.timeout)?;
        self.while_submitting(|| {
            while self.collectives.outstanding() > 0 {
                self.patience(since, self.timeout)?;
                std::thread::sleep(Duration::from_millis(1));
            }
            split()
        })
        .inspect_err(|err| self.fail(err.clone(), true))
    }
}
