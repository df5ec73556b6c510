//! Handles, flags and argument structs, with the values of ROCm 6 and 7.

use core::ffi::{c_int, c_uint, c_void};

macro_rules! handles {
    ($($(#[$meta:meta])* $name:ident;)*) => {$(
        $(#[$meta])*
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(pub *mut c_void);

        // SAFETY: a handle is a name that the runtime gave out; HIP's functions may be called with it
        // from any thread.
        unsafe impl Send for $name {}
        // SAFETY: as above; the handle itself is never dereferenced here.
        unsafe impl Sync for $name {}

        impl $name {
            /// The null handle.
            pub const NULL: Self = Self(core::ptr::null_mut());

            /// Whether this is the null handle.
            pub const fn is_null(self) -> bool {
                self.0.is_null()
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::NULL
            }
        }
    )*};
}

handles! {
    /// A stream. The null handle is the default stream.
    hipStream_t;
    /// An event.
    hipEvent_t;
    /// A loaded code object.
    hipModule_t;
    /// A kernel of a module.
    hipFunction_t;
    /// A graph of operations.
    hipGraph_t;
    /// A node of a graph.
    hipGraphNode_t;
    /// A graph that can be launched.
    hipGraphExec_t;
}

/// A device address.
#[allow(non_camel_case_types)]
pub type hipDeviceptr_t = *mut c_void;

/// Number of a device, from 0 on.
#[allow(non_camel_case_types)]
pub type hipDevice_t = c_int;

macro_rules! values {
    ($($(#[$meta:meta])* $name:ident: $base:ty { $($value:ident = $number:literal,)* })*) => {$(
        $(#[$meta])*
        ///
        /// Not an enum: a newer runtime may use values that are not listed here.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(pub $base);

        #[allow(non_upper_case_globals, missing_docs)]
        impl $name {
            $(pub const $value: Self = Self($number);)*
        }
    )*};
}

values! {
    /// Direction of a copy.
    hipMemcpyKind: c_uint {
        hipMemcpyHostToHost = 0,
        hipMemcpyHostToDevice = 1,
        hipMemcpyDeviceToHost = 2,
        hipMemcpyDeviceToDevice = 3,
        hipMemcpyDefault = 4,
    }

    /// Kind of memory that a pointer leads to (ROCm 6 and later; HIP 5 numbers the kinds differently).
    hipMemoryType: c_uint {
        hipMemoryTypeUnregistered = 0,
        hipMemoryTypeHost = 1,
        hipMemoryTypeDevice = 2,
        hipMemoryTypeManaged = 3,
    }

    /// Which calls a capture forbids while it lasts.
    hipStreamCaptureMode: c_uint {
        hipStreamCaptureModeGlobal = 0,
        hipStreamCaptureModeThreadLocal = 1,
        hipStreamCaptureModeRelaxed = 2,
    }

    /// Whether a stream is being captured.
    hipStreamCaptureStatus: c_uint {
        hipStreamCaptureStatusNone = 0,
        hipStreamCaptureStatusActive = 1,
        hipStreamCaptureStatusInvalidated = 2,
    }

    /// An attribute of a kernel that `hipFuncGetAttribute` reads.
    hipFunction_attribute: c_uint {
        HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0,
        HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1,
        HIP_FUNC_ATTRIBUTE_CONST_SIZE_BYTES = 2,
        HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3,
        HIP_FUNC_ATTRIBUTE_NUM_REGS = 4,
        HIP_FUNC_ATTRIBUTE_PTX_VERSION = 5,
        HIP_FUNC_ATTRIBUTE_BINARY_VERSION = 6,
        HIP_FUNC_ATTRIBUTE_CACHE_MODE_CA = 7,
        HIP_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
        HIP_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9,
    }

    /// An attribute of a kernel that `hipFuncSetAttribute` writes.
    hipFuncAttribute: c_uint {
        hipFuncAttributeMaxDynamicSharedMemorySize = 8,
        hipFuncAttributePreferredSharedMemoryCarveout = 9,
    }

    /// An attribute of a device.
    hipDeviceAttribute_t: c_uint {
        hipDeviceAttributeEccEnabled = 0,
        hipDeviceAttributeCanMapHostMemory = 3,
        hipDeviceAttributeClockRate = 5,
        hipDeviceAttributeComputeMode = 6,
        hipDeviceAttributeConcurrentKernels = 8,
        hipDeviceAttributeConcurrentManagedAccess = 9,
        hipDeviceAttributeCooperativeLaunch = 10,
        hipDeviceAttributeIntegrated = 16,
        hipDeviceAttributeKernelExecTimeout = 18,
        hipDeviceAttributeL2CacheSize = 19,
        hipDeviceAttributeComputeCapabilityMajor = 23,
        hipDeviceAttributeManagedMemory = 24,
        hipDeviceAttributeMaxBlocksPerMultiProcessor = 25,
        hipDeviceAttributeMaxBlockDimX = 26,
        hipDeviceAttributeMaxBlockDimY = 27,
        hipDeviceAttributeMaxBlockDimZ = 28,
        hipDeviceAttributeMaxGridDimX = 29,
        hipDeviceAttributeMaxGridDimY = 30,
        hipDeviceAttributeMaxGridDimZ = 31,
        hipDeviceAttributeMaxThreadsPerBlock = 56,
        hipDeviceAttributeMaxThreadsPerMultiProcessor = 57,
        hipDeviceAttributeMaxPitch = 58,
        hipDeviceAttributeMemoryBusWidth = 59,
        hipDeviceAttributeMemoryClockRate = 60,
        hipDeviceAttributeComputeCapabilityMinor = 61,
        hipDeviceAttributeMultiprocessorCount = 63,
        hipDeviceAttributePageableMemoryAccess = 65,
        hipDeviceAttributePciBusId = 67,
        hipDeviceAttributePciDeviceId = 68,
        hipDeviceAttributePciDomainID = 69,
        hipDeviceAttributeMaxRegistersPerBlock = 71,
        hipDeviceAttributeMaxRegistersPerMultiprocessor = 72,
        hipDeviceAttributeMaxSharedMemoryPerBlock = 74,
        hipDeviceAttributeSharedMemPerBlockOptin = 75,
        hipDeviceAttributeSharedMemPerMultiprocessor = 76,
        hipDeviceAttributeTotalConstantMemory = 83,
        hipDeviceAttributeTotalGlobalMem = 84,
        hipDeviceAttributeUnifiedAddressing = 85,
        hipDeviceAttributeWarpSize = 87,
        hipDeviceAttributeMemoryPoolsSupported = 88,
        hipDeviceAttributeClockInstructionRate = 10000,
        hipDeviceAttributeMaxSharedMemoryPerMultiprocessor = 10002,
        hipDeviceAttributeIsLargeBar = 10011,
        hipDeviceAttributeAsicRevision = 10012,
        hipDeviceAttributePhysicalMultiProcessorCount = 10015,
        hipDeviceAttributeFineGrainSupport = 10016,
        hipDeviceAttributeWallClockRate = 10017,
    }
}

/// Result of `hipPointerGetAttributes`.
#[allow(non_camel_case_types, non_snake_case, missing_docs)]
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct hipPointerAttribute_t {
    /// Named `memoryType` before ROCm 6.
    pub r#type: hipMemoryType,
    pub device: c_int,
    pub devicePointer: *mut c_void,
    pub hostPointer: *mut c_void,
    pub isManaged: c_int,
    pub allocationFlags: c_uint,
}

impl Default for hipPointerAttribute_t {
    fn default() -> Self {
        hipPointerAttribute_t {
            r#type: hipMemoryType::hipMemoryTypeUnregistered,
            device: 0,
            devicePointer: core::ptr::null_mut(),
            hostPointer: core::ptr::null_mut(),
            isManaged: 0,
            allocationFlags: 0,
        }
    }
}

/// `hipStreamCreateWithFlags`: synchronises with the default stream.
pub const HIP_STREAM_DEFAULT: c_uint = 0;
/// `hipStreamCreateWithFlags`: does not synchronise with the default stream.
pub const HIP_STREAM_NON_BLOCKING: c_uint = 1;
/// `hipEventCreateWithFlags`: keeps times, waits by spinning.
pub const HIP_EVENT_DEFAULT: c_uint = 0;
/// `hipEventCreateWithFlags`: waits by sleeping.
pub const HIP_EVENT_BLOCKING_SYNC: c_uint = 1;
/// `hipEventCreateWithFlags`: keeps no times.
pub const HIP_EVENT_DISABLE_TIMING: c_uint = 2;
/// `hipHostMalloc`: nothing special.
pub const HIP_HOST_MALLOC_DEFAULT: c_uint = 0;
/// `hipModuleLaunchKernel`, `extra`: the next entry points to the packed arguments.
pub const HIP_LAUNCH_PARAM_BUFFER_POINTER: *mut c_void = core::ptr::without_provenance_mut(1);
/// `hipModuleLaunchKernel`, `extra`: the next entry points to their size.
pub const HIP_LAUNCH_PARAM_BUFFER_SIZE: *mut c_void = core::ptr::without_provenance_mut(2);
/// `hipModuleLaunchKernel`, `extra`: the end of the list.
pub const HIP_LAUNCH_PARAM_END: *mut c_void = core::ptr::without_provenance_mut(3);
