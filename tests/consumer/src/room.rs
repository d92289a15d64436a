//! One group's directory: letters between its ranks, and the notice that ends it.

use std::fs::{self, File};
use std::io::{self, ErrorKind as Io, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::sleep;
use std::time::{Duration, Instant};

use phalanx::pg::{Call, Done, Engine, Error, ErrorKind, Result, Turn};

use crate::collective;
use crate::host::{Host, failed};

/// How long a rank sleeps between two looks, at first and at most.
const NAP: Range<Duration> = Duration::from_micros(20)..Duration::from_millis(1);

/// One rank of one group.
#[derive(Debug)]
pub(crate) struct Room {
    /// The groups keep it. The lane's thread, which may outlive its group for a moment, does not.
    host: Weak<Host>,
    dir: PathBuf,
    rank: usize,
    /// The members' ranks in the world.
    members: Vec<usize>,
    /// The group broke here.
    stopped: AtomicBool,
    /// The own letter of the exchange before.
    previous: Mutex<Option<PathBuf>>,
}

/// What one rank has to say in one exchange. The part for rank `i` is `bytes[parts[i]]`, so what
/// goes to everybody is written once.
pub(crate) struct Letter<'a> {
    /// Of a premultiplied sum; each rank has its own.
    pub(crate) factor: f64,
    pub(crate) bytes: &'a [u8],
    pub(crate) parts: Vec<Range<usize>>,
}

/// What came from one rank.
pub(crate) struct Came {
    pub(crate) factor: f64,
    pub(crate) bytes: Vec<u8>,
}

impl Room {
    pub(crate) fn open(
        host: &Arc<Host>,
        dir: PathBuf,
        rank: usize,
        members: Vec<usize>,
    ) -> Result<Self> {
        fs::create_dir_all(&dir).map_err(|err| failed(&dir.display().to_string(), &err))?;
        let (host, (stopped, previous)) = (Arc::downgrade(host), Default::default());
        Ok(Self { host, dir, rank, members, stopped, previous })
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn members(&self) -> &[usize] {
        &self.members
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Says `letter` to all ranks and returns what each of them said, own words included.
    ///
    /// `part` tells the exchanges of one operation apart.
    pub(crate) fn exchange(
        &self,
        letter: &Letter<'_>,
        part: usize,
        turn: &Turn,
    ) -> Result<Vec<Came>> {
        let path = |rank: usize| self.dir.join(format!("{}.{part}.{rank}", turn.seq));
        let mine = path(self.rank);
        publish(&mine, letter).map_err(|err| failed(&mine.display().to_string(), &err))?;
        let came = (0..self.members.len()).map(|from| self.wait(&path(from), from, turn));
        let came = came.collect::<Result<_>>()?;
        // All others have written this exchange's letter, so they have read the one before.
        let mut previous = self.previous.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(read) = previous.replace(mine) {
            let _ = fs::remove_file(read);
        }
        Ok(came)
    }

    fn wait(&self, path: &Path, from: usize, turn: &Turn) -> Result<Came> {
        let mut nap = NAP.start;
        loop {
            // Asked before looking: what a rank wrote before it left, or before it found that
            // another had, counts.
            let over = self.over(from, turn);
            match File::open(path).and_then(|file| receive(&file, self.rank, self.members.len())) {
                Ok(came) => return Ok(came),
                Err(err) if err.kind() == Io::NotFound => {}
                Err(err) => return Err(failed("a letter", &err).from_peer(from)),
            }
            over?;
            sleep(nap);
            nap = NAP.end.min(nap * 2);
        }
    }

    /// Why a letter that is not there will not come.
    fn over(&self, from: usize, turn: &Turn) -> Result<()> {
        if self.stopped.load(Ordering::Acquire) {
            // The lane knows why.
            return Err(Error::new(ErrorKind::Aborted, "interrupted"));
        }
        if let Some(notice) = self.read_notice() {
            return Err(notice);
        }
        let host = self.host.upgrade();
        let (kind, what) = if host.is_some_and(|host| host.is_gone(self.members[from])) {
            (ErrorKind::PeerLost, "has ended")
        } else if Instant::now() >= turn.deadline {
            (ErrorKind::Timeout, "did not come in time")
        } else {
            return Ok(());
        };
        Err(Error::new(kind, format!("rank {from} {what}")).from_peer(from))
    }

    /// Why some rank has ended the group: kind, rank at fault, text.
    fn read_notice(&self) -> Option<Error> {
        let text = fs::read_to_string(self.dir.join("notice")).ok()?;
        let mut lines = text.splitn(3, '\n');
        let kind = match lines.next()? {
            "lost" => ErrorKind::PeerLost,
            "late" => ErrorKind::Timeout,
            _ => ErrorKind::Aborted,
        };
        let peer = lines.next()?.parse().ok()?;
        Some(Error::new(kind, lines.next()?).from_peer(peer))
    }

    fn write_notice(&self, cause: &Error) -> io::Result<()> {
        let (kind, peer) = match cause.kind() {
            ErrorKind::PeerLost => ("lost", cause.peer()),
            ErrorKind::Timeout => ("late", cause.peer()),
            _ => ("ended", None),
        };
        let (rank, peer) = (self.rank, peer.unwrap_or(self.rank));
        let text = format!("{kind}\n{peer}\nrank {rank} ended the group: {}", cause.message());
        let draft = self.dir.join(format!("notice.{rank}"));
        fs::write(&draft, text)?;
        // A link is refused if there is one: the first cause stays.
        let linked = fs::hard_link(&draft, self.dir.join("notice"));
        fs::remove_file(&draft).and(linked)
    }
}

impl Engine for Room {
    fn run(&self, call: Call, turn: &Turn) -> Result<Done> {
        collective::run(call, self, turn)
    }

    fn interrupt(&self, cause: &Error) {
        self.stopped.store(true, Ordering::Release);
        // Refused if somebody was first; whoever does not learn of it ends at its timeout.
        let _ = self.write_notice(cause);
    }
}

/// Writes factor, where each rank's part is, and the bytes; readers see all of it or nothing.
fn publish(path: &Path, letter: &Letter<'_>) -> io::Result<()> {
    let parts = letter.parts.iter().flat_map(|part| [part.start as u64, part.end as u64]);
    let head = [letter.factor.to_bits()].into_iter().chain(parts);
    let head: Vec<u8> = head.flat_map(u64::to_le_bytes).collect();
    let draft = path.with_added_extension("draft");
    let mut file = File::create(&draft)?;
    file.write_all(&head)?;
    file.write_all(letter.bytes)?;
    fs::rename(&draft, path)
}

/// Reads the part for `rank` of a letter to `size` ranks.
fn receive(file: &File, rank: usize, size: usize) -> io::Result<Came> {
    let number = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).map(|()| u64::from_le_bytes(bytes))
    };
    let factor = f64::from_bits(number(0)?);
    let entry = 8 + rank as u64 * 16;
    let (start, end) = (number(entry)?, number(entry + 8)?);
    let body = 8 + size as u64 * 16;
    let room = file.metadata()?.len().saturating_sub(body);
    if start > end || end > room {
        return Err(io::Error::new(Io::InvalidData, "parts beyond its end"));
    }
    let mut bytes = vec![0; (end - start) as usize];
    file.read_exact_at(&mut bytes, body + start)?;
    Ok(Came { factor, bytes })
}
