//! Where the agents of several nodes find node 0, and where node 0 serves.

use std::net::{SocketAddr, ToSocketAddrs};

use phalanx_store::{TcpStoreOptions, TcpStoreServer};

use crate::Failure;

/// Where node 0 is reached.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) host: String,
    pub(super) port: u16,
}

impl Endpoint {
    /// As given; one node alone takes a free port of its own.
    pub(super) fn of(text: Option<&str>, nnodes: usize) -> Result<Self, Failure> {
        match text {
            Some(text) => Self::parse(text),
            None if nnodes == 1 => Ok(Self {
                host: "127.0.0.1".to_owned(),
                port: 0,
            }),
            None => Err(
                "several nodes need --rdzv-endpoint HOST:PORT, where node 0 is reached: \
                         the same on all nodes"
                    .into(),
            ),
        }
    }

    pub(super) fn parse(text: &str) -> Result<Self, Failure> {
        let bad = || format!("--rdzv-endpoint {text:?}: give HOST:PORT, for example node0:29500");
        let (host, port) = text.rsplit_once(':').ok_or_else(bad)?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let port = port.parse().map_err(|_| bad())?;
        match host.is_empty() {
            true => Err(bad().into()),
            false => Ok(Self {
                host: host.to_owned(),
                port,
            }),
        }
    }

    /// The addresses on which node 0 serves: what the endpoint means there, not all interfaces.
    pub(super) fn bind_addresses(&self) -> Result<Vec<SocketAddr>, Failure> {
        let Self { host, port } = self;
        if let Ok(bind) = std::env::var("PHALANX_STORE_BIND")
            && !bind.is_empty()
        {
            let ip = bind.parse();
            let ip = ip.map_err(|_| format!("PHALANX_STORE_BIND={bind:?} is not an IP address"))?;
            return Ok(vec![SocketAddr::new(ip, *port)]);
        }
        let resolved = (host.as_str(), *port).to_socket_addrs();
        let mut addrs: Vec<SocketAddr> = resolved
            .map_err(|err| format!("--rdzv-endpoint {host}:{port}: {err}"))?
            .collect();
        addrs.sort_unstable();
        addrs.dedup();
        // A name may have addresses that this host lacks, such as ::1 without IPv6.
        let is_local = |addr: &SocketAddr| match std::net::TcpListener::bind((addr.ip(), 0)) {
            Err(err) => err.kind() != std::io::ErrorKind::AddrNotAvailable,
            Ok(_) => true,
        };
        addrs.retain(is_local);
        match addrs.is_empty() {
            false => Ok(addrs),
            true => Err(format!(
                "--rdzv-endpoint {host}:{port} is not an address of this host, which is to be node \
                 0: start node 0 there, or set PHALANX_STORE_BIND to the local address that is \
                 reached by this name"
            )
            .into()),
        }
    }
}

/// Node 0 reaches its own server where that listens.
pub(super) fn own(store: TcpStoreOptions, server: &TcpStoreServer) -> TcpStoreOptions {
    let addr = server.local_addr();
    let host = match addr.ip() {
        ip if ip.is_unspecified() && ip.is_ipv4() => "127.0.0.1".to_owned(),
        ip if ip.is_unspecified() => "::1".to_owned(),
        ip => ip.to_string(),
    };
    TcpStoreOptions {
        host,
        port: addr.port(),
        ..store
    }
}
