//! The processes of a measurement.

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::Failure;

/// Longer than any measurement takes.
const PATIENCE: Duration = Duration::from_secs(540);

/// Starts a rank with the variables that every launcher sets.
pub(super) fn start(
    mut command: Command,
    rank: usize,
    ranks: usize,
    master: SocketAddr,
) -> Result<Child, Failure> {
    let child = command
        .env("RANK", rank.to_string())
        .env("LOCAL_RANK", rank.to_string())
        .env("WORLD_SIZE", ranks.to_string())
        .env("LOCAL_WORLD_SIZE", ranks.to_string())
        .env("MASTER_ADDR", master.ip().to_string())
        .env("MASTER_PORT", master.port().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    Ok(child)
}

/// The output of every rank, once all have ended well; none is left behind.
pub(super) fn finish(mut ranks: Vec<Child>) -> Result<Vec<String>, Failure> {
    let end = Instant::now() + PATIENCE;
    let failed = loop {
        let states = ranks.iter_mut().map(Child::try_wait);
        let states = states.collect::<Result<Vec<_>, _>>()?;
        if let Some(rank) = states.iter().position(|s| s.is_some_and(|s| !s.success())) {
            break Some(format!("rank {rank} failed"));
        }
        if states.iter().all(Option::is_some) {
            break None;
        }
        if Instant::now() > end {
            break Some(format!(
                "the ranks were not done after {} s",
                PATIENCE.as_secs()
            ));
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    if let Some(failure) = failed {
        for rank in &mut ranks {
            // It may have ended by itself.
            let _ = rank.kill();
            let _ = rank.wait();
        }
        return Err(failure.into());
    }
    let outputs = ranks.into_iter().map(Child::wait_with_output);
    let text = outputs.map(|output| Ok(String::from_utf8_lossy(&output?.stdout).into_owned()));
    text.collect()
}
