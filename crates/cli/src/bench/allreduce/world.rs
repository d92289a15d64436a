//! The processes of one contestant, from their start to their end.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::window::{Answer, Task};
use crate::Failure;

/// Importing PyTorch from a cold disk takes long, in eight processes at once even more so.
const START_LIMIT: Duration = Duration::from_secs(240);
/// More than any window takes that is worth waiting for.
const WINDOW_LIMIT: Duration = Duration::from_secs(180);
/// How long to listen for other reasons when a rank could not start.
const REASONS_LIMIT: Duration = Duration::from_secs(1);
/// How long processes get to leave by themselves.
const LEAVE_LIMIT: Duration = Duration::from_secs(5);
/// A line of times has some ten bytes for each operation.
const LONGEST_LINE: usize = 1 << 20;

/// Where the ranks of a world report, a socket in the file system: it is the same for processes in
/// other network namespaces and for those that a launcher starts.
pub(crate) struct Desk {
    listener: UnixListener,
    path: PathBuf,
}

impl Desk {
    pub(crate) fn new() -> Result<Self, Failure> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Relaxed);
        let name = format!("phalanx-bench-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let listener = UnixListener::bind(&path)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, path })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Why ranks could not start, one of them for the `first` reason: it may only have lost another one,
    /// which says why. `missing` have not reported yet.
    fn all_reasons(&self, first: &Failure, mut missing: usize) -> Failure {
        let deadline = Instant::now() + REASONS_LIMIT;
        let mut reasons = vec![first.to_string()];
        while missing > 0 && Instant::now() < deadline {
            let Ok((socket, _)) = self.listener.accept() else {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            };
            missing -= 1;
            let hello = Line::new(socket).and_then(|mut line| line.hello(deadline));
            reasons.extend(hello.err().map(|reason| reason.to_string()));
        }
        reasons.sort();
        reasons.dedup();
        reasons.join("; and ").into()
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A running world, at rest unless a window runs.
pub(crate) struct World {
    /// What rank 0 calls itself.
    pub(crate) version: String,
    /// By rank.
    ranks: Vec<Line>,
    processes: Processes,
}

impl World {
    /// Starts the commands, which bring `ranks` ranks to the desk.
    pub(crate) fn start(
        desk: &Desk,
        commands: Vec<Command>,
        ranks: usize,
    ) -> Result<Self, Failure> {
        let mut processes = Processes(Vec::new());
        for mut command in commands {
            let spawned = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
            let program = command.get_program().to_string_lossy().into_owned();
            processes
                .0
                .push(spawned.map_err(|err| format!("starting {program}: {err}"))?);
        }
        let mut arrived = (0..ranks).map(|_| None).collect::<Vec<Option<Line>>>();
        let mut version = String::new();
        let deadline = Instant::now() + START_LIMIT;
        for missing in (0..ranks).rev() {
            let mut line = Line::new(processes.accept(&desk.listener, deadline)?)?;
            let hello = line.hello(deadline);
            let (rank, name) = hello.map_err(|first| desk.all_reasons(&first, missing))?;
            if rank == 0 {
                version = name;
            }
            let slot = arrived.get_mut(rank).filter(|slot| slot.is_none());
            *slot.ok_or_else(|| format!("rank {rank} is not expected"))? = Some(line);
        }
        let ranks = arrived.into_iter().flatten().collect();
        Ok(Self {
            version,
            ranks,
            processes,
        })
    }

    /// Has all ranks do the same and returns their answers, by rank.
    pub(crate) fn run(&mut self, task: &Task) -> Result<Vec<Answer>, Failure> {
        for line in &mut self.ranks {
            writeln!(line.socket.get_mut(), "{task}")?;
        }
        let deadline = Instant::now() + WINDOW_LIMIT;
        let answers = self.ranks.iter_mut().enumerate().map(|(rank, line)| {
            let answer = line.read(deadline).and_then(|line| line.parse());
            answer.map_err(|failure| format!("rank {rank}: {failure}").into())
        });
        answers.collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.ranks.clear();
        self.processes.leave();
    }
}

/// Killed when dropped.
struct Processes(Vec<Child>);

impl Processes {
    /// The next connection, unless a process ends before.
    fn accept(
        &mut self,
        listener: &UnixListener,
        deadline: Instant,
    ) -> Result<UnixStream, Failure> {
        loop {
            match listener.accept() {
                Ok((socket, _)) => return Ok(socket),
                Err(err) if err.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(err) => return Err(err.into()),
            }
            for process in &mut self.0 {
                if let Some(status) = process.try_wait()? {
                    return Err(format!("a process ended before it reported ({status})").into());
                }
            }
            if Instant::now() > deadline {
                return Err(format!("not all ranks reported within {START_LIMIT:?}").into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Lets them leave by themselves.
    fn leave(&mut self) {
        let deadline = Instant::now() + LEAVE_LIMIT;
        for process in &mut self.0 {
            while matches!(process.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for process in &mut self.0 {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// The line to one rank.
struct Line {
    socket: BufReader<UnixStream>,
}

impl Line {
    fn new(socket: UnixStream) -> Result<Self, Failure> {
        socket.set_nonblocking(false)?;
        Ok(Self {
            socket: BufReader::new(socket),
        })
    }

    /// The first line of a rank: who it is and what it calls itself.
    fn hello(&mut self, deadline: Instant) -> Result<(usize, String), Failure> {
        parse_hello(&self.read(deadline)?)
    }

    /// A line, or nothing if the rank has left.
    fn read(&mut self, deadline: Instant) -> Result<String, Failure> {
        let mut line = Vec::new();
        while !line.ends_with(b"\n") {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || line.len() > LONGEST_LINE {
                return Err("no answer within the time limit".into());
            }
            self.socket.get_ref().set_read_timeout(Some(left))?;
            let arrived = match self.socket.fill_buf() {
                Ok(arrived) => arrived,
                Err(err) if err.kind() == std::io::ErrorKind::WouldBlock => continue,
                Err(err) => return Err(err.into()),
            };
            if arrived.is_empty() {
                break;
            }
            let used = arrived
                .iter()
                .position(|&b| b == b'\n')
                .map_or(arrived.len(), |at| at + 1);
            line.extend_from_slice(&arrived[..used]);
            self.socket.consume(used);
        }
        Ok(String::from_utf8(line)?)
    }
}

/// `hello RANK NAME`.
fn parse_hello(line: &str) -> Result<(usize, String), Failure> {
    let line = line.trim_end();
    if let Some(text) = line.strip_prefix("fail ") {
        return Err(text.into());
    }
    let hello = line
        .strip_prefix("hello ")
        .and_then(|rest| rest.split_once(' '));
    let (rank, name) = hello.ok_or("a rank left before it reported")?;
    Ok((rank.parse()?, name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_ends_early_is_an_error_and_not_a_wait() {
        let desk = Desk::new().unwrap();
        let error = World::start(&desk, vec![Command::new("false")], 1)
            .err()
            .unwrap();
        assert!(error.to_string().contains("ended before"), "{error}");
    }

    #[test]
    fn all_ranks_that_cannot_start_say_why() {
        let desk = Desk::new().unwrap();
        let say = |what: &str| {
            let mut rank = UnixStream::connect(desk.path()).unwrap();
            writeln!(rank, "{what}").unwrap();
            rank
        };
        let _ranks = [
            "fail the store went away",
            "hello 2 somebody",
            "fail bad setting",
        ]
        .map(say);
        let error = World::start(&desk, Vec::new(), 3).err().unwrap();
        assert_eq!(error.to_string(), "bad setting; and the store went away");
    }

    #[test]
    fn what_ranks_say_is_what_comes_out() {
        let desk = Desk::new().unwrap();
        let mut rank = BufReader::new(UnixStream::connect(desk.path()).unwrap());
        let talk = std::thread::spawn(move || {
            let mut heard = String::new();
            for said in ["hello 0 somebody 1.0", "done 1 5 6", "fail no more"] {
                writeln!(rank.get_mut(), "{said}").unwrap();
                rank.read_line(&mut heard).unwrap();
            }
            heard
        });
        let mut world = World::start(&desk, Vec::new(), 1).unwrap();
        assert_eq!(world.version, "somebody 1.0");
        let task: Task = "run 4 f32 plain 2 3 0 1".parse().unwrap();
        let answers = world.run(&task).unwrap();
        assert_eq!(
            answers,
            [Answer {
                wrong: 1,
                nanos: vec![5, 6]
            }]
        );
        let error = world.run(&task).unwrap_err().to_string();
        assert_eq!(error, "rank 0: no more");
        drop(world);
        assert_eq!(talk.join().unwrap(), format!("{task}\n{task}\n"));
    }
}
