//! Numbers that stand for objects.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::code::{INVALID_HANDLE, Result};

/// Objects by the address that C holds. A handle that was destroyed is an error, never a crash.
pub(crate) struct Handles<T>(Mutex<BTreeMap<usize, Arc<T>>>);

impl<T> Handles<T> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    pub(crate) fn add(&self, object: Arc<T>) -> *mut c_void {
        let address = Arc::as_ptr(&object) as usize;
        self.0.lock().insert(address, object);
        address as *mut c_void
    }

    pub(crate) fn get(&self, handle: *mut c_void) -> Result<Arc<T>> {
        let found = self.0.lock().get(&(handle as usize)).cloned();
        found.ok_or(INVALID_HANDLE)
    }

    pub(crate) fn remove(&self, handle: *mut c_void) -> Result<Arc<T>> {
        let removed = self.0.lock().remove(&(handle as usize));
        removed.ok_or(INVALID_HANDLE)
    }
}
