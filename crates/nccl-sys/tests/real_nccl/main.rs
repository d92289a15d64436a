//! The table against NVIDIA's own library and header, on a machine without a GPU.
//!
//! What can be shown here is what the library answers without one: loading, versions, error texts,
//! unique ids, refused arguments, and that making a communicator fails and does not hang. Nothing
//! here communicates. `cargo xtask test --only nccl` runs it if the wheel is in the cache, and
//! `--require-all` fetches it.

mod header;

use std::ffi::{CStr, c_int};
use std::path::PathBuf;
use std::ptr;

use nccl_sys::*;
use phalanx_testkit::World;

/// Where `include/nccl.h` and `lib/libnccl.so.2` are.
const DIR_VAR: &str = "NCCL_SYS_TEST_DIR";

fn dir() -> PathBuf {
    let dir = std::env::var_os(DIR_VAR).map(PathBuf::from);
    dir.unwrap_or_else(|| panic!("{DIR_VAR} is not set; run `cargo xtask test --only nccl`"))
}

fn load() -> Nccl {
    Nccl::open(dir().join("lib/libnccl.so.2").as_os_str()).expect("the library of the wheel")
}

/// Each test has a process of its own: the library keeps state per process and per thread, and a
/// crash or a hang is then a failure of that test.
macro_rules! alone {
    ($body:expr) => {
        World::new(1).run(|_| {
            let body: fn(&Nccl) = $body;
            body(&load());
        })
    };
}

#[test]
fn real_nccl_loads_and_knows_its_version() {
    alone!(|nccl| {
        println!("NCCL {}", nccl.version);
        assert!(nccl.version >= OLDEST);
        // SAFETY: a null pointer is an argument that the function checks.
        let code = unsafe { (nccl.ncclGetVersion)(ptr::null_mut()) };
        assert_eq!(code, ncclInvalidArgument);
    });
}

#[test]
fn real_nccl_has_every_function_of_the_table() {
    alone!(|nccl| {
        // The pinned version is the newest that the table knows, so nothing may be missing.
        assert!(nccl.ncclMemAlloc.is_some() && nccl.ncclGroupSimulateEnd.is_some());
        assert!(nccl.ncclCommInitRankScalable.is_some() && nccl.ncclCommShrink.is_some());
        assert!(nccl.ncclAlltoAll.is_some() && nccl.ncclGather.is_some());
        assert!(nccl.ncclScatter.is_some() && nccl.ncclCommRevoke.is_some());
        assert!(nccl.ncclCommGrow.is_some() && nccl.ncclCommMemStats.is_some());
    });
}

#[test]
fn real_nccl_says_what_a_code_means() {
    alone!(|nccl| {
        let text = |code| {
            // SAFETY: any code has a text, which is a constant of the library's.
            let text = unsafe { CStr::from_ptr((nccl.ncclGetErrorString)(ncclResult_t(code))) };
            text.to_str().expect("ASCII").to_owned()
        };
        for (name, code) in ncclResult_t::KNOWN {
            assert_ne!(text(*code), "unknown result code", "{name}");
        }
        for code in [-1, 99] {
            assert_eq!(text(code), "unknown result code");
        }
        assert!(text(0).contains("no error"));
    });
}

#[test]
fn real_nccl_makes_unique_ids_that_differ() {
    alone!(|nccl| {
        let mut ids = [ncclUniqueId::EMPTY; 2];
        for id in &mut ids {
            // SAFETY: it points to room for an id.
            let code = unsafe { (nccl.ncclGetUniqueId)(id) };
            nccl.check("ncclGetUniqueId", code).expect("no GPU needed");
        }
        assert!(ids[0] != ids[1] && ids[0] != ncclUniqueId::EMPTY);
        assert!(ncclUniqueId::from_bytes(ids[0].to_bytes()) == ids[0]);
        // SAFETY: a null pointer is an argument that the function checks.
        let code = unsafe { (nccl.ncclGetUniqueId)(ptr::null_mut()) };
        let err = nccl.check("ncclGetUniqueId", code).unwrap_err();
        assert_eq!(err.code, ncclInvalidArgument);
        assert!(err.to_string().contains("argument is NULL"), "{err}");
    });
}

#[test]
fn real_nccl_refuses_calls_without_a_communicator() {
    alone!(|nccl| {
        let none: ncclComm_t = ptr::null_mut();
        let mut number: c_int = 0;
        let mut code = ncclSuccess;
        // SAFETY: all arguments are valid but for the communicator, which is checked first.
        let refused = unsafe {
            [
                (nccl.ncclCommGetAsyncError)(none, &mut code),
                (nccl.ncclCommCount)(none, &mut number),
                (nccl.ncclAllReduce)(
                    ptr::null(),
                    ptr::null_mut(),
                    0,
                    ncclFloat32,
                    ncclSum,
                    none,
                    ptr::null_mut(),
                ),
            ]
        };
        assert_eq!(refused, [ncclInvalidArgument; 3]);
        // SAFETY: no communicator is nothing to free.
        let freed = unsafe {
            [
                (nccl.ncclCommFinalize)(none),
                (nccl.ncclCommDestroy)(none),
                (nccl.ncclCommAbort)(none),
            ]
        };
        assert_eq!(freed, [ncclSuccess; 3]);
    });
}

#[test]
fn real_nccl_counts_group_calls() {
    alone!(|nccl| {
        // SAFETY: group calls take no arguments.
        let codes = unsafe {
            [
                (nccl.ncclGroupStart)(),
                (nccl.ncclGroupEnd)(),
                (nccl.ncclGroupEnd)(),
            ]
        };
        assert_eq!(codes, [ncclSuccess, ncclSuccess, ncclInvalidUsage]);
    });
}

#[test]
fn real_nccl_fails_to_start_without_a_gpu_and_does_not_hang() {
    alone!(|nccl| {
        let mut id = ncclUniqueId::EMPTY;
        // SAFETY: it points to room for an id.
        let code = unsafe { (nccl.ncclGetUniqueId)(&mut id) };
        nccl.check("ncclGetUniqueId", code).expect("no GPU needed");
        let mut comm: ncclComm_t = ptr::null_mut();
        let mut config = ncclConfig_t::INITIALIZER;
        config.blocking = 0;
        // SAFETY: room for a handle, an id of this library's, an initialised configuration.
        let code = unsafe { (nccl.ncclCommInitRankConfig)(&mut comm, 2, id, 0, &mut config) };
        let err = nccl.check("ncclCommInitRankConfig", code);
        // On a machine with a GPU it would begin; this test is for those without.
        let err = err.expect_err("there is no GPU");
        assert_eq!(err.code, ncclUnhandledCudaError);
        assert!(comm.is_null());
        assert!(err.last.contains("CUDA"), "{err}");
        println!("{err}");
    });
}
