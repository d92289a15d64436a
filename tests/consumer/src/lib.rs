//! A process group of one's own: ranks of one host that exchange files in a directory.
//!
//! Slow, small and complete in what it offers, which is every collective on every element type in
//! host memory. Sends and receives it does not have, and says so in its [`Capabilities`].
//!
//! | file | what it is |
//! |---|---|
//! | `lib.rs` | the [`ProcessGroup`], and how it is registered |
//! | `collective.rs` | every collective as exchanges of letters |
//! | `room.rs` | one group's directory: letters, and the notice that ends the group |
//! | `host.rs` | the directory of all groups, and who is alive |
//!
//! `docs/custom-backend.md` of Phalanx walks through it.
#![forbid(unsafe_code)]

mod collective;
mod host;
mod room;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use phalanx::pg::registry::{self, GroupInit};
use phalanx::pg::{
    Call, CallKind, CallOptions, Capabilities, Engine, Error, ErrorKind, Lane, PeerDeath, Place,
    ProcessGroup, RawWork, Result, Splits,
};

use host::Host;
use room::Room;

/// The name to give to [`phalanx::init_with`] or to `PHALANX_BACKEND`.
pub const NAME: &str = "files";

/// Makes the backend known to the process. Once.
pub fn register() -> Result<()> {
    registry::register(NAME, |init| Ok(FilesGroup::connect(init)?))
}

/// One rank of a group whose ranks exchange files.
///
/// May be used from many threads.
#[derive(Debug)]
pub struct FilesGroup {
    name: String,
    lane: Lane,
    room: Arc<Room>,
    host: Arc<Host>,
    timeout: Duration,
    /// Names given to splits so far.
    splits: Splits,
}

impl FilesGroup {
    /// Meets the other ranks in the store and opens the group of all.
    pub fn connect(init: &GroupInit) -> Result<Arc<Self>> {
        let host = Arc::new(Host::meet(init)?);
        let members = (0..init.world_size).collect();
        let room = Room::open(&host, host.dir().join("world"), init.rank, members)?;
        Ok(Self::new(&init.name, room, host, init.timeout))
    }

    fn new(name: &str, room: Room, host: Arc<Host>, timeout: Duration) -> Arc<Self> {
        let room = Arc::new(room);
        let place = Place::of_group(name, room.rank());
        let engine = Arc::clone(&room) as Arc<dyn Engine>;
        Arc::new(Self {
            name: name.to_owned(),
            lane: Lane::new(place, timeout, engine),
            room,
            host,
            timeout,
            splits: Splits::default(),
        })
    }

    /// The directory of the group `name` of these members of the world.
    fn dir_of(&self, name: &str, members: &[usize]) -> PathBuf {
        // The members are in it because disjoint groups may have the same name.
        let name: String = name.bytes().map(|byte| format!("{byte:02x}")).collect();
        let members: String = members.iter().map(|member| format!("-{member}")).collect();
        self.room.dir().join(format!("group-{name}{members}"))
    }
}

impl ProcessGroup for FilesGroup {
    fn rank(&self) -> usize {
        self.room.rank()
    }

    fn size(&self) -> usize {
        self.room.members().len()
    }

    fn backend(&self) -> &str {
        NAME
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn global_ranks(&self) -> &[usize] {
        self.room.members()
    }

    fn capabilities(&self) -> Capabilities {
        let mut known = Capabilities::all_on_host();
        known.calls = known.calls.without(CallKind::Send).without(CallKind::Recv);
        known.recv_any = false;
        known.on_peer_death = PeerDeath::Error;
        known
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        self.lane.submit(call, options)
    }

    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
        let place = Place::of_group(&self.name, self.rank());
        let usable = || self.lane.check_usable();
        let join = |rank| {
            let members: Vec<usize> = ranks.iter().map(|&rank| self.global_ranks()[rank]).collect();
            let dir = self.dir_of(name, &members);
            let room = Room::open(&self.host, dir, rank, members)?;
            let name = format!("{}/{name}", self.name);
            let group = Self::new(&name, room, Arc::clone(&self.host), self.timeout);
            Ok(group as Arc<dyn ProcessGroup>)
        };
        self.splits.split(&place, self.size(), (ranks, name), usable, join)
    }

    fn abort(&self, reason: &str) {
        self.lane.fail(Error::new(ErrorKind::Aborted, reason));
    }

    fn shutdown(&self) -> Result<()> {
        let barrier = self.submit(Call::Barrier, &CallOptions::blocking());
        let ended = barrier.and_then(RawWork::wait).and_then(|_| self.lane.close(self.timeout));
        ended.map_err(|err| err.during("shutdown"))
    }

    fn sequence(&self) -> u64 {
        self.lane.sequence()
    }

    fn p2p_sequence(&self) -> u64 {
        0 // there are no point-to-point calls
    }
}
