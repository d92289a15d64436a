//! How the processes of a job find each other: a small key-value store and the rendezvous on it.
//!
//! | store | for |
//! |---|---|
//! | [`FileStore`] | processes that share a file system; the file is PyTorch's |
//! | [`HashStore`] | the threads of one process |
//! | [`TcpStore`] | processes on any hosts, through a [`TcpStoreServer`] or a PyTorch one |
//! | [`PrefixStore`] | a name space inside another store |
//!
//! Programs do not choose: [`rendezvous::from_env`] takes the one that the launcher calls for.
#![forbid(unsafe_code)]

mod deadline;
mod error;
mod file;
mod hash;
mod prefix;
pub mod rendezvous;
mod store;
pub mod table;
pub mod tcp;
pub mod token;

pub use deadline::Deadline;
pub use error::{Result, StoreError};
pub use file::FileStore;
pub use hash::HashStore;
pub use prefix::PrefixStore;
pub use store::{DEFAULT_TIMEOUT, Store};
pub use tcp::{TcpStore, TcpStoreOptions, TcpStoreServer};
pub use token::JobToken;
