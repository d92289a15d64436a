//! Point-to-point operations that are not finished yet.

use std::time::Instant;

use phalanx_pg::{Buffer, CallKind, Done, Error, ErrorKind, Part, Place, Result};

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
    part: Part,
}

impl Pending {
    /// This part of an operation; a receive if it has a buffer.
    pub(crate) fn new(
        part: Part,
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
            part,
        }
    }

    pub(crate) fn is_receive(&self) -> bool {
        self.kind == CallKind::Recv
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
        self.part.end(Ok(Done::default()));
    }

    /// The receive's message has come.
    pub(crate) fn received(mut self, letter: &Letter, place: &Place) {
        let result = self.fill(letter).map_err(|err| err.at(self.place(place)));
        self.part.end(result);
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
        let err = Error::because(cause).at(self.place(place));
        self.fail_as(err);
    }

    /// It ends with this error.
    pub(crate) fn fail_as(self, err: Error) {
        let err = err.at(self.place(&Place::default()));
        self.part.end(Err(err));
    }
}
