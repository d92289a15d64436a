//! Distributed data parallel training for Rust.
//!
//! ```
//! use phalanx::prelude::*;
//!
//! let group = phalanx::init()?; // the ranks that the launcher started; alone: a world of one
//! let mut values = [group.rank() as f32, 1.0];
//! group.allreduce_in_place(&mut values, ReduceOp::Sum)?;
//! assert_eq!(values[1], group.size() as f32);
//! group.shutdown()?;
//! # Ok::<(), phalanx::Error>(())
//! ```
//!
//! | feature | what it adds |
//! |---|---|
//! | `reference` (default) | the plain backend over TCP, by the name `reference` |
//!
//! Backends of your own are registered by [`pg::registry::register`] and found by name like the
//! built-in ones.
#![forbid(unsafe_code)]

mod backends;
mod init;

pub use phalanx_pg as pg;
pub use phalanx_store as store;

pub use backends::backends;
pub use init::{Init, env, init, init_with};
pub use pg::{Error, ErrorKind, Result};
pub use store::rendezvous::LauncherEnv;

/// What most programs need: `use phalanx::prelude::*`.
pub mod prelude {
    pub use phalanx_pg::{
        Buffer, CallOptions, DType, Device, Element, Frozen, ProcessGroup, ProcessGroupExt,
        ReduceOp, Work,
    };
    pub use phalanx_store::Store;
}
