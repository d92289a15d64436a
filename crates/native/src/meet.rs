//! How the processes of a world find each other and out who shares memory.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

use phalanx_pg::mesh::{Meeting, Stream, Way};
use phalanx_pg::registry::GroupInit;
use phalanx_pg::{Error, ErrorKind, Result};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::between::Cut;
use crate::domain::os_error;
use crate::host_map::{HostMap, Notes};
use crate::shm::Segment;

/// Names the network interface to be reached at by ranks on other hosts.
const IFACE_VAR: &str = "PHALANX_IFACE";

/// How long a peer on this host may take to show its memory.
const PROBE_LIMIT: Duration = Duration::from_secs(30);

/// The processes of a job, from where one of them stands.
pub(crate) struct World {
    pub(crate) hosts: HostMap,
    pub(crate) cut: Cut,
    /// The address to be reached at.
    pub(crate) bind: Option<IpAddr>,
    /// By rank.
    pub(crate) streams: Vec<Option<Stream>>,
}

/// Connects with every process of the world.
pub(crate) fn meet(init: &GroupInit, notes: Notes, prefix: &str) -> Result<World> {
    let bind = bind_address(init.bind)?;
    let world = connect(init, &format!("{prefix}/world"), bind, &notes)?;
    let shared = world.streams.iter().flatten().all(probe);
    if agree(init, prefix, shared)? {
        return Ok(world);
    }
    tracing::warn!(
        target: "phalanx::native",
        "ranks on one host cannot share memory here; they use TCP, which is slower"
    );
    drop(world);
    let alone = Notes {
        host: format!("rank {}", init.rank),
        ..notes
    };
    let world = connect(init, &format!("{prefix}/apart"), bind, &alone)?;
    Ok(World {
        hosts: HostMap::apart(init.world_size),
        ..world
    })
}

fn connect(init: &GroupInit, prefix: &str, bind: Option<IpAddr>, notes: &Notes) -> Result<World> {
    let meeting = Meeting {
        store: init.store.second_handle()?,
        prefix: prefix.to_owned(),
        name: &init.name,
        rank: init.rank,
        size: init.world_size,
        bind,
        token: init.token.as_ref(),
        limit: meeting_limit(init),
        give_up: &|| None,
    };
    let mut met = None;
    let streams = meeting.connect(&notes.encode()?, |all| {
        let all = all.iter().map(|bytes| Notes::decode(bytes));
        let all = all.collect::<Result<Vec<_>>>()?;
        let hosts = HostMap::new(&all);
        let way = |peer| match hosts.together(init.rank, peer) {
            true => Way::Unix,
            false => Way::Tcp,
        };
        let ways = (0..init.world_size).map(way).collect();
        met = Some((hosts, Cut::agree(all.iter().map(|notes| notes.cut))));
        Ok(ways)
    })?;
    let (hosts, cut) = met.expect("routed before connected");
    Ok(World {
        hosts,
        cut,
        bind,
        streams,
    })
}

/// As long as the store waits for anything, but no longer than an operation may take.
fn meeting_limit(init: &GroupInit) -> Duration {
    init.timeout.min(init.store.timeout())
}

/// Whether all ranks say so.
fn agree(init: &GroupInit, prefix: &str, well: bool) -> Result<bool> {
    let key = |rank| format!("{prefix}/probe/{rank}");
    let word = if well { b"1" } else { b"0" };
    init.store.set(&key(init.rank), word)?;
    let mut all_well = true;
    for rank in 0..init.world_size {
        let answer = init.store.get_for(&key(rank), meeting_limit(init))?;
        all_well &= answer == b"1";
    }
    Ok(all_well)
}

/// The address of the interface that the user names, or the one that reaches the store.
fn bind_address(reaches_store: Option<IpAddr>) -> Result<Option<IpAddr>> {
    let Ok(name) = std::env::var(IFACE_VAR) else {
        return Ok(reaches_store);
    };
    let all = if_addrs::get_if_addrs().map_err(|err| os_error("listing interfaces", &err))?;
    let mut found: Vec<IpAddr> = all
        .iter()
        .filter(|iface| iface.name == name)
        .map(if_addrs::Interface::ip)
        .collect();
    // The older protocol first, as everybody can reach it.
    found.sort_by_key(IpAddr::is_ipv6);
    match found.first() {
        Some(address) => Ok(Some(*address)),
        None => {
            let mut names: Vec<_> = all.into_iter().map(|iface| iface.name).collect();
            names.sort();
            names.dedup();
            Err(Error::invalid(format!(
                "{IFACE_VAR} names {name:?}, which has no address; there are {}",
                names.join(", ")
            )))
        }
    }
}

/// Whether the process at the other end can read this one's memory and the other way round.
fn probe(stream: &Stream) -> bool {
    match stream {
        Stream::Unix(socket) => probe_local(socket).unwrap_or_else(|err| {
            tracing::debug!(target: "phalanx::native", "shared memory does not work: {err}");
            false
        }),
        Stream::Tcp(_) => true,
    }
}

fn probe_local(mut socket: &UnixStream) -> Result<bool> {
    let failed = |err: std::io::Error| os_error("trying shared memory", &err);
    let number = std::process::id();
    let own = Segment::create(4096)?;
    own.word(0).store(number, Ordering::SeqCst);
    socket.set_read_timeout(Some(PROBE_LIMIT)).map_err(failed)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [own.fd()];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let word = [IoSlice::new(b"m")];
    rustix::net::sendmsg(socket, &word, &mut control, SendFlags::NOSIGNAL)
        .map_err(|err| failed(err.into()))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut word = [0];
    let mut words = [IoSliceMut::new(&mut word)];
    rustix::net::recvmsg(socket, &mut words, &mut control, RecvFlags::CMSG_CLOEXEC)
        .map_err(|err| failed(err.into()))?;
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let fd = fd.ok_or_else(|| Error::new(ErrorKind::Backend, "no descriptor came"))?;
    let theirs = Segment::open(fd, 4096)?;
    // Told through the memory of the other, and answered through the socket.
    let seen = theirs.word(0).load(Ordering::SeqCst);
    socket.write_all(&seen.to_le_bytes()).map_err(failed)?;
    let mut echo = [0; 4];
    socket.read_exact(&mut echo).map_err(failed)?;
    socket.set_read_timeout(None).map_err(failed)?;
    Ok(u32::from_le_bytes(echo) == number)
}
