//! The exported functions.

/// Writes a result where the caller wants it; null is refused.
macro_rules! give {
    ($to:expr, $value:expr) => {{
        if $to.is_null() {
            return Err(crate::code::INVALID_VALUE);
        }
        // SAFETY: not null, and by the driver's contract room for a value of this type.
        unsafe { $to.write($value) }
    }};
}

mod device;
mod memory;
mod private;
mod stream;
