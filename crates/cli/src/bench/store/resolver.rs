//! A world in which the name server falls silent, for one process at a time.

use std::fs;
use std::net::{Ipv4Addr, UdpSocket};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use std::thread::JoinHandle;
use std::time::Duration;

use crate::Failure;

/// An address of the loopback interface that nothing else is likely to use.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 83, 76, 53);

/// How soon the thread that answers notices that it is over.
const PATIENCE: Duration = Duration::from_millis(100);

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
    thread: Option<JoinHandle<()>>,
    /// Gives a user other than root the right to mount, in a name space of its own.
    user_namespace: bool,
}

/// What the thread that answers shares.
struct Desk {
    socket: UdpSocket,
    silent: AtomicBool,
    closed: AtomicBool,
    questions: AtomicUsize,
}

impl Resolver {
    /// Fails where the system does not permit the port, the name space or the mounts.
    pub(crate) fn new() -> Result<Self, Failure> {
        let socket = UdpSocket::bind((ADDRESS, 53))
            .map_err(|err| format!("cannot bind {ADDRESS}:53: {err}"))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let desk = Arc::new(Desk {
            socket,
            silent: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            questions: AtomicUsize::new(0),
        });
        let name = format!("phalanx-bench-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir(&directory)?;
        let mut resolver = Self {
            desk: Arc::clone(&desk),
            directory,
            thread: None,
            user_namespace: !rustix::process::geteuid().is_root(),
        };
        let file = |name| resolver.directory.join(name);
        // No options: the limits are glibc's own.
        fs::write(file("resolv.conf"), format!("nameserver {ADDRESS}\n"))?;
        fs::write(file("nsswitch.conf"), "hosts: files dns\n")?;
        resolver.rehearse()?;
        resolver.thread = Some(std::thread::spawn(move || desk.answer()));
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

    /// How many questions came since the last call.
    pub(crate) fn take_questions(&self) -> usize {
        self.desk.questions.swap(0, Relaxed)
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        self.desk.closed.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // Frees the port for the next of these; a panic has been reported already.
            let _ = thread.join();
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

impl Desk {
    fn answer(&self) {
        let mut packet = [0; 512];
        while !self.closed.load(Relaxed) {
            let Ok((len, from)) = self.socket.recv_from(&mut packet) else {
                continue;
            };
            self.questions.fetch_add(1, Relaxed);
            if !self.silent.load(Relaxed) && len >= 12 {
                // An answer to the same question: there is no such name.
                packet[2..4].copy_from_slice(&[0x81, 0x83]);
                let _ = self.socket.send_to(&packet[..len], from);
            }
        }
    }
}
