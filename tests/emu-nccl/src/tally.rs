//! How often something was called, for tests to ask.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Group calls of the outermost level, with operations in them.
pub(crate) static GROUPS: AtomicUsize = AtomicUsize::new(0);
/// Calls of `ncclCommSplit`.
pub(crate) static SPLITS: AtomicUsize = AtomicUsize::new(0);

#[unsafe(no_mangle)]
extern "C" fn emu_nccl_groups() -> usize {
    GROUPS.load(Ordering::Relaxed)
}

#[unsafe(no_mangle)]
extern "C" fn emu_nccl_splits() -> usize {
    SPLITS.load(Ordering::Relaxed)
}
