//! Faults on purpose: `EMU_NCCL_FAULT=rank:n:what`.
//!
//! It befalls the nth operation, from zero, of the process whose rank in the job (`RANK`) is
//! `rank`. What: `hang` never ends until the communicator is aborted; `async=CODE` is an
//! asynchronous error; `exit` ends the process; `block` keeps the calling thread inside the
//! library until the communicator is aborted.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    Hang,
    Async(i32),
    Exit,
    Block,
}

/// What befalls the operation that is being issued.
pub(crate) fn next() -> Option<Fault> {
    static PLAN: OnceLock<Option<(usize, Fault)>> = OnceLock::new();
    static ISSUED: AtomicUsize = AtomicUsize::new(0);
    let (at, fault) = (*PLAN.get_or_init(plan))?;
    (ISSUED.fetch_add(1, Ordering::Relaxed) == at).then_some(fault)
}

fn plan() -> Option<(usize, Fault)> {
    let text = std::env::var("EMU_NCCL_FAULT").ok()?;
    let plan = parse(&text);
    let (rank, at, fault) = plan.unwrap_or_else(|| panic!("EMU_NCCL_FAULT={text} is no fault"));
    let own = std::env::var("RANK")
        .ok()
        .and_then(|rank| rank.parse().ok());
    (own == Some(rank)).then_some((at, fault))
}

fn parse(text: &str) -> Option<(usize, usize, Fault)> {
    let mut words = text.splitn(3, ':');
    let (rank, at) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let fault = match words.next()? {
        "hang" => Fault::Hang,
        "exit" => Fault::Exit,
        "block" => Fault::Block,
        other => Fault::Async(other.strip_prefix("async=")?.parse().ok()?),
    };
    Some((rank, at, fault))
}
