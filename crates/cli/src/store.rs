//! `phalanx store`: a store server on its own.

use std::io::Write;
use std::net::{SocketAddr, ToSocketAddrs};

use phalanx_store::{JobToken, TcpStoreServer};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::{Failure, descriptors};

/// Serve a store until interrupted. The first line on stdout is `listening on HOST:PORT`.
///
/// Clients are Phalanx and PyTorch 2.13 processes. With PHALANX_TOKEN set, only clients that know
/// the token are served (PyTorch's do not).
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:29500")]
    bind: String,

    /// Stop when stdin ends, so that the store does not outlive the program that started it.
    #[arg(long)]
    until_eof: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let addr = resolve(&args.bind)?;
    descriptors::raise_limit();
    descriptors::reserve_table();
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let server = TcpStoreServer::start(&[addr], JobToken::from_env()?)?;
    let mut stdout = std::io::stdout();
    writeln!(stdout, "listening on {}", server.local_addr())?;
    stdout.flush()?;
    if args.until_eof {
        std::thread::spawn(stop_at_eof);
    }
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

fn stop_at_eof() {
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    if let Err(err) = signal_hook::low_level::raise(SIGTERM) {
        tracing::error!("stdin has ended, but the store cannot stop itself: {err}");
    }
}
