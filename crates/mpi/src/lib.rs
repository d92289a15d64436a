//! The MPI backend.
#![deny(unsafe_code)]

#[expect(unsafe_code, reason = "lends memory to messages")]
mod collective;
#[expect(unsafe_code, reason = "calls into the library")]
mod comm;
#[expect(unsafe_code, reason = "calls into the library")]
mod flight;
mod group;
#[expect(unsafe_code, reason = "lends memory to messages")]
mod hello;
#[expect(unsafe_code, reason = "calls into the library")]
mod library;
#[expect(unsafe_code, reason = "lends memory to messages")]
mod member;
#[expect(unsafe_code, reason = "lends memory to messages")]
mod messages;
#[expect(unsafe_code, reason = "calls into the library, and back")]
mod operators;

pub use group::MpiGroup;
