//! The Gloo backend: the system's libgloo behind the process group trait.
#![deny(unsafe_code)]

mod collective;
mod connect;
#[expect(unsafe_code, reason = "calls into the library")]
mod context;
mod error;
mod frame;
mod group;
mod links;
mod member;
#[expect(unsafe_code, reason = "lends memory to messages")]
mod messages;

pub use group::GlooGroup;
