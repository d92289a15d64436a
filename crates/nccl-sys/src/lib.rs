//! NCCL's C interface, loaded at run time.
//!
//! Nothing of CUDA is needed to build this crate. [`Nccl::get`] opens `libnccl.so.2` when it is
//! first asked for; a machine without it gets an error value and no panic. One binary serves NCCL
//! 2.18 to 2.32: functions that came later are `Option`s.
//!
//! ```
//! use nccl_sys::Nccl;
//!
//! match Nccl::get() {
//!     Ok(nccl) => println!("NCCL {} from {}", nccl.version, nccl.path.display()),
//!     Err(err) => println!("{err}"), // says where it was looked for
//! }
//! ```
//!
//! | file | what is in it |
//! |---|---|
//! | `types.rs` | handles, codes and structures, laid out as in `nccl.h` |
//! | `table.rs` | the functions |
//! | `load.rs` | finding the library |
//! | `error.rs` | a result code with the library's own words |
//!
//! Names are NCCL's, so that its documentation is this crate's. Two rules differ from what a
//! generated binding would do:
//!
//! * C enumerations are integers here, never Rust enums. The library returns values that no header
//!   lists: handles of premultiplied sums, result codes of newer versions.
//! * The library is never unloaded: NCCL's threads outlive any handle on it.
//!
//! Not bound: device-side communication, one-sided puts and signals, per-call configurations
//! (`ncclAllReduceConfig` and the like), `ncclParam*`. Linux only.
#![allow(
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    reason = "the names are NCCL's"
)]

mod error;
mod load;
mod table;
mod types;

pub use error::NcclError;
pub use load::{LIBRARY_VAR, LoadError, OLDEST};
pub use table::{Nccl, SIGNATURES, Signature};
pub use types::*;
