//! From a [`MeetingPoint`] to a store: connecting, and serving where this rank has to.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;

use super::env::{Launcher, LauncherEnv, MeetingPoint};
use super::meet::NotMet;
use super::{BIND_VAR, RendezvousOptions, host};
use crate::deadline::Deadline;
use crate::error::{Result, StoreError};
use crate::file::FileStore;
use crate::hash::HashStore;
use crate::store::Store;
use crate::tcp::{TcpStore, TcpStoreOptions, TcpStoreServer, resolve};

/// A store at which the ranks of one job arrive.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) store: Arc<dyn Store>,
    pub(super) server: Option<TcpStoreServer>,
    /// This host's address on the way to the store, if there is a way.
    pub(super) local_ip: Option<IpAddr>,
    /// Nothing in it is older than the job.
    pub(super) fresh: bool,
    /// What the ranks must have in common to arrive here.
    pub(super) shared: &'static str,
}

pub(super) fn open(
    env: &LauncherEnv,
    options: &RendezvousOptions,
    deadline: Deadline,
) -> Result<Place, NotMet> {
    match &env.meeting {
        MeetingPoint::Alone => {
            let store = HashStore::new();
            store.set_timeout(options.timeouts.store());
            Ok(Place {
                store: Arc::new(store),
                server: None,
                local_ip: None,
                fresh: true,
                shared: "process",
            })
        }
        MeetingPoint::Tcp {
            host,
            port,
            agent_hosted,
        } => {
            let serves = env.rank == 0 && !agent_hosted;
            let server = serves
                .then(|| serve(env, host, *port, options, deadline))
                .transpose()?;
            let store = connect(env, host, *port, server.as_ref(), options, deadline);
            let store = store.map_err(|err| match err {
                // It was there a moment ago: the store of the meeting before, that has closed.
                StoreError::Connection { .. } if !agent_hosted && server.is_none() => {
                    NotMet::Elsewhere(err)
                }
                other => NotMet::Failed(other),
            })?;
            let local_ip = match &server {
                // Its own connection does not leave the host; others reach it as MASTER_ADDR says.
                Some(_) => resolve(host, *port, deadline)
                    .ok()
                    .and_then(|addrs| addrs.first().map(SocketAddr::ip)),
                None => Some(store.local_addr()?.ip()),
            };
            Ok(Place {
                store: Arc::new(store),
                server,
                local_ip,
                fresh: !agent_hosted,
                shared: match env.launcher {
                    Launcher::Url => "URL and PHALANX_TOKEN",
                    _ => "MASTER_PORT and PHALANX_TOKEN",
                },
            })
        }
        MeetingPoint::LocalFile { job } => {
            Ok(file(&host::meeting_file(job)?, env, options, "job id")?)
        }
        MeetingPoint::File { path } => Ok(file(path, env, options, "file")?),
    }
}

fn file(
    path: &Path,
    env: &LauncherEnv,
    options: &RendezvousOptions,
    shared: &'static str,
) -> Result<Place> {
    let store = FileStore::open_for(path, Some(env.world_size), options.timeouts.store())?;
    Ok(Place {
        store: Arc::new(store),
        server: None,
        local_ip: None,
        fresh: false,
        shared,
    })
}

fn connect(
    env: &LauncherEnv,
    host: &str,
    port: u16,
    server: Option<&TcpStoreServer>,
    options: &RendezvousOptions,
    deadline: Deadline,
) -> Result<TcpStore> {
    // The server may listen elsewhere than at the address that the others use.
    let own = server.map(|server| match server.local_addr().ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.to_string(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.to_string(),
        ip => ip.to_string(),
    });
    let store = TcpStore::connect(&TcpStoreOptions {
        timeout: deadline.left(),
        world_size: Some(env.world_size),
        token: options.token.clone(),
        ..TcpStoreOptions::new(own.unwrap_or_else(|| host.to_owned()), port)
    })?;
    store.set_timeout(options.timeouts.store());
    Ok(store)
}

/// Serves the store at `host`, which has to be this one.
fn serve(
    env: &LauncherEnv,
    host: &str,
    port: u16,
    options: &RendezvousOptions,
    deadline: Deadline,
) -> Result<TcpStoreServer> {
    let addrs = match options.bind {
        Some(ip) => vec![SocketAddr::new(ip, port)],
        None => local_addresses(env, host, port, deadline)?,
    };
    let variable = match env.launcher {
        Launcher::Url => "the URL's port",
        _ => "MASTER_PORT",
    };
    TcpStoreServer::start(&addrs, options.token.clone()).map_err(|err| match err {
        StoreError::Io { kind, reason, .. } if kind == std::io::ErrorKind::AddrInUse => {
            StoreError::Io {
                what: format!("rank 0 cannot serve the store on port {port}"),
                reason: format!("{reason} ({variable}, the same for all ranks)"),
                kind,
            }
        }
        StoreError::Io { kind, reason, .. } if kind == std::io::ErrorKind::AddrNotAvailable => {
            let addr = addrs[0].ip();
            StoreError::Io {
                what: format!("rank 0 cannot serve the store on {BIND_VAR}={addr}"),
                reason,
                kind,
            }
        }
        other => other,
    })
}

/// The addresses that `host` means here.
fn local_addresses(
    env: &LauncherEnv,
    host: &str,
    port: u16,
    deadline: Deadline,
) -> Result<Vec<SocketAddr>> {
    let resolved = resolve(host, port, deadline);
    let mut resolved = resolved.map_err(|reason| {
        let what = format!("rank 0 cannot find the address of {host:?}, at which it is to serve");
        StoreError::io(what, std::io::Error::other(reason))
    })?;
    resolved.sort_unstable();
    resolved.dedup();
    // `localhost` may mean ::1 on a machine without IPv6: what this host lacks is left out.
    let is_local = |addr: &SocketAddr| match TcpListener::bind((addr.ip(), 0)) {
        Err(err) => err.kind() != std::io::ErrorKind::AddrNotAvailable,
        Ok(_) => true,
    };
    let local: Vec<SocketAddr> = resolved.iter().copied().filter(is_local).collect();
    if local.is_empty() {
        let addresses: Vec<String> = resolved.iter().map(|a| a.ip().to_string()).collect();
        return Err(StoreError::Invalid(format!(
            "rank 0 is to serve the store at {host:?} ({}), which is not an address of this host; \
             start rank 0 on that host, or set {BIND_VAR} to the local address that is reached by \
             this name",
            addresses.join(", ")
        )));
    }
    only_loopback(env, host, &local)?;
    Ok(local)
}

/// Many systems map a host's own name to 127.0.1.1, where no other host reaches it.
///
/// A loopback address that was written down as such is believed: several "hosts" may be one.
fn only_loopback(env: &LauncherEnv, host: &str, local: &[SocketAddr]) -> Result<()> {
    let others = match (env.num_nodes, env.local_world_size) {
        (Some(nodes), _) => nodes > 1,
        (None, Some(local)) => local < env.world_size,
        (None, None) => false,
    };
    if !others || !local.iter().all(|addr| addr.ip().is_loopback()) {
        return Ok(());
    }
    let means = local[0].ip();
    if host == "localhost" || host.parse::<IpAddr>().is_ok() {
        tracing::warn!("the job runs on several hosts, but only this one reaches rank 0 at {host}");
        return Ok(());
    }
    Err(StoreError::Invalid(format!(
        "the job runs on several hosts, but {host:?} means {means} here, where other hosts cannot \
         reach rank 0; set {BIND_VAR} to this host's network address, or to 0.0.0.0 for all"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_for_loopback_does_not_serve_several_hosts() {
        let several = LauncherEnv {
            num_nodes: Some(2),
            ..LauncherEnv::alone()
        };
        let loopback = [SocketAddr::from(([127, 0, 1, 1], 9))];
        let text = only_loopback(&several, "node1", &loopback)
            .unwrap_err()
            .to_string();
        assert!(text.contains("\"node1\" means 127.0.1.1 here"), "{text}");
        assert!(text.contains("set PHALANX_STORE_BIND"), "{text}");
        let network = [SocketAddr::from(([10, 0, 0, 1], 9))];
        for (env, host, addrs) in [
            (&several, "localhost", &loopback),
            (&several, "127.0.1.1", &loopback),
            (&several, "node1", &network),
            (&LauncherEnv::alone(), "node1", &loopback),
        ] {
            only_loopback(env, host, addrs).unwrap();
        }
    }
}
