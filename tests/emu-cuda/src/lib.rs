//! For tests only: the part of `libcuda.so.1` that cudarc's driver module and the NCCL backend
//! call, without a GPU.
//!
//! Built as a shared library and found by `LD_LIBRARY_PATH` in a test's child process, it lets the
//! unmodified backend run where there is no device. What it is for is order and ownership: what a
//! program forgets to wait for, frees too early or reads from the wrong side shows here.
//!
//! | file | what is in it |
//! |---|---|
//! | `memory.rs` | device memory: addresses that the host cannot read, checked at every use |
//! | `stream.rs` | streams: a thread each, jobs in order |
//! | `event.rs` | events: how far a stream has come |
//! | `context.rs` | contexts, the current one, legacy and per-thread default streams |
//! | `handles.rs`, `code.rs` | numbers that stand for objects; results |
//! | `api/` | the exported functions |
//!
//! # What it is true to
//!
//! * Work on a stream runs later, in order; streams are independent of each other unless an event
//!   joins them. The legacy default stream joins all streams but the non-blocking ones, and handle
//!   2 is a stream of the calling thread's own.
//! * Device addresses lie in a reservation that faults when the host touches it.
//! * Addresses are not reused. New memory holds `0xFB`, freed memory `0xFD`; a copy is checked when
//!   it runs, and one outside a live allocation is error 700 on its stream.
//!
//! # What it cannot show
//!
//! Speed; kernels; a device's memory model; CUDA graphs; errors that spoil a context; the timing of
//! copies to and from pageable memory, which here are staged at once and complete on return.
//!
//! Variables: `EMU_CUDA_DEVICES`, the number of devices (default 8); `EMU_CUDA_NO_POOLS`, so that
//! they have no pools of memory; `EMU_CUDA_COPY_DELAY_US`, how
//! long copies between device addresses take, so that what runs too early is seen to;
//! `EMU_CUDA_IGNORE_WAITS`, so that streams wait for no event: what a test finds wrong then, it
//! would find wrong in a program that forgets to wait.

mod api;
mod code;
mod context;
mod event;
mod handles;
mod memory;
mod stream;
