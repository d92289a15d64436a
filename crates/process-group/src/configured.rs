//! A group seen through call options.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::buffer::Buffer;
use crate::call::{Call, CallOptions};
use crate::dtype::{DType, Device};
use crate::error::Result;
use crate::group::{Capabilities, ProcessGroup};
use crate::work::RawWork;

/// A group whose calls use the options given to [`with`](crate::ProcessGroupExt::with).
///
/// May be used from many threads, as the group may; its options do not change.
#[derive(Debug)]
pub struct Configured<'a, G: ?Sized> {
    group: &'a G,
    options: CallOptions,
}

impl<'a, G: ProcessGroup + ?Sized> Configured<'a, G> {
    pub(crate) fn new(group: &'a G, options: CallOptions) -> Self {
        Self { group, options }
    }
}

impl<G: ProcessGroup + ?Sized> ProcessGroup for Configured<'_, G> {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn backend(&self) -> &str {
        self.group.backend()
    }

    fn name(&self) -> &str {
        self.group.name()
    }

    fn global_ranks(&self) -> &[usize] {
        self.group.global_ranks()
    }

    fn capabilities(&self) -> Capabilities {
        self.group.capabilities()
    }

    fn timeout(&self) -> Duration {
        self.options.timeout.unwrap_or_else(|| self.group.timeout())
    }

    fn device(&self) -> Device {
        self.group.device()
    }

    fn allocate(&self, device: Device, dtype: DType, len: usize) -> Result<Buffer> {
        self.group.allocate(device, dtype, len)
    }

    fn copy(&self, from: &Buffer, range: Range<usize>, to: &mut Buffer, at: usize) -> Result<()> {
        self.group.copy(from, range, to, at)
    }

    /// A call's own options go before those of `with`.
    fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        let options = CallOptions {
            mode: if options.mode == crate::Mode::Blocking {
                options.mode
            } else {
                self.options.mode
            },
            timeout: options.timeout.or(self.options.timeout),
        };
        self.group.submit(call, &options)
    }

    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
        self.group.split(ranks, name)
    }

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
    }

    fn shutdown(&self) -> Result<()> {
        self.group.shutdown()
    }

    fn sequence(&self) -> u64 {
        self.group.sequence()
    }

    fn p2p_sequence(&self) -> u64 {
        self.group.p2p_sequence()
    }
}
