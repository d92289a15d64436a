//! Handles, codes and structures, laid out as in `nccl.h`.

use std::ffi::{c_char, c_int, c_uint};
use std::fmt;
use std::ptr;

/// What a communicator handle points to; nobody but the library looks inside.
#[repr(C)]
pub struct ncclComm {
    _opaque: [u8; 0],
}

/// What a window handle points to.
#[repr(C)]
pub struct ncclWindow_vidmem {
    _opaque: [u8; 0],
}

/// What a stream handle points to.
#[repr(C)]
pub struct CUstream_st {
    _opaque: [u8; 0],
}

/// A communicator.
pub type ncclComm_t = *mut ncclComm;
/// A registered window of memory.
pub type ncclWindow_t = *mut ncclWindow_vidmem;
/// A CUDA stream; the same as the driver's `CUstream`.
pub type cudaStream_t = *mut CUstream_st;

/// Declares an integer that C calls an enumeration, with the values known so far.
macro_rules! code {
    ($(#[$doc:meta])* $name:ident { $($value:ident = $number:literal),* $(,)? }) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $name(pub c_int);

        $(
            #[doc = concat!("`", stringify!($value), "` of [`", stringify!($name), "`].")]
            pub const $value: $name = $name($number);
        )*

        impl $name {
            /// The values of this crate's version of the header, by name.
            pub const KNOWN: &[(&str, c_int)] = &[$((stringify!($value), $number)),*];
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match Self::KNOWN.iter().find(|(_, number)| *number == self.0) {
                    Some((name, _)) => f.write_str(name),
                    None => write!(f, "{}({})", stringify!($name), self.0),
                }
            }
        }
    };
}

code! {
    /// How a call went. Newer libraries may return more.
    ncclResult_t {
        ncclSuccess = 0,
        ncclUnhandledCudaError = 1,
        ncclSystemError = 2,
        ncclInternalError = 3,
        ncclInvalidArgument = 4,
        ncclInvalidUsage = 5,
        ncclRemoteError = 6,
        ncclInProgress = 7,
        // Since 2.30; before, it was the number of codes and was never returned.
        ncclTimeout = 8,
    }
}

code! {
    /// Type of elements.
    ncclDataType_t {
        ncclInt8 = 0,
        ncclUint8 = 1,
        ncclInt32 = 2,
        ncclUint32 = 3,
        ncclInt64 = 4,
        ncclUint64 = 5,
        ncclFloat16 = 6,
        ncclFloat32 = 7,
        ncclFloat64 = 8,
        ncclBfloat16 = 9,
        // Since 2.24.
        ncclFloat8e4m3 = 10,
        ncclFloat8e5m2 = 11,
    }
}

code! {
    /// A reduction. Handles that `ncclRedOpCreatePreMulSum` makes are arbitrary numbers.
    ncclRedOp_t {
        ncclSum = 0,
        ncclProd = 1,
        ncclMax = 2,
        ncclMin = 3,
        ncclAvg = 4,
    }
}

code! {
    /// Where the factor of a premultiplied sum is read from.
    ncclScalarResidence_t {
        ncclScalarDevice = 0,
        ncclScalarHostImmediate = 1,
    }
}

code! {
    /// What `ncclCommMemStats` is asked for.
    ncclCommMemStat_t {
        ncclStatGpuMemSuspend = 0,
        ncclStatGpuMemSuspended = 1,
        ncclStatGpuMemPersist = 2,
        ncclStatGpuMemTotal = 3,
    }
}

impl ncclResult_t {
    /// Whether a call of a non-blocking communicator has begun and goes on by itself.
    pub fn is_in_progress(self) -> bool {
        self == ncclInProgress
    }
}

/// Bytes of a unique id.
pub const NCCL_UNIQUE_ID_BYTES: usize = 128;

/// What rank 0 makes and every rank needs to make a communicator.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ncclUniqueId {
    /// For the library only.
    pub internal: [c_char; NCCL_UNIQUE_ID_BYTES],
}

impl ncclUniqueId {
    /// Before the library has filled it.
    pub const EMPTY: Self = Self {
        internal: [0; NCCL_UNIQUE_ID_BYTES],
    };

    /// The bytes that one rank hands to the others.
    pub fn to_bytes(self) -> [u8; NCCL_UNIQUE_ID_BYTES] {
        self.internal.map(|byte| byte as u8)
    }

    /// From what another rank's [`to_bytes`](ncclUniqueId::to_bytes) gave.
    pub fn from_bytes(bytes: [u8; NCCL_UNIQUE_ID_BYTES]) -> Self {
        Self {
            internal: bytes.map(|byte| byte as c_char),
        }
    }
}

impl fmt::Debug for ncclUniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // It is the key to a job's traffic, and no text.
        f.write_str("ncclUniqueId(..)")
    }
}

/// A value of [`ncclConfig_t`] that leaves the choice to the library.
pub const NCCL_CONFIG_UNDEF_INT: c_int = c_int::MIN;
/// The color of ranks that a split leaves out.
pub const NCCL_SPLIT_NOCOLOR: c_int = -1;
/// Shrinks a communicator in which nothing is going on.
pub const NCCL_SHRINK_DEFAULT: c_int = 0;
/// Ends what is going on first.
pub const NCCL_SHRINK_ABORT: c_int = 1;
/// The only flags of `ncclCommRevoke`.
pub const NCCL_REVOKE_DEFAULT: c_int = 0;
/// Marks structures that were initialised.
pub const NCCL_API_MAGIC: c_uint = 0xcafe_beef;
/// The version whose [`ncclConfig_t`] this crate has.
pub const CONFIG_VERSION: c_uint = 22907;

/// How to make a communicator, as of NCCL 2.29.
///
/// The library takes as much of it as both sides know: `size` and `version` say what we do. So one
/// layout serves older and newer libraries.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[expect(missing_docs, reason = "documented by NCCL")]
pub struct ncclConfig_t {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub blocking: c_int,
    pub cgaClusterSize: c_int,
    pub minCTAs: c_int,
    pub maxCTAs: c_int,
    pub netName: *const c_char,
    pub splitShare: c_int,
    pub trafficClass: c_int,
    pub commName: *const c_char,
    pub collnetEnable: c_int,
    pub CTAPolicy: c_int,
    pub shrinkShare: c_int,
    pub nvlsCTAs: c_int,
    pub nChannelsPerNetPeer: c_int,
    pub nvlinkCentricSched: c_int,
    pub graphUsageMode: c_int,
    pub numRmaCtx: c_int,
}

impl ncclConfig_t {
    /// Everything left to the library: what C writes as `NCCL_CONFIG_INITIALIZER`.
    pub const INITIALIZER: Self = Self {
        size: size_of::<Self>(),
        magic: NCCL_API_MAGIC,
        version: CONFIG_VERSION,
        blocking: NCCL_CONFIG_UNDEF_INT,
        cgaClusterSize: NCCL_CONFIG_UNDEF_INT,
        minCTAs: NCCL_CONFIG_UNDEF_INT,
        maxCTAs: NCCL_CONFIG_UNDEF_INT,
        netName: ptr::null(),
        splitShare: NCCL_CONFIG_UNDEF_INT,
        trafficClass: NCCL_CONFIG_UNDEF_INT,
        commName: ptr::null(),
        collnetEnable: NCCL_CONFIG_UNDEF_INT,
        CTAPolicy: NCCL_CONFIG_UNDEF_INT,
        shrinkShare: NCCL_CONFIG_UNDEF_INT,
        nvlsCTAs: NCCL_CONFIG_UNDEF_INT,
        nChannelsPerNetPeer: NCCL_CONFIG_UNDEF_INT,
        nvlinkCentricSched: NCCL_CONFIG_UNDEF_INT,
        graphUsageMode: NCCL_CONFIG_UNDEF_INT,
        numRmaCtx: NCCL_CONFIG_UNDEF_INT,
    };
}

/// What `ncclGroupSimulateEnd` estimates.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[expect(missing_docs, reason = "documented by NCCL")]
pub struct ncclSimInfo_t {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub estimatedTime: f32,
}

impl ncclSimInfo_t {
    /// What C writes as `NCCL_SIM_INFO_INITIALIZER`.
    pub const INITIALIZER: Self = Self {
        size: size_of::<Self>(),
        magic: 0x7468_5283,
        version: CONFIG_VERSION,
        estimatedTime: -1.0,
    };
}
