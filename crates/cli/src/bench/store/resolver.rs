//! A world in which the name server falls silent, for one process at a time.

use std::fs;
use std::net::{Ipv4Addr, UdpSocket};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use crate::Failure;

/// An address of the loopback interface that nothing else is likely to use.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 83, 76, 53);

/// Mounts what `$1` holds over the system's files, then becomes the command after it.
const MOUNT_AND_EXEC: &str = r#"
set -e
mount --bind "$1/resolv.conf" /etc/resolv.conf
if [ -e /etc/nsswitch.conf ]; then mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf; fi
shift
exec "$@""#;

/// A name server that knows no name, and that can stop answering. Programs started through
/// [`confine`](Self::confine) know no other; the rest of the machine keeps its own.
pub(crate) struct Resolver {
    desk: Arc<Desk>,
    directory: PathBuf,
    /// Gives a user other than root the right to mount, in a name space of its own.
    user_namespace: bool,
}

/// What the thread that answers shares.
struct Desk {
    socket: UdpSocket,
    silent: AtomicBool,
    ignored: AtomicUsize,
}

impl Resolver {
    /// Fails where the system does not permit the port, the name space or the mounts.
    pub(crate) fn new() -> Result<Self, Failure> {
        let socket = UdpSocket::bind((ADDRESS, 53))
            .map_err(|err| format!("cannot bind {ADDRESS}:53: {err}"))?;
        let desk = Arc::new(Desk {
            socket,
            silent: AtomicBool::new(false),
            ignored: AtomicUsize::new(0),
        });
        let name = format!("phalanx-bench-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir(&directory)?;
        let resolver = Self {
            desk: Arc::clone(&desk),
            directory,
            user_namespace: !rustix::process::geteuid().is_root(),
        };
        let file = |name| resolver.directory.join(name);
        // No options: the limits are glibc's own.
        fs::write(file("resolv.conf"), format!("nameserver {ADDRESS}\n"))?;
        fs::write(file("nsswitch.conf"), "hosts: files dns\n")?;
        resolver.rehearse()?;
        std::thread::spawn(move || desk.answer());
        Ok(resolver)
    }

    fn rehearse(&self) -> Result<(), Failure> {
        let output = self
            .confine(&Command::new("true"))
            .stdin(Stdio::null())
            .output()
            .map_err(|err| format!("cannot run unshare: {err}"))?;
        if !output.status.success() {
            let reason = String::from_utf8_lossy(&output.stderr);
            return Err(format!("no private mounts here: {}", reason.trim()).into());
        }
        Ok(())
    }

    /// The same command, in a mount name space whose name server is this one.
    pub(crate) fn confine(&self, command: &Command) -> Command {
        let mut confined = Command::new("unshare");
        confined.arg("--mount");
        if self.user_namespace {
            confined.arg("--map-root-user");
        }
        confined.args(["sh", "-c", MOUNT_AND_EXEC, "sh"]);
        confined.arg(&self.directory);
        confined.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => confined.env(name, value),
                None => confined.env_remove(name),
            };
        }
        confined
    }

    /// From now on, answer or do not.
    pub(crate) fn set_silent(&self, silent: bool) {
        self.desk.silent.store(silent, Relaxed);
    }

    /// How many questions were not answered since the last call.
    pub(crate) fn take_ignored(&self) -> usize {
        self.desk.ignored.swap(0, Relaxed)
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

impl Desk {
    fn answer(&self) {
        let mut packet = [0; 512];
        while let Ok((len, from)) = self.socket.recv_from(&mut packet) {
            if self.silent.load(Relaxed) {
                self.ignored.fetch_add(1, Relaxed);
            } else if len >= 12 {
                // An answer to the same question: there is no such name.
                packet[2..4].copy_from_slice(&[0x81, 0x83]);
                let _ = self.socket.send_to(&packet[..len], from);
            }
        }
    }
}
