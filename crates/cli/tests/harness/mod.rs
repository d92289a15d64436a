//! A `phalanx store` process, and clients that behave in ways ours do not.
#![allow(
    dead_code,
    reason = "every test file includes this and uses a part of it"
)]

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx_store::token::TOKEN_VAR;
use phalanx_store::{JobToken, TcpStore, TcpStoreOptions};
use rustix::process::{Pid, Signal, kill_process};

/// Bounds every wait of the tests; nothing that works comes near it.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(60);

/// The first bytes of every client.
pub(crate) const VALIDATE: [u8; 5] = [0, 0xce, 0xf7, 0x85, 0x3c];

/// A server in a process of its own, killed when dropped.
pub(crate) struct Server {
    child: Child,
    stdout: BufReader<ChildStdout>,
    log: Arc<Mutex<String>>,
    pub(crate) addr: SocketAddr,
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::launch(None)
    }

    pub(crate) fn start_with_token(token: &str) -> Self {
        Self::launch(Some(token))
    }

    fn launch(token: Option<&str>) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
        command
            .args(["store", "--bind", "127.0.0.1:0"])
            .env_remove(TOKEN_VAR)
            .env("PHALANX_LOG", "info")
            .envs(token.map(|token| (TOKEN_VAR, token)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program was built");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let addr = line
            .trim_end()
            .strip_prefix("listening on ")
            .unwrap_or_else(|| panic!("the first line is {line:?}"));
        let addr = addr.parse().expect("an address");
        let log = Arc::new(Mutex::new(String::new()));
        let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
        std::thread::spawn({
            let log = Arc::clone(&log);
            move || {
                let mut line = String::new();
                while stderr.read_line(&mut line).is_ok_and(|n| n > 0) {
                    log.lock().unwrap().push_str(&line);
                    line.clear();
                }
            }
        });
        Self {
            child,
            stdout,
            log,
            addr,
        }
    }

    /// What it wrote to its log so far.
    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }

    /// Stops it, all of its threads: the signal alone may take a while to reach them.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
        let tasks = format!("/proc/{}/task", self.child.id());
        eventually("the server is stopped", || {
            let stats = std::fs::read_dir(&tasks).unwrap().map(|task| {
                let stat = task.unwrap().path().join("stat");
                std::fs::read_to_string(stat).unwrap_or_default()
            });
            stats.into_iter().all(|stat| stat.contains(") T "))
        });
    }

    /// Waits for its end: the exit code, and what it printed after the first line.
    pub(crate) fn end(&mut self) -> (Option<i32>, String) {
        let start = Instant::now();
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None => assert!(start.elapsed() < WATCHDOG, "it does not end"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
        (status.code(), rest)
    }

    /// Memory in use, in KiB.
    pub(crate) fn rss_kib(&self) -> usize {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).expect("the server runs");
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let number = line.and_then(|line| line.split_whitespace().nth(1));
        number.expect("a number of KiB").parse().unwrap()
    }

    /// Number of open descriptors.
    pub(crate) fn descriptors(&self) -> usize {
        let path = format!("/proc/{}/fd", self.child.id());
        std::fs::read_dir(path).expect("the server runs").count()
    }

    pub(crate) fn options(&self) -> TcpStoreOptions {
        TcpStoreOptions {
            timeout: WATCHDOG,
            ..TcpStoreOptions::new("127.0.0.1", self.addr.port())
        }
    }

    pub(crate) fn options_with_token(&self, token: &str) -> TcpStoreOptions {
        TcpStoreOptions {
            token: Some(JobToken::new(token).unwrap()),
            ..self.options()
        }
    }

    pub(crate) fn store(&self) -> TcpStore {
        TcpStore::connect(&self.options()).unwrap()
    }

    /// A connection that has sent nothing.
    pub(crate) fn dial(&self) -> Raw {
        let stream = TcpStream::connect(self.addr).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        Raw(stream)
    }

    /// A connection that has introduced itself.
    pub(crate) fn greet(&self) -> Raw {
        let mut raw = self.dial();
        raw.send(&VALIDATE);
        raw
    }

    /// A new client comes and is answered.
    pub(crate) fn assert_serves(&self) {
        self.greet().assert_answered();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A socket, for bytes that a decent client would not send.
pub(crate) struct Raw(pub(crate) TcpStream);

impl Raw {
    #[track_caller]
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    #[track_caller]
    pub(crate) fn read<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Sends a PING and gets it back.
    #[track_caller]
    pub(crate) fn assert_answered(&mut self) {
        self.send(&[13, 1, 2, 3, 4]);
        assert_eq!(self.read(), [1, 2, 3, 4]);
    }

    /// The server has closed or will soon, and sends nothing.
    #[track_caller]
    pub(crate) fn assert_refused(&mut self, what: &str) {
        let mut rest = Vec::new();
        match self.0.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(err) if err.kind() == ErrorKind::ConnectionReset => {}
            Err(err) => panic!("{what}: the connection is not closed: {err}"),
        }
        assert!(rest.is_empty(), "{what} was answered: {rest:02x?}");
    }
}

/// A length or a count as it is sent.
pub(crate) fn number(n: usize) -> Vec<u8> {
    (n as u64).to_le_bytes().to_vec()
}

/// A byte string as it is sent.
pub(crate) fn string(bytes: &[u8]) -> Vec<u8> {
    [number(bytes.len()), bytes.to_vec()].concat()
}

/// Waits until `condition` holds.
#[track_caller]
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < WATCHDOG, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
