//! What can go wrong between a process and its store.

use std::time::Duration;

/// Result of a store operation.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// Why a store operation failed.
///
/// Every variant says which operation on which key met which end of the wire, so that the text
/// alone is enough to act on.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The keys, the queue element or the other members of a barrier did not arrive in time.
    ///
    /// The store stays usable.
    #[error("{op} timed out after {} ms waiting for {what}", .waited.as_millis())]
    Timeout {
        /// The operation, for example `get`.
        op: &'static str,
        /// What was waited for: the keys still missing where they are known, else all of them.
        what: String,
        /// How long the call waited.
        waited: Duration,
    },

    /// The peer of this connection went away or stopped answering; this handle is finished.
    #[error("{op} on the store at {peer} failed: {reason}")]
    Connection {
        /// The operation that met the failure.
        op: &'static str,
        /// The server's address.
        peer: String,
        /// What happened.
        reason: String,
    },

    /// No server could be reached before the deadline.
    #[error("could not reach a store at {target} within {} ms ({attempts} attempts; {last}); {hint}", .waited.as_millis())]
    Unreachable {
        /// The host and port as given.
        target: String,
        /// How long was tried.
        waited: Duration,
        /// How many connection attempts were made.
        attempts: u32,
        /// How the last attempts failed.
        last: String,
        /// What to look at next.
        hint: String,
    },

    /// The job token was refused, missing or not understood by the other side.
    #[error("the store at {peer} and this process do not share a job token: {reason}")]
    Token {
        /// The server's address.
        peer: String,
        /// What happened and what to set.
        reason: String,
    },

    /// `add` met a value that is not a decimal 64-bit integer, or the sum would not fit one.
    #[error("add to key {key:?} failed: {reason}")]
    NotAnInteger {
        /// The key.
        key: String,
        /// The offending value, shortened.
        reason: String,
    },

    /// A key, value or list is larger than the protocol allows; nothing was sent.
    #[error("{op}: {what} is {got}, the limit is {limit}")]
    TooLarge {
        /// The operation.
        op: &'static str,
        /// Which part is too large.
        what: &'static str,
        /// Its size.
        got: usize,
        /// The largest size allowed.
        limit: usize,
    },

    /// The server or the store kind cannot do this operation.
    #[error("{op} is not supported by {by}: {hint}")]
    Unsupported {
        /// The operation.
        op: &'static str,
        /// Which store.
        by: String,
        /// What to do instead.
        hint: String,
    },

    /// The ranks of a job did not find together; the text says who is missing or in whose way.
    #[error("{0}")]
    Rendezvous(String),

    /// An argument or a configuration variable cannot be used.
    #[error("{0}")]
    Invalid(String),

    /// The operating system refused something local: a file, a lock, a listening socket.
    #[error("{what}: {reason}")]
    Io {
        /// What was attempted, with the path or address.
        what: String,
        /// The system's reason.
        reason: String,
        /// Its kind, to tell a port in use from a permission problem.
        kind: std::io::ErrorKind,
    },
}

impl StoreError {
    /// Wraps an I/O error together with what was attempted.
    pub fn io(what: impl Into<String>, err: std::io::Error) -> Self {
        Self::Io {
            what: what.into(),
            reason: err.to_string(),
            kind: err.kind(),
        }
    }

    /// Whether the operation only ran out of time, so that it may be tried again on this handle.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Timeout { .. })
    }
}

/// Shows keys in an error without letting a hundred thousand of them through.
pub(crate) fn describe_keys<K: AsRef<str>>(keys: &[K]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<String> = keys
        .iter()
        .take(SHOWN)
        .map(|k| format!("{:?}", k.as_ref()))
        .collect();
    let noun = if keys.len() == 1 { "key" } else { "keys" };
    match keys.len() {
        n if n > SHOWN => format!("{noun} {} and {} more", shown.join(", "), n - SHOWN),
        _ => format!("{noun} {}", shown.join(", ")),
    }
}
