//! What a process printed, in bounded memory.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use phalanx_store::Deadline;

/// How much of a process's output is kept: the end, because that is where the failure is.
const KEPT_BYTES: usize = 1 << 20;

/// Longest line that is treated as one.
const LINE_BYTES: u64 = 64 << 10;

/// Longest part of a panic message that travels in a marker.
const MESSAGE_CHARS: usize = 500;

const MARK: &str = "phalanx-testkit: ";

/// The line with which a rank says that it has reached the body.
///
/// It begins with a line end because libtest leaves `test name ... ` open.
pub(crate) fn begin_mark() -> String {
    format!("\n{MARK}begin\n")
}

/// The line with which a rank says how the body ended; short enough to be written in one piece.
pub(crate) fn end_mark(mark: &EndMark) -> String {
    let mut line = format!("\n{MARK}end {} ", mark.at.as_nanos());
    if let Some(message) = &mark.panic {
        let message: String = message.chars().take(MESSAGE_CHARS).collect();
        let _ = write!(line, "panic {}", message.escape_debug());
    } else {
        line.push_str("ok");
    }
    line.push('\n');
    line
}

/// How a body ended, as told by the rank itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EndMark {
    /// Time since the Unix epoch; of the panic, if there was one.
    pub(crate) at: Duration,
    pub(crate) panic: Option<String>,
}

/// The output of a process, standard output and standard error together, as it arrives.
///
/// Keeps the last MiB, and the last operation even if more than that follows it.
#[derive(Debug, Default)]
pub struct Log {
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    tail: VecDeque<u8>,
    dropped_bytes: u64,
    last_op: Option<String>,
    begun: bool,
    end: Option<EndMark>,
    closed: bool,
}

impl Log {
    /// The kept text. Says so if there was more.
    pub fn text(&self) -> String {
        self.inner.lock().text()
    }

    /// The last line that began with `op `, without that word.
    pub fn last_op(&self) -> Option<String> {
        self.inner.lock().last_op.clone()
    }

    /// Waits for a line that `pick` accepts, for example the address a server prints.
    ///
    /// `None` if the output ended or the limit passed first.
    pub fn wait_for_line<T>(
        &self,
        limit: Duration,
        mut pick: impl FnMut(&str) -> Option<T>,
    ) -> Option<T> {
        let deadline = Deadline::after(limit);
        let mut inner = self.inner.lock();
        loop {
            // `op` lines and others alike; an unfinished last line is never in the tail.
            if let Some(found) = inner.text().lines().find_map(&mut pick) {
                return Some(found);
            }
            if inner.closed {
                return None;
            }
            let timeout = self.changed.wait_until(&mut inner, deadline.instant());
            if timeout.timed_out() {
                return inner.text().lines().find_map(&mut pick);
            }
        }
    }

    /// Reads `source` to its end.
    pub(crate) fn fill_from(&self, source: impl Read) {
        let mut source = BufReader::new(source);
        let mut line = Vec::new();
        loop {
            line.clear();
            // An error ends a log as its end does: the process is gone or going.
            match (&mut source).take(LINE_BYTES).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => break,
                Ok(_) => self.push(&line),
            }
        }
        self.inner.lock().closed = true;
        self.changed.notify_all();
    }

    fn push(&self, line: &[u8]) {
        self.inner.lock().push(line);
        self.changed.notify_all();
    }

    /// Waits until all output has been read. False if something still holds it open.
    pub(crate) fn wait_closed(&self, limit: Duration) -> bool {
        let deadline = Deadline::after(limit);
        let mut inner = self.inner.lock();
        while !inner.closed {
            let timeout = self.changed.wait_until(&mut inner, deadline.instant());
            if timeout.timed_out() {
                break;
            }
        }
        inner.closed
    }

    pub(crate) fn begun(&self) -> bool {
        self.inner.lock().begun
    }

    pub(crate) fn end(&self) -> Option<EndMark> {
        self.inner.lock().end.clone()
    }
}

impl Inner {
    fn push(&mut self, line: &[u8]) {
        if let Ok(text) = std::str::from_utf8(line) {
            let text = text.trim_end_matches('\n');
            if let Some(mark) = text.strip_prefix(MARK) {
                return self.mark(mark);
            }
            if let Some(op) = text.strip_prefix("op ") {
                self.last_op = Some(op.to_owned());
            }
        }
        self.tail.extend(line);
        let excess = self.tail.len().saturating_sub(KEPT_BYTES);
        self.tail.drain(..excess);
        self.dropped_bytes += excess as u64;
    }

    fn mark(&mut self, mark: &str) {
        if mark == "begin" {
            self.begun = true;
            self.drop_preamble();
        } else if let Some(end) = mark.strip_prefix("end ") {
            self.end = parse_end(end);
            // The mark's own line end, unless it was needed to finish a line.
            let before = self.tail.len().checked_sub(2).map(|i| self.tail[i]);
            if before.is_none_or(|byte| byte == b'\n') {
                self.tail.pop_back();
            }
        }
    }

    /// Forgets what libtest prints before every test: it says nothing about this one.
    fn drop_preamble(&mut self) {
        let text = self.text();
        let said: Vec<&str> = text
            .lines()
            .filter(|line| {
                let libtest = line.starts_with("test ") && line.ends_with("... ");
                !(libtest || line.is_empty() || *line == "running 1 test")
            })
            .collect();
        self.tail.clear();
        for line in said {
            self.tail.extend(line.as_bytes());
            self.tail.push_back(b'\n');
        }
    }

    fn text(&self) -> String {
        let (front, back) = self.tail.as_slices();
        let text = String::from_utf8_lossy(&[front, back].concat()).into_owned();
        match self.dropped_bytes {
            0 => text,
            n => format!("[{n} bytes before this were dropped]\n{text}"),
        }
    }
}

fn parse_end(text: &str) -> Option<EndMark> {
    let (nanos, how) = text.split_once(' ')?;
    Some(EndMark {
        at: Duration::from_nanos(nanos.parse().ok()?),
        panic: how.strip_prefix("panic ").map(str::to_owned),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log_of(text: &str) -> Log {
        let log = Log::default();
        log.fill_from(text.as_bytes());
        log
    }

    #[test]
    fn keeps_the_end_and_the_last_operation_in_bounded_memory() {
        let mut text = "op allreduce seq=7\n".to_owned();
        for i in 0..40_000 {
            let _ = writeln!(text, "line {i} with some more text to fill the log up");
        }
        let log = log_of(&text);
        assert_eq!(log.last_op().as_deref(), Some("allreduce seq=7"));
        let kept = log.text();
        assert!(kept.len() < KEPT_BYTES + 100, "{} bytes", kept.len());
        assert!(kept.contains("bytes before this were dropped"));
        assert!(kept.contains("line 39999 "));
        assert!(!kept.contains("line 0 "));
    }

    #[test]
    fn marks_are_read_and_not_shown() {
        let mark = EndMark {
            at: Duration::from_nanos(1_700_000_000_000_000_001),
            panic: Some("left: 1\nright: 2".into()),
        };
        let text = format!(
            "\nrunning 1 test\ntest a::b ... {}said\nhalf a line{}",
            begin_mark(),
            end_mark(&mark)
        );
        assert_eq!(log_of(&text.replace("half a line", "")).text(), "said\n");
        let log = log_of(&text);
        assert!(log.begun());
        assert_eq!(log.text(), "said\nhalf a line\n");
        let end = log.end().unwrap();
        assert_eq!(end.at, mark.at);
        assert_eq!(end.panic.as_deref(), Some(r"left: 1\nright: 2"));
    }

    #[test]
    fn a_body_that_did_not_panic_has_no_message() {
        let mark = EndMark {
            at: Duration::from_secs(1),
            panic: None,
        };
        assert_eq!(log_of(&end_mark(&mark)).end(), Some(mark));
        assert_eq!(log_of("phalanx-testkit: end nonsense\n").end(), None);
    }

    #[test]
    fn a_line_is_waited_for_until_the_output_ends() {
        let log = log_of("hello\nlistening on 127.0.0.1:7\n");
        let port = log.wait_for_line(Duration::ZERO, |line| {
            line.strip_prefix("listening on ").map(str::to_owned)
        });
        assert_eq!(port.as_deref(), Some("127.0.0.1:7"));
        let none = log.wait_for_line(Duration::from_secs(60), |line| {
            line.strip_prefix("bye").map(str::to_owned)
        });
        assert_eq!(none, None);
    }
}
