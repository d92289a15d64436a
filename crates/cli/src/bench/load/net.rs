//! Sockets of the load generator: plain epoll, so that it costs little beside the server.

use std::io::{self, Read, Write};
use std::net::{SocketAddrV4, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use phalanx_store::tcp::wire::{MAGIC, Request};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fs::Timespec;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};

use crate::Failure;

/// Level-triggered readiness of many sockets, each known by a number.
pub(super) struct Poller {
    epoll: OwnedFd,
    events: Vec<epoll::Event>,
}

impl Poller {
    /// Gives at most `portion` sockets at a time.
    pub(super) fn new(portion: usize) -> io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            events: Vec::with_capacity(portion),
        })
    }

    pub(super) fn add(&self, socket: &TcpStream, number: usize) -> io::Result<()> {
        self.register(socket, number, EventFlags::IN)
    }

    /// For a socket that is still connecting: also tells, once, that it can be written to.
    pub(super) fn add_connecting(&self, socket: &TcpStream, number: usize) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
        self.register(socket, number, flags)
    }

    fn register(&self, socket: &TcpStream, number: usize, flags: EventFlags) -> io::Result<()> {
        Ok(epoll::add(
            &self.epoll,
            socket,
            EventData::new_u64(number as u64),
            flags,
        )?)
    }

    /// The numbers of sockets that have something, after at most `patience`.
    pub(super) fn wait(
        &mut self,
        patience: Duration,
    ) -> io::Result<impl Iterator<Item = usize> + use<'_>> {
        let timeout = Timespec {
            tv_sec: patience.as_secs() as i64,
            tv_nsec: i64::from(patience.subsec_nanos()),
        };
        self.events.clear();
        match epoll::wait(
            &self.epoll,
            spare_capacity(&mut self.events),
            Some(&timeout),
        ) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(err) => return Err(err.into()),
        }
        Ok(self.events.iter().map(|event| event.data.u64() as usize))
    }
}

/// A socket on its way to `addr`. It never blocks, and resets when dropped: thousands of them
/// leave no waiting ports behind.
pub(super) fn dial(addr: SocketAddrV4) -> io::Result<TcpStream> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    match net::connect(&socket, &addr) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(TcpStream::from(socket)),
        Err(err) => Err(err.into()),
    }
}

/// What a client says first: `VALIDATE` and `PING`, in one piece.
pub(super) fn greeting(nonce: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    Request::Validate { magic: MAGIC }.encode(&mut bytes);
    Request::Ping { nonce }.encode(&mut bytes);
    bytes
}

/// Connects `count` clients, one after the other, and checks that each is greeted.
pub(super) fn connect_all(addr: SocketAddrV4, count: usize) -> Result<Vec<TcpStream>, Failure> {
    let mut sockets = Vec::with_capacity(count);
    for i in 0..count {
        let socket = TcpStream::connect(addr)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(Duration::from_secs(30)))?;
        (&socket).write_all(&greeting(i as u32))?;
        let mut answer = [0; 4];
        (&socket).read_exact(&mut answer)?;
        if answer != (i as u32).to_le_bytes() {
            return Err(format!("client {i} got the PING answer {answer:?}").into());
        }
        socket.set_nonblocking(true)?;
        sockets.push(socket);
    }
    Ok(sockets)
}

/// Sends a request whole. A server that does not read for seconds is an error.
pub(super) fn send(mut socket: &TcpStream, mut bytes: &[u8]) -> Result<(), Failure> {
    let mut limit = None;
    while !bytes.is_empty() {
        match socket.write(bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => {
                let now = Instant::now();
                if now > *limit.get_or_insert(now + Duration::from_secs(10)) {
                    return Err("the server does not read a small request".into());
                }
            }
            Err(err) => return Err(format!("sending a request: {err}").into()),
        }
    }
    Ok(())
}

/// Fills `buffer` from `have` on; true once it is full.
pub(super) fn receive(
    mut socket: &TcpStream,
    buffer: &mut [u8],
    have: &mut usize,
) -> Result<bool, Failure> {
    match socket.read(&mut buffer[*have..]) {
        Ok(0) => return Err("the server closed a connection".into()),
        Ok(n) => *have += n,
        Err(err)
            if matches!(
                err.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
            ) => {}
        Err(err) => return Err(format!("reading an answer: {err}").into()),
    }
    Ok(*have == buffer.len())
}
