//! Gloo's objects with Rust's rules: who owns them, and how long.

use std::ffi::{CStr, CString, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{NonNull, null};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gloo_sys as sys;
use phalanx_pg::reduce::fold;
use phalanx_pg::{DType, ReduceOp};

use crate::error::GlooError;

/// Result of a call into the library.
pub(crate) type Result<T> = std::result::Result<T, GlooError>;

/// A network interface with the thread that serves its connections.
#[derive(Debug)]
pub(crate) struct Device(NonNull<sys::Device>);

// SAFETY: gloo's device is a shared pointer to an object that locks for itself; the handle is only
// read after it was made, and freed once.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// At an address of this host, or on an interface by name.
    pub(crate) fn tcp(hostname: Option<&str>, iface: Option<&str>) -> Result<Self> {
        let text = |text: Option<&str>| text.map(CString::new).transpose();
        let (hostname, iface) = match (text(hostname), text(iface)) {
            (Ok(hostname), Ok(iface)) => (hostname, iface),
            _ => return Err(GlooError::new(sys::INVALID, "a name with a zero byte")),
        };
        let pointer = |text: &Option<CString>| text.as_ref().map_or(null(), |text| text.as_ptr());
        let mut error = sys::Error::none();
        // SAFETY: both are null or texts that end in a zero and outlive the call.
        let device =
            unsafe { sys::gs_device_tcp(pointer(&hostname), pointer(&iface), &raw mut error) };
        NonNull::new(device)
            .map(Self)
            .ok_or_else(|| GlooError::of(&error))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: made by gs_device_tcp and freed nowhere else. Contexts keep what they need of it.
        unsafe { sys::gs_device_free(self.0.as_ptr()) }
    }
}

/// Where ranks leave their addresses for each other.
pub(crate) trait Addresses {
    fn set(&self, key: &str, value: &[u8]) -> std::result::Result<(), String>;
    fn get(&self, key: &str) -> std::result::Result<Vec<u8>, String>;
    /// Until somebody has set it.
    fn wait(&self, key: &str) -> std::result::Result<(), String>;
}

/// Connections between all ranks of a group.
#[derive(Debug)]
pub(crate) struct Context {
    raw: NonNull<sys::Context>,
    rank: usize,
    size: usize,
    _device: Arc<Device>,
}

// SAFETY: gloo's context may be used by many threads, each with an operation of its own; what they
// share inside is locked there.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// One collective's number, which its messages carry, and when it must be over.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ticket {
    pub(crate) tag: u32,
    pub(crate) deadline: Instant,
}

impl Ticket {
    fn timeout_ms(&self) -> i64 {
        millis_until(self.deadline)
    }
}

/// Never zero, which gloo takes for no limit at all.
fn millis_until(deadline: Instant) -> i64 {
    let left = deadline.saturating_duration_since(Instant::now());
    i64::try_from(left.as_millis()).unwrap_or(i64::MAX).max(1)
}

fn number(rank: usize) -> c_int {
    c_int::try_from(rank).expect("a rank is smaller than a size that gloo took")
}

impl Context {
    /// Connects with everybody. A collective call.
    pub(crate) fn connect(
        device: &Arc<Device>,
        rank: usize,
        size: usize,
        addresses: &dyn Addresses,
        limit: Duration,
    ) -> Result<Self> {
        let (Ok(number), Ok(count)) = (c_int::try_from(rank), c_int::try_from(size)) else {
            let what = format!("{size} ranks are more than gloo can count");
            return Err(GlooError::new(sys::INVALID, &what));
        };
        // A pointer to a pointer: one to a trait object does not go through C.
        let user: *const &dyn Addresses = &raw const addresses;
        let store = sys::Store {
            user: user.cast_mut().cast(),
            set: callbacks::set,
            get: callbacks::get,
            wait: callbacks::wait,
        };
        let timeout_ms = i64::try_from(limit.as_millis()).unwrap_or(i64::MAX).max(1);
        let mut error = sys::Error::none();
        // SAFETY: the store and what it points to outlive the call, which is the only time gloo
        // calls back; the device is alive.
        let raw = unsafe {
            sys::gs_connect(
                number,
                count,
                &raw const store,
                device.0.as_ptr(),
                timeout_ms,
                &raw mut error,
            )
        };
        let raw = NonNull::new(raw).ok_or_else(|| GlooError::of(&error))?;
        Ok(Self {
            raw,
            rank,
            size,
            _device: Arc::clone(device),
        })
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Closes all connections; whoever waits on them gets an error. From any thread.
    pub(crate) fn abort(&self) {
        // SAFETY: the context is alive; gloo locks what this shares with running operations.
        unsafe { sys::gs_context_abort(self.raw.as_ptr()) }
    }

    /// Gloo's own all-reduce: a ring, whose order depends on the place in the vector.
    pub(crate) fn allreduce(
        &self,
        ticket: Ticket,
        bytes: &mut [u8],
        op: ReduceOp,
        dtype: DType,
    ) -> Result<()> {
        let (operator, elements) = (Operator { op, dtype }, bytes.len() / dtype.size());
        let reduction = operator.reduction();
        let timeout_ms = ticket.timeout_ms();
        // SAFETY: the memory is exclusively ours and as long as said; the operator outlives the
        // call, and nothing of gloo's touches either afterwards.
        check(|error| unsafe {
            sys::gs_allreduce(
                self.raw.as_ptr(),
                bytes.as_mut_ptr().cast(),
                elements,
                &raw const reduction,
                ticket.tag,
                timeout_ms,
                error,
            )
        })
    }

    /// Gloo's own reduce; ranks other than the root end with anything.
    pub(crate) fn reduce(
        &self,
        ticket: Ticket,
        bytes: &mut [u8],
        op: ReduceOp,
        dtype: DType,
        root: usize,
    ) -> Result<()> {
        let (operator, elements) = (Operator { op, dtype }, bytes.len() / dtype.size());
        let reduction = operator.reduction();
        let timeout_ms = ticket.timeout_ms();
        // SAFETY: as in `allreduce`.
        check(|error| unsafe {
            sys::gs_reduce(
                self.raw.as_ptr(),
                bytes.as_mut_ptr().cast(),
                elements,
                &raw const reduction,
                number(root),
                ticket.tag,
                timeout_ms,
                error,
            )
        })
    }

    /// Writes to `bytes` everywhere but on the root.
    pub(crate) fn broadcast(&self, ticket: Ticket, bytes: &mut [u8], root: usize) -> Result<()> {
        // SAFETY: the memory is exclusively ours and as long as said.
        unsafe { self.broadcast_raw(ticket, bytes.as_mut_ptr(), bytes.len(), root) }
    }

    /// The root's part of a broadcast.
    pub(crate) fn broadcast_from(&self, ticket: Ticket, bytes: &[u8]) -> Result<()> {
        // SAFETY: the memory is as long as said, and the root of a broadcast only reads.
        unsafe { self.broadcast_raw(ticket, bytes.as_ptr().cast_mut(), bytes.len(), self.rank) }
    }

    /// # Safety
    ///
    /// `len` bytes at `bytes` must be readable, and, on ranks other than the root, writable and
    /// nobody else's, until this returns.
    unsafe fn broadcast_raw(
        &self,
        ticket: Ticket,
        bytes: *mut u8,
        len: usize,
        root: usize,
    ) -> Result<()> {
        let timeout_ms = ticket.timeout_ms();
        // SAFETY: the caller's promise.
        check(|error| unsafe {
            sys::gs_broadcast(
                self.raw.as_ptr(),
                bytes.cast(),
                len,
                number(root),
                ticket.tag,
                timeout_ms,
                error,
            )
        })
    }

    pub(crate) fn allgather(&self, ticket: Ticket, input: &[u8], out: &mut [u8]) -> Result<()> {
        assert_eq!(out.len(), input.len() * self.size, "room for every part");
        let timeout_ms = ticket.timeout_ms();
        // SAFETY: both are as long as said, the output exclusively ours.
        check(|error| unsafe {
            sys::gs_allgather(
                self.raw.as_ptr(),
                input.as_ptr().cast(),
                input.len(),
                out.as_mut_ptr().cast(),
                ticket.tag,
                timeout_ms,
                error,
            )
        })
    }

    /// Pieces of any length, of which this rank's is in its place.
    pub(crate) fn allgather_pieces(
        &self,
        ticket: Ticket,
        bytes: &mut [u8],
        lens: &[usize],
    ) -> Result<()> {
        assert_eq!(lens.len(), self.size, "a length for every rank");
        assert_eq!(bytes.len(), lens.iter().sum::<usize>(), "room for all");
        let timeout_ms = ticket.timeout_ms();
        // SAFETY: the memory is exclusively ours and as long as the lengths, of which there is one
        // for each rank.
        check(|error| unsafe {
            sys::gs_allgatherv(
                self.raw.as_ptr(),
                bytes.as_mut_ptr().cast(),
                lens.as_ptr(),
                ticket.tag,
                timeout_ms,
                error,
            )
        })
    }

    /// `out` is empty but on the root.
    pub(crate) fn gather(
        &self,
        ticket: Ticket,
        input: &[u8],
        out: &mut [u8],
        root: usize,
    ) -> Result<()> {
        let room = if root == self.rank { self.size } else { 0 };
        assert_eq!(out.len(), input.len() * room, "room for every part");
        let timeout_ms = ticket.timeout_ms();
        // SAFETY: both are as long as said, the output exclusively ours.
        check(|error| unsafe {
            sys::gs_gather(
                self.raw.as_ptr(),
                input.as_ptr().cast(),
                input.len(),
                out.as_mut_ptr().cast(),
                number(root),
                ticket.tag,
                timeout_ms,
                error,
            )
        })
    }

    /// `input` is empty but on the root.
    pub(crate) fn scatter(
        &self,
        ticket: Ticket,
        input: &[u8],
        out: &mut [u8],
        root: usize,
    ) -> Result<()> {
        let parts = if root == self.rank { self.size } else { 0 };
        assert_eq!(input.len(), out.len() * parts, "a part for every rank");
        let timeout_ms = ticket.timeout_ms();
        // SAFETY: both are as long as said, the output exclusively ours.
        check(|error| unsafe {
            sys::gs_scatter(
                self.raw.as_ptr(),
                input.as_ptr().cast(),
                out.as_mut_ptr().cast(),
                out.len(),
                number(root),
                ticket.tag,
                timeout_ms,
                error,
            )
        })
    }

    /// Pieces of any length to and from everybody.
    pub(crate) fn alltoall(
        &self,
        ticket: Ticket,
        send: (&[u8], &[usize]),
        recv: (&mut [u8], &[usize]),
    ) -> Result<()> {
        let ((send, send_lens), (recv, recv_lens)) = (send, recv);
        for (len, lens) in [(send.len(), send_lens), (recv.len(), recv_lens)] {
            assert_eq!(lens.len(), self.size, "a length for every rank");
            assert_eq!(len, lens.iter().sum::<usize>(), "room for all");
        }
        let signed = |lens: &[usize]| lens.iter().map(|&len| len as i64).collect::<Vec<i64>>();
        let (send_lens, recv_lens) = (signed(send_lens), signed(recv_lens));
        let timeout_ms = ticket.timeout_ms();
        // SAFETY: both are as long as their lengths, of which there is one for each rank; what is
        // received into is exclusively ours.
        check(|error| unsafe {
            sys::gs_alltoallv(
                self.raw.as_ptr(),
                send.as_ptr().cast(),
                send_lens.as_ptr(),
                recv.as_mut_ptr().cast(),
                recv_lens.as_ptr(),
                ticket.tag,
                timeout_ms,
                error,
            )
        })
    }

    pub(crate) fn barrier(&self, ticket: Ticket) -> Result<()> {
        let timeout_ms = ticket.timeout_ms();
        // SAFETY: the context is alive.
        check(|error| unsafe { sys::gs_barrier(self.raw.as_ptr(), ticket.tag, timeout_ms, error) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by gs_connect and freed nowhere else; operations borrow the context, and
        // messages keep their own share of it.
        unsafe { sys::gs_context_free(self.raw.as_ptr()) }
    }
}

fn check(call: impl FnOnce(*mut sys::Error) -> i32) -> Result<()> {
    let mut error = sys::Error::none();
    match call(&raw mut error) {
        sys::OK => Ok(()),
        _ => Err(GlooError::of(&error)),
    }
}

/// What gloo calls to combine two pieces.
struct Operator {
    op: ReduceOp,
    dtype: DType,
}

impl Operator {
    fn reduction(&self) -> sys::Reduction {
        sys::Reduction {
            function: callbacks::combine,
            user: (&raw const *self).cast_mut().cast(),
            element_size: self.dtype.size(),
        }
    }

    /// # Safety
    ///
    /// `a` and `b` must have `len` readable bytes, and `out` as many writable ones; `out` may be
    /// one of them and must not overlap them otherwise.
    unsafe fn combine(&self, out: *mut u8, a: *const u8, b: *const u8, len: usize) {
        let other = match out.cast_const() {
            same if same == a => b,
            same if same == b => a,
            _ => {
                // SAFETY: the caller's promise: apart from each other, and long enough.
                unsafe { std::ptr::copy_nonoverlapping(a, out, len) };
                b
            }
        };
        // SAFETY: the caller's promise; the two do not overlap, for only `other` is not `out`.
        let (acc, part) = unsafe {
            (
                std::slice::from_raw_parts_mut(out, len),
                std::slice::from_raw_parts(other, len),
            )
        };
        fold(self.op, self.dtype, acc, part);
    }
}

/// One message on its way to or from a peer.
#[derive(Debug)]
pub(crate) struct Message {
    raw: NonNull<sys::Buffer>,
    _context: Arc<Context>,
}

// SAFETY: gloo's buffer locks for itself; one thread waits, others may abort.
unsafe impl Send for Message {}
// SAFETY: as above.
unsafe impl Sync for Message {}

impl Message {
    /// # Safety
    ///
    /// `len` bytes at `bytes` must be readable and writable and nobody else's until the message is
    /// dropped (readable and unchanged is enough for one that is sent).
    pub(crate) unsafe fn new(context: &Arc<Context>, bytes: *mut u8, len: usize) -> Result<Self> {
        let mut error = sys::Error::none();
        // SAFETY: the context is alive, and kept by the message; the memory is the caller's promise.
        let raw =
            unsafe { sys::gs_buffer_new(context.raw.as_ptr(), bytes.cast(), len, &raw mut error) };
        let raw = NonNull::new(raw).ok_or_else(|| GlooError::of(&error))?;
        Ok(Self {
            raw,
            _context: Arc::clone(context),
        })
    }

    pub(crate) fn send(&self, to: usize, slot: u64) -> Result<()> {
        // SAFETY: the buffer is alive.
        check(|error| unsafe { sys::gs_buffer_send(self.raw.as_ptr(), number(to), slot, error) })
    }

    pub(crate) fn recv(&self, from: &[usize], slot: u64) -> Result<()> {
        let from: Vec<c_int> = from.iter().map(|&rank| number(rank)).collect();
        // SAFETY: the buffer is alive and the list as long as said.
        check(|error| unsafe {
            sys::gs_buffer_recv(self.raw.as_ptr(), from.as_ptr(), from.len(), slot, error)
        })
    }

    /// Whether it has gone out; not if it was aborted.
    pub(crate) fn wait_sent(&self, deadline: Instant) -> Result<bool> {
        let mut done = 0;
        // SAFETY: the buffer is alive.
        check(|error| unsafe {
            let limit = millis_until(deadline);
            sys::gs_buffer_wait_send(self.raw.as_ptr(), limit, &raw mut done, error)
        })?;
        Ok(done != 0)
    }

    /// From whom it came; nobody if it was aborted.
    pub(crate) fn wait_received(&self, deadline: Instant) -> Result<Option<usize>> {
        let (mut from, mut done) = (-1, 0);
        // SAFETY: the buffer is alive.
        check(|error| unsafe {
            let (raw, limit) = (self.raw.as_ptr(), millis_until(deadline));
            sys::gs_buffer_wait_recv(raw, limit, &raw mut from, &raw mut done, error)
        })?;
        Ok(usize::try_from(from).ok().filter(|_| done != 0))
    }

    /// Wakes whoever waits for it. From any thread.
    pub(crate) fn abort(&self) {
        // SAFETY: the buffer is alive.
        unsafe { sys::gs_buffer_abort(self.raw.as_ptr()) }
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        // SAFETY: made by gs_buffer_new and freed nowhere else. Gloo has let go of the memory when
        // this returns.
        unsafe { sys::gs_buffer_free(self.raw.as_ptr()) }
    }
}

/// What gloo's text means, for the test that keeps the shim's reading of it true.
#[cfg(test)]
pub(crate) fn classify(text: &CStr) -> i32 {
    // SAFETY: the text ends in a zero.
    unsafe { sys::gs_classify(text.as_ptr()) }
}

/// The text of an error.
pub(crate) fn message_of(error: &sys::Error) -> String {
    // SAFETY: the shim ends every message in a zero, inside the array.
    let text = unsafe { CStr::from_ptr(error.message.as_ptr()) };
    text.to_string_lossy().into_owned()
}

/// What C calls. No panic leaves them.
mod callbacks {
    use super::*;
    use std::ffi::c_char;

    /// # Safety
    ///
    /// `user` must be the operator, the others as in [`Operator::combine`] with `len` elements.
    pub(super) unsafe extern "C" fn combine(
        user: *mut c_void,
        out: *mut c_void,
        a: *const c_void,
        b: *const c_void,
        len: usize,
    ) {
        // SAFETY: gloo hands back the pointer that it was given, which outlives the operation.
        let operator = unsafe { &*user.cast_const().cast::<Operator>() };
        let bytes = len * operator.dtype.size();
        // SAFETY: gloo's pieces of one vector, or scratch memory of its own.
        unsafe { operator.combine(out.cast(), a.cast(), b.cast(), bytes) }
    }

    /// # Safety
    ///
    /// `user` must point to the addresses, and `key` to `key_len` bytes.
    unsafe fn ask<T>(
        user: *mut c_void,
        key: *const c_char,
        key_len: usize,
        (sink, why): (sys::Sink, *mut c_void),
        question: impl FnOnce(&dyn Addresses, &str) -> std::result::Result<T, String>,
    ) -> Option<T> {
        // SAFETY: the caller's promise; set up by `Context::connect`, which is still running.
        let addresses = unsafe { *user.cast_const().cast::<&dyn Addresses>() };
        // SAFETY: the caller's promise.
        let key = unsafe { std::slice::from_raw_parts(key.cast::<u8>(), key_len) };
        let answer = catch_unwind(AssertUnwindSafe(|| {
            question(addresses, &String::from_utf8_lossy(key))
        }));
        let answer = answer.unwrap_or_else(|_| Err("the store panicked, see its message".into()));
        match answer {
            Ok(answer) => Some(answer),
            Err(reason) => {
                // SAFETY: the shim's own sink, which copies.
                unsafe { sink(why, reason.as_ptr(), reason.len()) };
                None
            }
        }
    }

    pub(super) unsafe extern "C" fn set(
        user: *mut c_void,
        key: *const c_char,
        key_len: usize,
        value: *const u8,
        value_len: usize,
        sink: sys::Sink,
        why: *mut c_void,
    ) -> i32 {
        let value = match value_len {
            0 => &[],
            // SAFETY: the shim's vector, alive until this returns.
            _ => unsafe { std::slice::from_raw_parts(value, value_len) },
        };
        // SAFETY: called by the shim with what `Context::connect` gave it.
        let set = unsafe { ask(user, key, key_len, (sink, why), |a, key| a.set(key, value)) };
        i32::from(set.is_none())
    }

    pub(super) unsafe extern "C" fn get(
        user: *mut c_void,
        key: *const c_char,
        key_len: usize,
        sink: sys::Sink,
        value: *mut c_void,
        why: *mut c_void,
    ) -> i32 {
        // SAFETY: as in `set`.
        match unsafe { ask(user, key, key_len, (sink, why), |a, key| a.get(key)) } {
            Some(bytes) => {
                // SAFETY: the shim's own sink, which copies.
                unsafe { sink(value, bytes.as_ptr(), bytes.len()) };
                0
            }
            None => 1,
        }
    }

    pub(super) unsafe extern "C" fn wait(
        user: *mut c_void,
        key: *const c_char,
        key_len: usize,
        sink: sys::Sink,
        why: *mut c_void,
    ) -> i32 {
        // SAFETY: as in `set`.
        let came = unsafe { ask(user, key, key_len, (sink, why), |a, key| a.wait(key)) };
        i32::from(came.is_none())
    }
}
