//! Private memory for elements of any type.

/// Zeroed memory, aligned for every element type.
#[derive(Debug)]
pub(crate) struct Room(Vec<u64>);

impl Room {
    /// Of at least so many bytes.
    pub(crate) fn new(bytes: usize) -> Self {
        Self(vec![0; bytes.div_ceil(8)])
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}
