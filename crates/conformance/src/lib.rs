//! The suites that every store and every process group must pass.
#![forbid(unsafe_code)]
