//! The emulated driver.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

/// What a host function on a stream is.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// The functions of the emulated driver that are used here.
pub(crate) struct Driver {
    resolve: extern "C" fn(u64, usize) -> *mut u8,
    launch: unsafe extern "C" fn(*mut c_void, Option<HostFunction>, *mut c_void) -> c_int,
    device: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(crate) allocate: unsafe extern "C" fn(*mut u64, usize) -> c_int,
    pub(crate) free: extern "C" fn(u64) -> c_int,
    _library: Library,
}

/// The driver, if the process has the emulated one.
pub(crate) fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    DRIVER.get_or_init(Driver::load).as_ref()
}

impl Driver {
    fn load() -> Option<Self> {
        // SAFETY: the library is the emulated driver or NVIDIA's, which the process has loaded
        // already; symbols are used only if it is ours, and then with the types that it has.
        unsafe {
            let library = Library::new("libcuda.so.1").ok()?;
            let resolve = *library.get("emu_cuda_resolve").ok()?;
            let launch = *library.get("cuLaunchHostFunc").ok()?;
            let device = *library.get("cuCtxGetDevice").ok()?;
            let allocate = *library.get("cuMemAlloc_v2").ok()?;
            let free = *library.get("cuMemFree_v2").ok()?;
            Some(Self {
                resolve,
                launch,
                device,
                allocate,
                free,
                _library: library,
            })
        }
    }

    /// Ordinal of the current context's device.
    pub(crate) fn device(&self) -> Option<c_int> {
        let mut device = 0;
        // SAFETY: it points to an integer.
        let code = unsafe { (self.device)(&mut device) };
        (code == 0).then_some(device)
    }

    /// Puts a function on a stream.
    pub(crate) fn launch(
        &self,
        stream: usize,
        function: HostFunction,
        argument: *mut c_void,
    ) -> bool {
        // SAFETY: the function takes this argument; the driver calls it once.
        unsafe { (self.launch)(stream as *mut c_void, Some(function), argument) == 0 }
    }

    /// A copy of device memory; none if it is not there.
    pub(crate) fn read(&self, address: u64, len: usize) -> Option<Vec<u8>> {
        if len == 0 {
            return Some(Vec::new());
        }
        let bytes = (self.resolve)(address, len);
        // SAFETY: the driver has checked the range just now. Who writes to it meanwhile has not
        // waited, and gets what it deserves; bytes have no invalid values.
        (!bytes.is_null()).then(|| unsafe { std::slice::from_raw_parts(bytes, len) }.to_vec())
    }

    /// Writes to device memory; whether it is there.
    pub(crate) fn write(&self, address: u64, data: &[u8]) -> bool {
        if data.is_empty() {
            return true;
        }
        let bytes = (self.resolve)(address, data.len());
        if bytes.is_null() {
            return false;
        }
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), bytes, data.len()) };
        true
    }
}
