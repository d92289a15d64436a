//! What `phalanx` is with its feature `candle`, without switching the feature on.
//!
//! Cargo gives all packages that are built together one set of features. A program of this workspace
//! that asked for the feature would make the launcher and every other program wait for candle to be
//! compiled. Its examples have this in the place of `phalanx` instead, under that name.
#![forbid(unsafe_code)]

pub use phalanx::*;
pub use phalanx_candle as candle;
