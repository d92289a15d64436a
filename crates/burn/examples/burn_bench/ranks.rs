//! Steps per second of ranks in processes of their own: ours and PyTorch's.

use std::error::Error;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use phalanx::store::TcpStoreServer;

/// Longer than any measurement takes.
const PATIENCE: Duration = Duration::from_secs(540);

/// Runs a program once per rank and returns what rank 0 printed, a number.
pub(crate) fn measure(ranks: usize, command: impl Fn() -> Command) -> Result<f64, Box<dyn Error>> {
    let server = TcpStoreServer::start(&["127.0.0.1:0".parse()?], None)?;
    let port = server.local_addr().port().to_string();
    let start = |rank: usize| {
        let (rank, ranks) = (rank.to_string(), ranks.to_string());
        let environment = [
            ("RANK", &*rank),
            ("LOCAL_RANK", &*rank),
            ("WORLD_SIZE", &*ranks),
            ("LOCAL_WORLD_SIZE", &*ranks),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &*port),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("OMP_NUM_THREADS", "1"),
            ("RAYON_NUM_THREADS", "1"),
        ];
        let mut command = command();
        command
            .envs(environment)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        command.spawn()
    };
    let mut children = Children((0..ranks).map(start).collect::<Result<_, _>>()?);
    let end = Instant::now() + PATIENCE;
    while !children.are_done()? {
        if Instant::now() > end {
            return Err(format!("the ranks were not done after {PATIENCE:?}").into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = children.0.swap_remove(0).wait_with_output()?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().parse()?)
}

/// None is left behind.
struct Children(Vec<Child>);

impl Children {
    /// Whether all have ended well.
    fn are_done(&mut self) -> Result<bool, Box<dyn Error>> {
        let mut done = true;
        for (rank, child) in self.0.iter_mut().enumerate() {
            match child.try_wait()? {
                None => done = false,
                Some(status) if status.success() => {}
                Some(status) => return Err(format!("rank {rank} failed: {status}").into()),
            }
        }
        Ok(done)
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
