//! Point-to-point operations that are not finished yet.

use std::time::Instant;

use phalanx_pg::{Buffer, Done, Error, ErrorKind, Part, Place, Result};

use crate::collective::check_len;
use crate::mailbox::Letter;

/// A send that has not gone out, or a receive that nothing has come for.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) peer: Option<usize>,
    pub(crate) tag: u32,
    pub(crate) deadline: Instant,
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
        Self {
            peer,
            tag,
            deadline,
            buf,
            part,
        }
    }

    pub(crate) fn is_receive(&self) -> bool {
        self.buf.is_some()
    }

    /// Where its error happened.
    pub(crate) fn place(&self) -> Place {
        self.part.place()
    }

    /// The error that it ends with at its deadline.
    pub(crate) fn late(&self) -> Error {
        let tag = self.tag;
        let what = match (self.is_receive(), self.peer) {
            (false, Some(peer)) => format!("rank {peer} did not take tag {tag} in time"),
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
    pub(crate) fn received(mut self, letter: &Letter) {
        let result = self.fill(letter);
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
    pub(crate) fn fail(self, cause: &Error) {
        self.fail_as(Error::because(cause));
    }

    /// It ends with this error.
    pub(crate) fn fail_as(self, err: Error) {
        self.part.end(Err(err));
    }
}
