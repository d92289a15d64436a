//! What every wrapper passes on unchanged.

/// The methods of [`ProcessGroup`](crate::ProcessGroup) that only describe a group or allocate,
/// answered by the group in the given field.
macro_rules! delegate_description {
    ($field:ident) => {
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
            self.$field.capabilities()
        }

        fn timeout(&self) -> std::time::Duration {
            self.$field.timeout()
        }

        fn allocate(
            &self,
            device: $crate::Device,
            dtype: $crate::DType,
            len: usize,
        ) -> $crate::Result<$crate::Buffer> {
            self.$field.allocate(device, dtype, len)
        }
    };
}

pub(crate) use delegate_description;
