//! `phalanx store`: a store server on its own.

use std::io::Write;
use std::net::{SocketAddr, ToSocketAddrs};

use phalanx_store::{JobToken, TcpStoreServer};
use rustix::process::{Resource, getrlimit, setrlimit};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::Failure;

/// Serve a store until interrupted. The first line on stdout is `listening on HOST:PORT`.
///
/// Clients are Phalanx and PyTorch 2.13 processes. With PHALANX_TOKEN set, only clients that know
/// the token are served (PyTorch's do not).
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:29500")]
    bind: String,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let addr = resolve(&args.bind)?;
    raise_descriptor_limit();
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let server = TcpStoreServer::start(&[addr], JobToken::from_env()?)?;
    let mut stdout = std::io::stdout();
    writeln!(stdout, "listening on {}", server.local_addr())?;
    stdout.flush()?;
    signals.forever().next();
    Ok(())
}

fn resolve(bind: &str) -> Result<SocketAddr, Failure> {
    let bad =
        |why: String| format!("--bind {bind:?}: {why}; give HOST:PORT, for example 127.0.0.1:0");
    let mut addrs = bind.to_socket_addrs().map_err(|err| bad(err.to_string()))?;
    Ok(addrs
        .next()
        .ok_or_else(|| bad("the name has no address".into()))?)
}

/// Lets the server hold as many clients as the system permits this process.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(err) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!("cannot raise the limit of open files: {err}");
    }
}
