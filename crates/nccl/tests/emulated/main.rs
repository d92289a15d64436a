//! The backend on the emulated device: real processes, no GPU.
//!
//! What these show is the backend's own order, ownership and handling of faults, against our
//! reading of CUDA's and NCCL's documentation (`tests/emu-cuda`, `tests/emu-nccl`).

mod connecting;
mod ddp;
mod device;
mod faults;
mod order;
#[path = "../scenarios/mod.rs"]
mod scenarios;
#[cfg(feature = "cudarc-0_19")]
mod slices;
mod suite;
