//! What the ranks of a group tell each other through the store.

use std::sync::Arc;
use std::time::Duration;

use nccl_sys::{NCCL_UNIQUE_ID_BYTES, ncclUniqueId};
use phalanx_pg::{Error, Notice, Result};
use phalanx_store::{PrefixStore, Store};

use crate::comm::Patience;

/// Between two looks for a key.
const POLL: Duration = Duration::from_millis(2);

/// Why the group broke, by who found out first.
const BROKEN: &str = "broken";
/// Who dropped the group without an end, and how many collectives it had finished.
const LEFT: &str = "left";
/// Bytes of one entry there: rank, number of collectives.
const ENTRY: usize = 12;

/// One group's keys. Calls look and do not wait, so one connection serves all groups.
#[derive(Debug)]
pub(crate) struct Board {
    store: PrefixStore,
    rank: usize,
    size: usize,
}

/// What has come in.
#[derive(Debug, Default)]
pub(crate) struct News {
    pub(crate) broken: Option<Notice>,
    /// Rank, and the first collective that it takes no part in.
    pub(crate) left: Vec<(usize, u64)>,
}

impl Board {
    pub(crate) fn new(store: &Arc<dyn Store>, identity: &str, rank: usize, size: usize) -> Self {
        Self {
            store: PrefixStore::new(identity, Arc::clone(store)),
            rank,
            size,
        }
    }

    /// Hands out an id for the communicator `key`.
    pub(crate) fn put_id(&self, key: &str, id: ncclUniqueId) -> Result<()> {
        Ok(self.store.set(key, &id.to_bytes())?)
    }

    /// The id of the communicator `key`, once whoever makes it has.
    pub(crate) fn get_id(&self, key: &str, patience: Patience<'_>) -> Result<ncclUniqueId> {
        while !self.store.check(&[key])? {
            patience()?;
            std::thread::sleep(POLL);
        }
        let bytes = self.store.get(key)?;
        let bytes: [u8; NCCL_UNIQUE_ID_BYTES] = bytes.try_into().map_err(|bytes: Vec<u8>| {
            Error::invalid(format!(
                "the store's key {key:?} has {} bytes and is no unique id",
                bytes.len()
            ))
        })?;
        Ok(ncclUniqueId::from_bytes(bytes))
    }

    /// Tells the others why the group broke; the first cause stays.
    pub(crate) fn tell(&self, cause: &Error) -> Result<()> {
        let notice = Notice::of(cause, self.rank).encode();
        self.store.compare_set(BROKEN, &[], &notice)?;
        Ok(())
    }

    /// Tells the others that this rank takes no part in collectives from number `finished` on.
    pub(crate) fn leave(&self, finished: u64) -> Result<()> {
        let mut entry = (self.rank as u32).to_le_bytes().to_vec();
        entry.extend(finished.to_le_bytes());
        Ok(self.store.append(LEFT, &entry)?)
    }

    pub(crate) fn news(&self) -> Result<News> {
        let mut news = News::default();
        if self.store.check(&[BROKEN])? {
            let bytes = self.store.get(BROKEN)?;
            news.broken = Notice::decode(&bytes, self.size);
        }
        if self.store.check(&[LEFT])? {
            news.left = entries(&self.store.get(LEFT)?);
        }
        Ok(news)
    }
}

fn entries(bytes: &[u8]) -> Vec<(usize, u64)> {
    let entry = |entry: &[u8]| {
        let (rank, finished) = entry.split_at(4);
        Some((
            u32::from_le_bytes(rank.try_into().ok()?) as usize,
            u64::from_le_bytes(finished.try_into().ok()?),
        ))
    };
    bytes.chunks_exact(ENTRY).filter_map(entry).collect()
}

#[cfg(test)]
mod tests {
    use phalanx_pg::ErrorKind;
    use phalanx_store::HashStore;

    use super::*;

    fn boards() -> [Board; 2] {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        [0, 1].map(|rank| Board::new(&store, "/group", rank, 2))
    }

    #[test]
    fn the_first_cause_stays() {
        let [zero, one] = boards();
        zero.tell(&Error::new(ErrorKind::Aborted, "enough"))
            .unwrap();
        one.tell(&Error::new(ErrorKind::Timeout, "too late"))
            .unwrap();
        let told = one.news().unwrap().broken.unwrap().to_error();
        assert_eq!(told.message(), "rank 0 aborted the group: enough");
    }

    #[test]
    fn everybody_who_leaves_is_known() {
        let [zero, one] = boards();
        assert!(one.news().unwrap().left.is_empty());
        zero.leave(7).unwrap();
        one.leave(3).unwrap();
        assert_eq!(one.news().unwrap().left, [(0, 7), (1, 3)]);
    }

    #[test]
    fn an_id_is_waited_for_with_patience() {
        let [zero, one] = boards();
        let enough = || Err(Error::new(ErrorKind::Timeout, "enough"));
        assert_eq!(
            one.get_id("0", &enough).unwrap_err().kind(),
            ErrorKind::Timeout
        );
        let id = ncclUniqueId::from_bytes([7; NCCL_UNIQUE_ID_BYTES]);
        zero.put_id("0", id).unwrap();
        assert!(one.get_id("0", &enough).unwrap() == id);
        zero.store.set("1", b"short").unwrap();
        assert!(one.get_id("1", &enough).is_err());
    }
}
