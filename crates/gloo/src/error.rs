//! What the library says went wrong.

use gloo_sys as sys;
use phalanx_pg::{Error, ErrorKind};

use crate::context::message_of;

/// An error of the library, with what the shim takes it for.
#[derive(Debug, Clone)]
pub(crate) struct GlooError {
    code: i32,
    text: String,
}

impl GlooError {
    pub(crate) fn new(code: i32, text: &str) -> Self {
        Self {
            code,
            text: text.to_owned(),
        }
    }

    pub(crate) fn of(error: &sys::Error) -> Self {
        Self::new(error.code, &message_of(error))
    }

    pub(crate) fn kind(&self) -> ErrorKind {
        match self.code {
            sys::TIMEOUT => ErrorKind::Timeout,
            sys::PEER_LOST => ErrorKind::PeerLost,
            sys::STORE => ErrorKind::Store,
            _ => ErrorKind::Backend,
        }
    }

    /// The error to show, for want of a better reason.
    pub(crate) fn into_error(self) -> Error {
        let text = self.text.trim();
        let text = match self.kind() {
            ErrorKind::Timeout => format!("out of time (gloo: {text})"),
            ErrorKind::PeerLost => format!("a rank is gone (gloo: {text})"),
            // Our own words.
            ErrorKind::Store => text.to_owned(),
            _ => format!("gloo: {text}"),
        };
        Error::new(self.kind(), text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::classify;

    #[test]
    fn timeouts_and_lost_peers_are_told_apart_by_glooss_words() {
        let words = [
            (
                c"[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 300ms for recv operation to complete",
                sys::TIMEOUT,
            ),
            // Of another operation.
            (c"Application timeout caused pair closure", sys::IO),
            (
                c"[../gloo/transport/tcp/pair.cc:589] Read error [127.0.0.1]:4711: Connection reset by peer",
                sys::PEER_LOST,
            ),
            (
                c"[../gloo/transport/tcp/pair.cc:598] Connection closed by peer [127.0.0.1]:4711",
                sys::PEER_LOST,
            ),
            (c"writev [127.0.0.1]:4711: Broken pipe", sys::PEER_LOST),
            (c"bind: Address already in use", sys::IO),
        ];
        for (text, code) in words {
            assert_eq!(classify(text), code, "{text:?}");
        }
    }
}
