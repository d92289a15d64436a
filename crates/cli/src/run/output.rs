//! What the ranks print: whole lines with the rank in front, log files, the last lines of each.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A line longer than this is shown in pieces.
const MAX_LINE: usize = 1 << 20;
/// Lines of stderr kept for the report of a failure: a panic's message comes before its backtrace.
const TAIL_LINES: usize = 40;
const TAIL_LINE_LEN: usize = 400;

/// Bytes in, whole lines out, each with a prefix. Never looks at the text.
#[derive(Debug)]
pub(super) struct Lines {
    prefix: Vec<u8>,
    partial: Vec<u8>,
}

impl Lines {
    pub(super) fn new(rank: usize) -> Self {
        Self {
            prefix: format!("[{rank}] ").into_bytes(),
            partial: Vec::new(),
        }
    }

    /// Appends to `out` the lines that `bytes` completes.
    pub(super) fn feed(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            if self.partial.len() + piece.len() > MAX_LINE {
                self.finish(out);
            }
            self.partial.extend_from_slice(piece);
            if piece.ends_with(b"\n") {
                self.finish(out);
            }
        }
    }

    /// Appends to `out` what is left, as a line.
    pub(super) fn finish(&mut self, out: &mut Vec<u8>) {
        if self.partial.is_empty() {
            return;
        }
        out.extend_from_slice(&self.prefix);
        out.append(&mut self.partial);
        if out.last() != Some(&b'\n') {
            out.push(b'\n');
        }
    }
}

/// The last lines that a rank wrote, each cut to a bearable length.
#[derive(Debug, Default)]
struct Tail {
    lines: VecDeque<Vec<u8>>,
    partial: Vec<u8>,
}

impl Tail {
    fn feed(&mut self, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            let text = piece.strip_suffix(b"\n").unwrap_or(piece);
            let room = TAIL_LINE_LEN.saturating_sub(self.partial.len());
            self.partial
                .extend_from_slice(&text[..text.len().min(room)]);
            if text.len() < piece.len() {
                self.lines.push_back(std::mem::take(&mut self.partial));
                if self.lines.len() > TAIL_LINES {
                    self.lines.pop_front();
                }
            }
        }
    }

    fn text(&self) -> Vec<String> {
        let partial = Some(&self.partial).filter(|partial| !partial.is_empty());
        let all = self.lines.iter().chain(partial);
        all.map(|line| String::from_utf8_lossy(line).trim_end().to_owned())
            .collect()
    }
}

/// Where one of the two streams of this process goes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Stream {
    Stdout,
    Stderr,
}

impl Stream {
    /// Writes whole lines. Both streams share a lock, as they often share a terminal or a pipe.
    fn write(self, lines: &[u8]) -> io::Result<()> {
        static TERMINAL: Mutex<()> = Mutex::new(());
        let _whole = TERMINAL.lock().unwrap_or_else(PoisonError::into_inner);
        match self {
            Self::Stdout => {
                let mut stdout = io::stdout().lock();
                stdout.write_all(lines)?;
                stdout.flush()
            }
            Self::Stderr => io::stderr().lock().write_all(lines),
        }
    }
}

/// Tells the person at the terminal something, never in the middle of a rank's line.
pub(super) fn say(what: impl std::fmt::Display) {
    // If nobody reads it, nobody can be told that either.
    let _ = Stream::Stderr.write(format!("phalanx: {what}\n").as_bytes());
}

/// Reads one output of a rank until its end, in a thread of its own.
#[derive(Debug)]
pub(super) struct Pump {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    tail: Tail,
    ended: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the bytes of a rank go.
#[derive(Debug)]
pub(super) struct Sink {
    pub(super) rank: usize,
    /// `None`: not shown.
    pub(super) show: Option<Stream>,
    pub(super) log: Option<File>,
}

impl Pump {
    pub(super) fn start(from: impl Read + Send + 'static, sink: Sink) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let end = Arc::clone(&shared);
        std::thread::Builder::new()
            .name(format!("output of {}", sink.rank))
            .spawn(move || {
                pump(from, sink, &end);
                end.lock().ended = true;
                end.ended.notify_all();
            })?;
        Ok(Self { shared })
    }

    /// Waits for the end of the output. Only a process that left its group can hold it open.
    pub(super) fn drain(&self, limit: Duration) {
        let end = Instant::now() + limit;
        let mut state = self.shared.lock();
        while !state.ended {
            let Some(left) = end.checked_duration_since(Instant::now()) else {
                return;
            };
            let waited = self.shared.ended.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(super) fn tail(&self) -> Vec<String> {
        self.shared.lock().tail.text()
    }
}

fn pump(mut from: impl Read, mut sink: Sink, shared: &Shared) {
    let mut lines = Lines::new(sink.rank);
    let mut buffer = vec![0; 1 << 16];
    let mut out = Vec::new();
    loop {
        let read = match from.read(&mut buffer) {
            Err(err) if err.kind() == io::ErrorKind::Interrupted => continue,
            Ok(0) | Err(_) => break,
            Ok(read) => &buffer[..read],
        };
        shared.lock().tail.feed(read);
        // A full disk or a reader that is gone must not stop the ranks: what they say is lost, and
        // that it is lost is said once.
        if let Some(log) = &mut sink.log
            && let Err(err) = log.write_all(read)
        {
            say(format_args!(
                "the log of rank {} ends here: {err}",
                sink.rank
            ));
            sink.log = None;
        }
        if let Some(stream) = sink.show {
            lines.feed(read, &mut out);
            if stream.write(&out).is_err() {
                sink.show = None;
            }
            out.clear();
        }
    }
    if let Some(stream) = sink.show {
        lines.finish(&mut out);
        // Nobody is left to tell.
        let _ = stream.write(&out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn lines_are_whole_however_the_bytes_come(
            lines in prop::collection::vec(prop::collection::vec(0u8..=255, 0..40), 0..20),
            cuts in prop::collection::vec(1usize..17, 1..50),
        ) {
            // Bytes of any kind but the one that ends a line.
            let lines: Vec<Vec<u8>> = lines
                .into_iter()
                .map(|line| line.into_iter().filter(|&b| b != b'\n').collect())
                .collect();
            let mut bytes: Vec<u8> = lines.join(&b'\n');
            if !lines.is_empty() && lines.last().is_some_and(|l| !l.is_empty()) {
                bytes.pop();
                bytes.push(b'x');
            }
            let (mut splitter, mut out) = (Lines::new(12), Vec::new());
            let mut rest = bytes.as_slice();
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                splitter.feed(now, &mut out);
                rest = later;
            }
            splitter.finish(&mut out);
            let expected: Vec<u8> = bytes
                .split_inclusive(|&b| b == b'\n')
                .flat_map(|line| {
                    let end: &[u8] = if line.ends_with(b"\n") { b"" } else { b"\n" };
                    [b"[12] ", line, end].concat()
                })
                .collect();
            prop_assert_eq!(out, expected);
        }
    }

    #[test]
    fn an_endless_line_does_not_take_endless_memory() {
        let (mut lines, mut out) = (Lines::new(0), Vec::new());
        for _ in 0..64 {
            lines.feed(&[b'x'; 1 << 16], &mut out);
            assert!(lines.partial.len() <= MAX_LINE);
        }
        lines.finish(&mut out);
        assert_eq!(out.iter().filter(|&&b| b == b'x').count(), 64 << 16);
    }

    #[test]
    fn the_tail_is_the_last_lines_and_what_follows_them() {
        let mut tail = Tail::default();
        for i in 0..1000 {
            tail.feed(format!("line {i}\n").as_bytes());
        }
        tail.feed(&[b'y'; 10_000]);
        tail.feed(b"\nand then");
        let text = tail.text();
        assert_eq!(text.len(), TAIL_LINES + 1);
        assert_eq!(text[0], "line 961");
        assert_eq!(text[TAIL_LINES - 1], "y".repeat(TAIL_LINE_LEN));
        assert_eq!(text[TAIL_LINES], "and then");
    }
}
