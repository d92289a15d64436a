//! What every wrapper passes on unchanged.

/// The methods of [`ProcessGroup`](crate::ProcessGroup) that only describe a group or allocate,
/// answered by the group in the given field: what a wrapper of your own need not write. A second
/// argument, a function, changes the capabilities.
///
/// ```
/// use std::sync::Arc;
/// use phalanx_pg::{Call, CallOptions, FakeGroup, ProcessGroup, ProcessGroupExt, RawWork, Result};
///
/// /// Says what is called.
/// #[derive(Debug)]
/// struct Loud {
///     inner: Arc<dyn ProcessGroup>,
/// }
///
/// impl ProcessGroup for Loud {
///     phalanx_pg::delegate_description!(inner);
///
///     fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
///         println!("{} #{}", call.kind(), self.sequence());
///         self.inner.submit(call, options)
///     }
///
///     fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
///         let group = self.inner.split(ranks, name)?;
///         Ok(group.map(|inner| Arc::new(Self { inner }) as Arc<dyn ProcessGroup>))
///     }
///
///     fn abort(&self, reason: &str) {
///         self.inner.abort(reason);
///     }
///
///     fn shutdown(&self) -> Result<()> {
///         self.inner.shutdown()
///     }
///
///     fn sequence(&self) -> u64 {
///         self.inner.sequence()
///     }
///
///     fn p2p_sequence(&self) -> u64 {
///         self.inner.p2p_sequence()
///     }
/// }
///
/// let group = Loud { inner: Arc::new(FakeGroup::new(1, 4)) };
/// assert_eq!((group.rank(), group.size()), (1, 4));
/// group.barrier()?;
/// # Ok::<(), phalanx_pg::Error>(())
/// ```
#[macro_export]
macro_rules! delegate_description {
    ($field:ident) => {
        $crate::delegate_description!($field, |known| known);
    };
    ($field:ident, $change:expr) => {
        fn rank(&self) -> usize {
            self.$field.rank()
        }

        fn size(&self) -> usize {
            self.$field.size()
        }

        fn backend(&self) -> &str {
            self.$field.backend()
        }

        fn name(&self) -> &str {
            self.$field.name()
        }

        fn global_ranks(&self) -> &[usize] {
            self.$field.global_ranks()
        }

        fn capabilities(&self) -> $crate::Capabilities {
            let change: fn($crate::Capabilities) -> $crate::Capabilities = $change;
            change(self.$field.capabilities())
        }

        fn timeout(&self) -> std::time::Duration {
            self.$field.timeout()
        }

        fn device(&self) -> $crate::Device {
            self.$field.device()
        }

        fn allocate(
            &self,
            device: $crate::Device,
            dtype: $crate::DType,
            len: usize,
        ) -> $crate::Result<$crate::Buffer> {
            self.$field.allocate(device, dtype, len)
        }

        fn copy(
            &self,
            from: &$crate::Buffer,
            range: std::ops::Range<usize>,
            to: &mut $crate::Buffer,
            at: usize,
        ) -> $crate::Result<()> {
            self.$field.copy(from, range, to, at)
        }
    };
}
