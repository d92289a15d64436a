//! The functions.

use std::ffi::{c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::PathBuf;

use libloading::Library;

use crate::load::{LoadError, reason};
use crate::types::*;

/// A function's type as it is written here, to be compared with a header.
#[derive(Debug, Clone, Copy)]
pub struct Signature {
    /// Its name.
    pub name: &'static str,
    /// The types of its arguments, in Rust's spelling.
    pub args: &'static [&'static str],
    /// The type of its result, in Rust's spelling.
    pub result: &'static str,
    /// Whether a library may lack it.
    pub optional: bool,
}

macro_rules! table {
    (
        required { $($(#[$rdoc:meta])* fn $r:ident($($ra:ident: $rt:ty),*) -> $rr:ty;)* }
        optional { $($(#[$odoc:meta])* fn $o:ident($($oa:ident: $ot:ty),*) -> $or:ty;)* }
    ) => {
        /// The library's functions.
        ///
        /// Calling one is as unsafe as in C: NCCL's documentation says what it needs.
        ///
        /// `Send` and `Sync`; which functions may run at the same time is for NCCL to say. Calls
        /// on one communicator may not, except for `ncclCommAbort`.
        #[derive(Debug)]
        pub struct Nccl {
            /// Where it was found.
            pub path: PathBuf,
            /// Its version, as `ncclGetVersion` counts: 22907 is 2.29.7.
            pub version: c_int,
            $($(#[$rdoc])* pub $r: unsafe extern "C" fn($($ra: $rt),*) -> $rr,)*
            $($(#[$odoc])* pub $o: Option<unsafe extern "C" fn($($oa: $ot),*) -> $or>,)*
            // Never unloaded: NCCL's threads and thread-local destructors outlive any handle.
            _library: ManuallyDrop<Library>,
        }

        impl Nccl {
            /// Looks up the functions. The version is not known yet.
            pub(crate) fn bind(library: Library, path: PathBuf) -> Result<Self, LoadError> {
                let library = ManuallyDrop::new(library);
                $(
                    // SAFETY: the symbol is a function of NCCL's, whose type is the header's; a
                    // test compares the two.
                    let $r = unsafe { library.get(concat!(stringify!($r), "\0")) };
                    let $r = match $r {
                        Ok(symbol) => *symbol,
                        Err(err) => {
                            return Err(LoadError::Lacks {
                                path,
                                function: stringify!($r),
                                reason: reason(&err),
                            });
                        }
                    };
                )*
                $(
                    // SAFETY: as above.
                    let $o = unsafe { library.get(concat!(stringify!($o), "\0")) };
                    let $o = $o.ok().map(|symbol| *symbol);
                )*
                Ok(Self { path, version: 0, $($r,)* $($o,)* _library: library })
            }
        }

        /// All functions of the table.
        pub const SIGNATURES: &[Signature] = &[
            $(Signature {
                name: stringify!($r),
                args: &[$(stringify!($rt)),*],
                result: stringify!($rr),
                optional: false,
            },)*
            $(Signature {
                name: stringify!($o),
                args: &[$(stringify!($ot)),*],
                result: stringify!($or),
                optional: true,
            },)*
        ];
    };
}

table! {
    required {
        /// The library's version.
        fn ncclGetVersion(version: *mut c_int) -> ncclResult_t;
        /// Makes an id for a new communicator. It listens from then on.
        fn ncclGetUniqueId(id: *mut ncclUniqueId) -> ncclResult_t;
        /// A code in words.
        fn ncclGetErrorString(code: ncclResult_t) -> *const c_char;
        /// The words of the last error, which stay after later successes.
        fn ncclGetLastError(comm: ncclComm_t) -> *const c_char;

        /// Joins a communicator. A failure leaves the calling thread inside a group call.
        fn ncclCommInitRankConfig(
            comm: *mut ncclComm_t, ranks: c_int, id: ncclUniqueId, rank: c_int,
            config: *mut ncclConfig_t
        ) -> ncclResult_t;
        /// Joins a communicator, and waits for the others.
        fn ncclCommInitRank(
            comm: *mut ncclComm_t, ranks: c_int, id: ncclUniqueId, rank: c_int
        ) -> ncclResult_t;
        /// One communicator per device, all of this process.
        fn ncclCommInitAll(
            comms: *mut ncclComm_t, count: c_int, devices: *const c_int
        ) -> ncclResult_t;
        /// Begins an orderly end.
        fn ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t;
        /// Frees a communicator.
        fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t;
        /// Ends what is going on and frees the communicator.
        fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t;
        /// What went wrong since, or whether a call is still in progress.
        fn ncclCommGetAsyncError(comm: ncclComm_t, code: *mut ncclResult_t) -> ncclResult_t;
        /// Number of ranks.
        fn ncclCommCount(comm: ncclComm_t, count: *mut c_int) -> ncclResult_t;
        /// Own rank.
        fn ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) -> ncclResult_t;
        /// Ordinal of its device.
        fn ncclCommCuDevice(comm: ncclComm_t, device: *mut c_int) -> ncclResult_t;
        /// Divides a communicator by colors. All its ranks call it.
        fn ncclCommSplit(
            comm: ncclComm_t, color: c_int, key: c_int, new: *mut ncclComm_t,
            config: *mut ncclConfig_t
        ) -> ncclResult_t;

        /// Every rank gets the reduction.
        fn ncclAllReduce(
            send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t,
            op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t
        ) -> ncclResult_t;
        /// Every rank gets the root's data.
        fn ncclBroadcast(
            send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t,
            root: c_int, comm: ncclComm_t, stream: cudaStream_t
        ) -> ncclResult_t;
        /// As `ncclBroadcast`, in place.
        fn ncclBcast(
            data: *mut c_void, count: usize, dtype: ncclDataType_t, root: c_int,
            comm: ncclComm_t, stream: cudaStream_t
        ) -> ncclResult_t;
        /// The root gets the reduction.
        fn ncclReduce(
            send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t,
            op: ncclRedOp_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t
        ) -> ncclResult_t;
        /// Every rank gets all parts.
        fn ncclAllGather(
            send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t,
            comm: ncclComm_t, stream: cudaStream_t
        ) -> ncclResult_t;
        /// Every rank gets its part of the reduction.
        fn ncclReduceScatter(
            send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t,
            op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t
        ) -> ncclResult_t;
        /// Sends to one rank.
        fn ncclSend(
            data: *const c_void, count: usize, dtype: ncclDataType_t, peer: c_int,
            comm: ncclComm_t, stream: cudaStream_t
        ) -> ncclResult_t;
        /// Receives from one rank.
        fn ncclRecv(
            data: *mut c_void, count: usize, dtype: ncclDataType_t, peer: c_int,
            comm: ncclComm_t, stream: cudaStream_t
        ) -> ncclResult_t;
        /// From here on this thread's calls are collected.
        fn ncclGroupStart() -> ncclResult_t;
        /// Starts what has been collected.
        fn ncclGroupEnd() -> ncclResult_t;
        /// Makes an operator that multiplies each rank's elements before the sum.
        fn ncclRedOpCreatePreMulSum(
            op: *mut ncclRedOp_t, factor: *mut c_void, dtype: ncclDataType_t,
            residence: ncclScalarResidence_t, comm: ncclComm_t
        ) -> ncclResult_t;
        /// Frees such an operator.
        fn ncclRedOpDestroy(op: ncclRedOp_t, comm: ncclComm_t) -> ncclResult_t;
    }
    optional {
        /// Device memory that can be registered. Since 2.19.
        fn ncclMemAlloc(ptr: *mut *mut c_void, size: usize) -> ncclResult_t;
        /// Frees it. Since 2.19.
        fn ncclMemFree(ptr: *mut c_void) -> ncclResult_t;
        /// Registers memory. Since 2.19.
        fn ncclCommRegister(
            comm: ncclComm_t, data: *mut c_void, size: usize, handle: *mut *mut c_void
        ) -> ncclResult_t;
        /// Takes it back. Since 2.19.
        fn ncclCommDeregister(comm: ncclComm_t, handle: *mut c_void) -> ncclResult_t;
        /// Estimates what has been collected instead of starting it. Since 2.22.
        fn ncclGroupSimulateEnd(info: *mut ncclSimInfo_t) -> ncclResult_t;
        /// Joins a communicator with several roots. Since 2.23.
        fn ncclCommInitRankScalable(
            comm: *mut ncclComm_t, ranks: c_int, rank: c_int, ids: c_int, list: *mut ncclUniqueId,
            config: *mut ncclConfig_t
        ) -> ncclResult_t;
        /// A communicator without some ranks. Since 2.27.
        fn ncclCommShrink(
            comm: ncclComm_t, exclude: *mut c_int, count: c_int, new: *mut ncclComm_t,
            config: *mut ncclConfig_t, flags: c_int
        ) -> ncclResult_t;
        /// Registers memory that all ranks share. Since 2.27.
        fn ncclCommWindowRegister(
            comm: ncclComm_t, data: *mut c_void, size: usize, window: *mut ncclWindow_t,
            flags: c_int
        ) -> ncclResult_t;
        /// Takes it back. Since 2.27.
        fn ncclCommWindowDeregister(comm: ncclComm_t, window: ncclWindow_t) -> ncclResult_t;
        /// Every rank sends a part to every rank. Since 2.28.
        fn ncclAlltoAll(
            send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t,
            comm: ncclComm_t, stream: cudaStream_t
        ) -> ncclResult_t;
        /// The root gets all parts. Since 2.28.
        fn ncclGather(
            send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t,
            root: c_int, comm: ncclComm_t, stream: cudaStream_t
        ) -> ncclResult_t;
        /// Every rank gets its part of the root's data. Since 2.28.
        fn ncclScatter(
            send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t,
            root: c_int, comm: ncclComm_t, stream: cudaStream_t
        ) -> ncclResult_t;
        /// Stops all operations of a communicator that is to be shrunk. Since 2.29.
        fn ncclCommRevoke(comm: ncclComm_t, flags: c_int) -> ncclResult_t;
        /// An id by which ranks can join later. Since 2.29.
        fn ncclCommGetUniqueId(comm: ncclComm_t, id: *mut ncclUniqueId) -> ncclResult_t;
        /// A communicator with more ranks. Since 2.29.
        fn ncclCommGrow(
            comm: ncclComm_t, ranks: c_int, id: *const ncclUniqueId, rank: c_int,
            new: *mut ncclComm_t, config: *mut ncclConfig_t
        ) -> ncclResult_t;
        /// Gives up memory for a while. Since 2.29.
        fn ncclCommSuspend(comm: ncclComm_t, flags: c_int) -> ncclResult_t;
        /// Takes it back. Since 2.29.
        fn ncclCommResume(comm: ncclComm_t) -> ncclResult_t;
        /// How much memory it has. Since 2.29.
        fn ncclCommMemStats(
            comm: ncclComm_t, stat: ncclCommMemStat_t, value: *mut u64
        ) -> ncclResult_t;
    }
}
