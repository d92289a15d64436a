//! The C interface of Gloo's shim, function by function as in `shim/shim.h`.
//!
//! Raw: no pointer is checked here. `phalanx-gloo` is what programs use.
//!
//! Gloo itself is the system's, in C++ and without a C interface. The shim is built against its
//! headers with whatever `GLOO_INCLUDE_DIR`, `GLOO_LIB_DIR`, `GLOO_LIB_NAME` (libraries separated
//! by commas) and `GLOO_CXX_STD` say, or with those in the usual places.
#![expect(missing_docs, reason = "each is documented in shim.h")]

use std::ffi::{c_char, c_int, c_void};

pub const OK: i32 = 0;
pub const TIMEOUT: i32 = 1;
pub const PEER_LOST: i32 = 2;
pub const IO: i32 = 3;
pub const INVALID: i32 = 4;
pub const ENFORCE: i32 = 5;
pub const STORE: i32 = 6;
pub const SYSTEM: i32 = 7;
pub const OTHER: i32 = 8;

#[repr(C)]
pub struct Device {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct Context {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct Buffer {
    _opaque: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Error {
    pub code: i32,
    pub message: [c_char; 1020],
}

impl Error {
    /// No error yet.
    pub const fn none() -> Self {
        Self {
            code: OK,
            message: [0; 1020],
        }
    }
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "gs_error({})", self.code)
    }
}

pub type Sink = unsafe extern "C" fn(sink: *mut c_void, bytes: *const u8, len: usize);

#[repr(C)]
#[derive(Debug)]
pub struct Store {
    pub user: *mut c_void,
    pub set: unsafe extern "C" fn(
        user: *mut c_void,
        key: *const c_char,
        key_len: usize,
        value: *const u8,
        value_len: usize,
        sink: Sink,
        why: *mut c_void,
    ) -> i32,
    pub get: unsafe extern "C" fn(
        user: *mut c_void,
        key: *const c_char,
        key_len: usize,
        sink: Sink,
        value: *mut c_void,
        why: *mut c_void,
    ) -> i32,
    pub wait: unsafe extern "C" fn(
        user: *mut c_void,
        key: *const c_char,
        key_len: usize,
        sink: Sink,
        why: *mut c_void,
    ) -> i32,
}

pub type ReduceFn = unsafe extern "C" fn(
    user: *mut c_void,
    out: *mut c_void,
    a: *const c_void,
    b: *const c_void,
    len: usize,
);

#[repr(C)]
#[derive(Debug)]
pub struct Reduction {
    pub function: ReduceFn,
    pub user: *mut c_void,
    pub element_size: usize,
}

unsafe extern "C" {
    pub fn gs_classify(message: *const c_char) -> i32;

    pub fn gs_device_tcp(
        hostname: *const c_char,
        iface: *const c_char,
        error: *mut Error,
    ) -> *mut Device;
    pub fn gs_device_free(device: *mut Device);

    pub fn gs_connect(
        rank: c_int,
        size: c_int,
        store: *const Store,
        device: *mut Device,
        timeout_ms: i64,
        error: *mut Error,
    ) -> *mut Context;
    pub fn gs_context_free(context: *mut Context);
    pub fn gs_context_abort(context: *mut Context);

    pub fn gs_allreduce(
        context: *mut Context,
        bytes: *mut c_void,
        elements: usize,
        reduction: *const Reduction,
        tag: u32,
        timeout_ms: i64,
        error: *mut Error,
    ) -> i32;
    pub fn gs_reduce(
        context: *mut Context,
        bytes: *mut c_void,
        elements: usize,
        reduction: *const Reduction,
        root: c_int,
        tag: u32,
        timeout_ms: i64,
        error: *mut Error,
    ) -> i32;
    pub fn gs_broadcast(
        context: *mut Context,
        bytes: *mut c_void,
        len: usize,
        root: c_int,
        tag: u32,
        timeout_ms: i64,
        error: *mut Error,
    ) -> i32;
    pub fn gs_allgather(
        context: *mut Context,
        input: *const c_void,
        len: usize,
        out: *mut c_void,
        tag: u32,
        timeout_ms: i64,
        error: *mut Error,
    ) -> i32;
    pub fn gs_allgatherv(
        context: *mut Context,
        out: *mut c_void,
        lens: *const usize,
        tag: u32,
        timeout_ms: i64,
        error: *mut Error,
    ) -> i32;
    pub fn gs_gather(
        context: *mut Context,
        input: *const c_void,
        len: usize,
        out: *mut c_void,
        root: c_int,
        tag: u32,
        timeout_ms: i64,
        error: *mut Error,
    ) -> i32;
    pub fn gs_scatter(
        context: *mut Context,
        input: *const c_void,
        out: *mut c_void,
        len: usize,
        root: c_int,
        tag: u32,
        timeout_ms: i64,
        error: *mut Error,
    ) -> i32;
    pub fn gs_alltoallv(
        context: *mut Context,
        input: *const c_void,
        in_lens: *const i64,
        out: *mut c_void,
        out_lens: *const i64,
        tag: u32,
        timeout_ms: i64,
        error: *mut Error,
    ) -> i32;
    pub fn gs_barrier(context: *mut Context, tag: u32, timeout_ms: i64, error: *mut Error) -> i32;

    pub fn gs_buffer_new(
        context: *mut Context,
        bytes: *mut c_void,
        len: usize,
        error: *mut Error,
    ) -> *mut Buffer;
    pub fn gs_buffer_free(buffer: *mut Buffer);
    pub fn gs_buffer_send(buffer: *mut Buffer, to: c_int, slot: u64, error: *mut Error) -> i32;
    pub fn gs_buffer_recv(
        buffer: *mut Buffer,
        from: *const c_int,
        from_len: usize,
        slot: u64,
        error: *mut Error,
    ) -> i32;
    pub fn gs_buffer_wait_send(
        buffer: *mut Buffer,
        timeout_ms: i64,
        done: *mut i32,
        error: *mut Error,
    ) -> i32;
    pub fn gs_buffer_wait_recv(
        buffer: *mut Buffer,
        timeout_ms: i64,
        from: *mut i32,
        done: *mut i32,
        error: *mut Error,
    ) -> i32;
    pub fn gs_buffer_abort(buffer: *mut Buffer);
}
