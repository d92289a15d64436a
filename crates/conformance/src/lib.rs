//! What every implementation of a Phalanx trait has to do, as code that runs against any of them.
//!
//! | module | for |
//! |---|---|
//! | [`store`] | whoever writes a [`Store`](phalanx_store::Store): the cases, one by one or all, and a form for several processes |
#![forbid(unsafe_code)]

pub mod store;
