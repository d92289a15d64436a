//! A SLURM cluster of one node, for as long as a test takes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::shell::Cmd;
use crate::{Failure, cache};

/// How long the node may take until jobs can be given to it.
const LIMIT: Duration = Duration::from_secs(30);

/// The controller and the node's daemon; both end with this value.
pub(crate) struct Cluster {
    dir: PathBuf,
    daemons: Vec<Child>,
}

impl Cluster {
    /// Starts the cluster; `None` if SLURM is not installed.
    pub(crate) fn start() -> Result<Option<Self>, Failure> {
        let line = "command -v slurmctld && command -v slurmd && command -v srun";
        if !Cmd::new("sh").args(["-c", line]).succeeds() {
            return Ok(None);
        }
        let dir = cache::dir("interop")?.join(format!("slurm-{}", std::process::id()));
        for part in ["state", "spool"] {
            fs::create_dir_all(dir.join(part))?;
        }
        let host = Cmd::new("hostname").arg("-s").read()?;
        fs::write(dir.join("slurm.conf"), configuration(&dir, host.trim())?)?;
        let mut cluster = Self {
            dir,
            daemons: Vec::new(),
        };
        for daemon in ["slurmctld", "slurmd"] {
            let mut daemon = cluster.command(daemon);
            daemon.arg("-D").stdout(Stdio::null()).stderr(Stdio::null());
            cluster.daemons.push(daemon.spawn()?);
        }
        cluster.await_node()?;
        Ok(Some(cluster))
    }

    /// A program of SLURM's that speaks to this cluster.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env("SLURM_CONF", self.dir.join("slurm.conf"))
            .stdin(Stdio::null());
        command
    }

    fn await_node(&self) -> Result<(), Failure> {
        let end = Instant::now() + LIMIT;
        loop {
            let state = self.command("sinfo").args(["-h", "-o", "%t"]).output()?;
            let state = String::from_utf8_lossy(&state.stdout).trim().to_owned();
            if state == "idle" {
                return Ok(());
            }
            if Instant::now() >= end {
                let logs = self.dir.display();
                return Err(format!("the node is {state:?}, not idle; see {logs}").into());
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for daemon in self.daemons.iter_mut().rev() {
            // It may have ended by itself.
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Two processors whatever the machine has: ranks are asked for, not cores. No authentication:
/// it listens on loopback, and runs nothing that its user could not run.
fn configuration(dir: &Path, host: &str) -> Result<String, Failure> {
    let [controller, node] = [free_port()?, free_port()?];
    let dir = dir.display();
    let user = Cmd::new("id").arg("-un").read()?;
    let user = user.trim();
    Ok(format!(
        "ClusterName=phalanx
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
"
    ))
}

fn free_port() -> Result<u16, Failure> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0))?;
    Ok(listener.local_addr()?.port())
}
