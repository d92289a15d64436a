//! The TCP store: PyTorch's protocol, client and server.

mod client;
mod connection;
mod server;
pub mod state;
pub mod wire;

pub use client::{TcpStore, TcpStoreOptions};
pub(crate) use connection::resolve;
pub use server::TcpStoreServer;
