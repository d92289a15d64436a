//! How communicators come to be: ids through the store, in a thread of their own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_sys::ncclUniqueId;
use phalanx_pg::{Error, ErrorKind, Result};

use crate::channel::{Channel, Line};
use crate::comm::{Comm, Patience, failure};
use crate::core::Core;

impl Core {
    pub(crate) fn start_connecting(self: &Arc<Self>, channel: &Arc<Channel>) -> Result<()> {
        let (core, channel) = (Arc::clone(self), Arc::clone(channel));
        let connect = move || {
            if let Err(err) = core.connect(&channel) {
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
        self.device.bind()?;
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
        channel.connected(comm, &patience)
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

    /// Makes the communicator of all ranks now.
    pub(crate) fn connect_now(self: &Arc<Self>) -> Result<()> {
        if self.collectives.claim() {
            self.start_connecting(&self.collectives)?;
        }
        let since = Instant::now();
        while !self.collectives.is_connected() {
            let waited = self.patience(since, self.timeout);
            waited.inspect_err(|err| self.fail(err.clone(), true))?;
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}
