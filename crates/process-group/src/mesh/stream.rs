//! A connection to a rank on this host or on another.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::time::Duration;

/// A connection between two ranks.
#[derive(Debug)]
pub enum Stream {
    /// To another host, or for want of anything better.
    Tcp(TcpStream),
    /// Inside a host: descriptors can be passed.
    Unix(UnixStream),
}

/// Runs the same method on both kinds.
macro_rules! either {
    ($stream:expr, $name:ident => $body:expr) => {
        match $stream {
            Stream::Tcp($name) => $body,
            Stream::Unix($name) => $body,
        }
    };
}

impl Stream {
    /// Whether reads and writes return instead of waiting.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        either!(self, stream => stream.set_nonblocking(nonblocking))
    }

    pub(super) fn set_read_timeout(&self, limit: Option<Duration>) -> io::Result<()> {
        either!(self, stream => stream.set_read_timeout(limit))
    }

    /// Small messages go out at once; a peer inside the host is the same user.
    pub(super) fn prepare(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_nodelay(true),
            Self::Unix(stream) => {
                let peer = rustix::net::sockopt::socket_peercred(stream)?;
                match peer.uid == rustix::process::geteuid() {
                    true => Ok(()),
                    false => Err(io::Error::other("it belongs to another user")),
                }
            }
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        either!(self, stream => stream.read(buf))
    }
}

impl Write for Stream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        either!(self, stream => stream.write(buf))
    }

    fn flush(&mut self) -> io::Result<()> {
        either!(self, stream => stream.flush())
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        either!(self, stream => stream.as_fd())
    }
}

/// Where a rank can be called: on both ways.
#[derive(Debug)]
pub(super) struct Listeners {
    tcp: TcpListener,
    unix: UnixListener,
}

/// The name of a socket without a file: nothing of it is left behind, whatever happens.
fn abstract_name(name: &[u8]) -> io::Result<UnixAddr> {
    UnixAddr::from_abstract_name(name)
}

impl Listeners {
    pub(super) fn open(bind: IpAddr, name: &[u8]) -> io::Result<Self> {
        let tcp = TcpListener::bind(SocketAddr::new(bind, 0))?;
        let unix = UnixListener::bind_addr(&abstract_name(name)?)?;
        tcp.set_nonblocking(true)?;
        unix.set_nonblocking(true)?;
        Ok(Self { tcp, unix })
    }

    pub(super) fn tcp_address(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Whoever has called; `None` if nobody has.
    pub(super) fn accept(&self) -> Option<Stream> {
        // What accept reports is about one caller that went away, or passes.
        let tcp = self.tcp.accept().map(|(stream, _)| Stream::Tcp(stream));
        let unix = || self.unix.accept().map(|(stream, _)| Stream::Unix(stream));
        tcp.or_else(|_| unix()).ok()
    }
}

pub(super) fn call_tcp(address: SocketAddr, limit: Duration) -> io::Result<Stream> {
    TcpStream::connect_timeout(&address, limit).map(Stream::Tcp)
}

pub(super) fn call_unix(name: &[u8]) -> io::Result<Stream> {
    UnixStream::connect_addr(&abstract_name(name)?).map(Stream::Unix)
}
