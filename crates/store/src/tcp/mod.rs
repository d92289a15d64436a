//! The TCP store: PyTorch's protocol, client and server.

mod client;
mod connection;
mod cursor;
mod event_loop;
mod reply;
mod server;
mod session;
pub mod state;
pub mod wire;

pub use client::{TcpStore, TcpStoreOptions};
pub(crate) use connection::resolve;
pub use server::TcpStoreServer;
