//! A TCP store server as its owner sees it: where it listens, and that it ends when dropped.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;

use mio::net::TcpListener;
use mio::{Interest, Poll, Token, Waker};
use socket2::{Domain, Protocol, Socket, Type};

use super::connection::keepalive;
use super::event_loop::{EventLoop, LISTENERS, WAKER};
use crate::error::{Result, StoreError};
use crate::token::JobToken;

const MAX_LISTENERS: usize = 32;

/// Serves a store to PyTorch's and our clients until dropped.
///
/// ```
/// use phalanx_store::{Store, TcpStore, TcpStoreOptions, TcpStoreServer};
///
/// let server = TcpStoreServer::start(&["127.0.0.1:0".parse().unwrap()], None)?;
/// let port = server.local_addr().port();
/// let store = TcpStore::connect(&TcpStoreOptions::new("127.0.0.1", port))?;
/// store.set("k", b"v")?;
/// assert_eq!(store.get("k")?, b"v");
/// # Ok::<(), phalanx_store::StoreError>(())
/// ```
#[derive(Debug)]
pub struct TcpStoreServer {
    addrs: Vec<SocketAddr>,
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

impl TcpStoreServer {
    /// Binds all the given addresses and serves them from one thread.
    ///
    /// Port 0 takes a free one; further addresses with port 0 take the same. With a token, only
    /// clients that prove it are served.
    pub fn start(addrs: &[SocketAddr], token: Option<JobToken>) -> Result<Self> {
        let mut listeners = bind_all(addrs)?;
        let addrs = listeners
            .iter()
            .map(TcpListener::local_addr)
            .collect::<io::Result<Vec<_>>>()
            .map_err(|err| StoreError::io("reading the store's own address", err))?;
        let setup = |err| StoreError::io("setting up the store's event loop", err);
        let poll = Poll::new().map_err(setup)?;
        for (i, listener) in listeners.iter_mut().enumerate() {
            let token = Token(LISTENERS + i);
            poll.registry()
                .register(listener, token, Interest::READABLE)
                .map_err(setup)?;
        }
        let waker = Arc::new(Waker::new(poll.registry(), WAKER).map_err(setup)?);
        let event_loop = EventLoop::new(poll, listeners, token);
        let thread = std::thread::Builder::new()
            .name("phalanx-store".into())
            .spawn(move || event_loop.run())
            .map_err(setup)?;
        Ok(Self {
            addrs,
            waker,
            thread: Some(thread),
        })
    }

    /// The first address it listens on, with the port it got.
    pub fn local_addr(&self) -> SocketAddr {
        self.addrs[0]
    }

    /// All addresses it listens on.
    pub fn local_addrs(&self) -> &[SocketAddr] {
        &self.addrs
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        if self.waker.wake().is_ok()
            && let Some(thread) = self.thread.take()
        {
            // A panic of the loop has been reported by the panic hook already.
            let _ = thread.join();
        }
    }
}

fn bind_all(addrs: &[SocketAddr]) -> Result<Vec<TcpListener>> {
    if addrs.is_empty() || addrs.len() > MAX_LISTENERS {
        let problem = format!("a store listens on 1 to {MAX_LISTENERS} addresses");
        return Err(StoreError::Invalid(problem));
    }
    let mut listeners: Vec<TcpListener> = Vec::new();
    let mut port = 0;
    for addr in addrs {
        let mut addr = *addr;
        if addr.port() == 0 {
            addr.set_port(port);
        }
        let bound = bind(addr).and_then(|l| l.local_addr().map(|local| (l, local)));
        let (listener, local) = bound.map_err(|err| bind_error(addr, err))?;
        port = local.port();
        listeners.push(listener);
    }
    Ok(listeners)
}

fn bind(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    // Accepted sockets inherit both: answers leave at once, and clients on hosts that vanished do
    // not stay for ever.
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(&keepalive())?;
    if addr.is_ipv6() {
        // `[::]` serves IPv4 clients as well, as PyTorch's server does.
        socket.set_only_v6(false)?;
    }
    socket.bind(&addr.into())?;
    // The system cuts this to its own limit (net.core.somaxconn).
    socket.listen(i32::from(u16::MAX))?;
    socket.set_nonblocking(true)?;
    Ok(TcpListener::from_std(socket.into()))
}

fn bind_error(addr: SocketAddr, err: io::Error) -> StoreError {
    let hint = match err.kind() {
        io::ErrorKind::AddrInUse => "; another process uses this port, choose another",
        io::ErrorKind::AddrNotAvailable => "; this address is not one of this machine's",
        _ => "",
    };
    StoreError::Io {
        what: format!("listening on {addr}"),
        reason: format!("{err}{hint}"),
        kind: err.kind(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepted_sockets_inherit_what_the_listener_has() {
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let _client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let accepted = std::iter::repeat_with(|| listener.accept()).find_map(|result| result.ok());
        let (accepted, _) = accepted.unwrap();
        assert!(accepted.nodelay().unwrap());
        assert!(socket2::SockRef::from(&accepted).keepalive().unwrap());
    }
}
