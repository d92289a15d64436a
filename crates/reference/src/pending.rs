//! Point-to-point operations that are not finished yet.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use phalanx_pg::{Buffer, CallKind, Completer, Done, Error, ErrorKind, Place, Result};

use crate::collective::check_len;
use crate::mailbox::Letter;

/// A send that has not gone out, or a receive that nothing has come for.
#[derive(Debug)]
pub(crate) struct Pending {
    kind: CallKind,
    pub(crate) peer: Option<usize>,
    pub(crate) tag: u32,
    pub(crate) deadline: Instant,
    since: Instant,
    /// A receive's memory.
    buf: Option<Buffer>,
    /// Which result of which operation it is.
    tally: Arc<Tally>,
    index: usize,
}

impl Pending {
    /// Call number `index` of the operation `tally`; a receive if it has a buffer.
    pub(crate) fn new(
        tally: &Arc<Tally>,
        index: usize,
        peer: Option<usize>,
        tag: u32,
        buf: Option<Buffer>,
        deadline: Instant,
    ) -> Self {
        let since = Instant::now();
        let kind = match buf {
            Some(_) => CallKind::Recv,
            None => CallKind::Send,
        };
        Self {
            kind,
            peer,
            tag,
            deadline,
            since,
            buf,
            tally: Arc::clone(tally),
            index,
        }
    }

    /// Where its error happened: `place` says whose it is.
    pub(crate) fn place(&self, place: &Place) -> Place {
        let mut place = place.clone();
        place.call = Some(self.kind);
        place.peer = self.peer;
        place.elapsed = Some(self.since.elapsed());
        place
    }

    /// The error that it ends with at its deadline.
    pub(crate) fn late(&self) -> Error {
        let tag = self.tag;
        let what = match (self.kind, self.peer) {
            (CallKind::Send, Some(peer)) => format!("rank {peer} did not take tag {tag} in time"),
            (_, Some(peer)) => format!("rank {peer} sent nothing with tag {tag} in time"),
            (_, None) => format!("no rank sent anything with tag {tag} in time"),
        };
        Error::new(ErrorKind::Timeout, what)
    }

    /// The send has gone out.
    pub(crate) fn sent(self) {
        self.tally.end(self.index, Ok(Done::default()));
    }

    /// The receive's message has come.
    pub(crate) fn received(mut self, letter: &Letter, place: &Place) {
        let result = self.fill(letter).map_err(|err| err.at(self.place(place)));
        self.tally.end(self.index, result);
    }

    fn fill(&mut self, letter: &Letter) -> Result<Done> {
        let mut buf = self.buf.take().expect("a receive has a buffer");
        check_len(letter.from, letter.data.len(), buf.byte_len())?;
        buf.as_bytes_mut()?.copy_from_slice(&letter.data);
        Ok(Done {
            source: Some(letter.from),
            ..buf.into()
        })
    }

    /// It will not come to an end because of `cause`.
    pub(crate) fn fail(self, cause: &Error, place: &Place) {
        let err = because(cause, self.place(place));
        self.fail_as(err);
    }

    /// It ends with this error.
    pub(crate) fn fail_as(self, err: Error) {
        let err = err.at(self.place(&Place::default()));
        self.tally.end(self.index, Err(err));
    }
}

/// How an operation at `place` fails when `cause` ends the group.
///
/// A lost peer and an abort are every operation's own error. The failure of some other operation
/// is quoted instead.
pub(crate) fn because(cause: &Error, place: Place) -> Error {
    match cause.place().call {
        None => cause.clone().at(place),
        Some(_) => Error::broken_by(cause).at(place),
    }
}

/// Gathers the results of the calls of one operation.
#[derive(Debug)]
pub(crate) struct Tally {
    open: Mutex<Option<Open>>,
}

#[derive(Debug)]
struct Open {
    completer: Completer,
    parts: Vec<Option<Done>>,
    left: usize,
    /// A batch: its result has parts.
    batch: bool,
}

impl Tally {
    /// For a batch of `calls`, or for a single call.
    pub(crate) fn new(completer: Completer, calls: usize, batch: bool) -> Arc<Self> {
        completer.start();
        let open = Open {
            completer,
            parts: (0..calls).map(|_| None).collect(),
            left: calls,
            batch,
        };
        Arc::new(Self {
            open: Mutex::new(Some(open)),
        })
    }

    /// Call number `index` ended. The first failure, or the last success, ends the operation.
    fn end(&self, index: usize, result: Result<Done>) {
        let mut slot = self.open.lock();
        let Some(open) = slot.as_mut() else { return };
        let result = match result {
            Err(err) => Err(err),
            Ok(done) => {
                open.parts[index] = Some(done);
                open.left -= 1;
                if open.left > 0 {
                    return;
                }
                let mut parts = std::mem::take(&mut open.parts).into_iter().flatten();
                Ok(match open.batch {
                    true => Done {
                        parts: parts.collect(),
                        ..Done::default()
                    },
                    false => parts.next().unwrap_or_default(),
                })
            }
        };
        let open = slot.take();
        // Wakes somebody, who must not find the lock taken.
        drop(slot);
        if let Some(open) = open {
            open.completer.complete(result);
        }
    }
}
