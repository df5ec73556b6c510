//! The functions of the CUDA driver that are used, with their C signatures.

#![allow(non_snake_case)]

use core::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use libloading::Library;

/// File name of the CUDA driver.
#[cfg(not(windows))]
pub(crate) const LIBRARY: &str = "libcuda.so.1";
/// File name of the CUDA driver.
#[cfg(windows)]
pub(crate) const LIBRARY: &str = "nvcuda.dll";

/// A `CUresult`.
pub(crate) type Code = c_int;
/// A `CUdevice`.
pub(crate) type Device = c_int;
/// A `CUdeviceptr`.
pub(crate) type Address = u64;
/// A `CUcontext`, `CUstream`, `CUevent`, `CUmodule`, `CUfunction`, `CUgraph` or `CUgraphExec`.
pub(crate) type Handle = *mut c_void;

/// `CUDA_ERROR_INVALID_VALUE`.
pub(crate) const INVALID_VALUE: Code = 1;
/// `CUDA_ERROR_INVALID_DEVICE`.
pub(crate) const INVALID_DEVICE: Code = 101;
/// `CUDA_ERROR_NOT_READY`.
pub(crate) const NOT_READY: Code = 600;
/// `CUDA_ERROR_NOT_SUPPORTED`.
pub(crate) const NOT_SUPPORTED: Code = 801;

/// A `CUlaunchConfig`.
#[repr(C)]
pub(crate) struct LaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub stream: Handle,
    pub attributes: *const LaunchAttribute,
    pub attribute_count: c_uint,
}

/// A `CUlaunchAttribute` whose value is a number.
#[repr(C, align(8))]
pub(crate) struct LaunchAttribute {
    pub id: c_uint,
    pub padding: c_uint,
    pub value: c_int,
    /// The rest of the union.
    pub rest: [c_int; 15],
}

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
pub(crate) const PROGRAMMATIC_STREAM_SERIALIZATION: c_uint = 6;

/// A failed call of the CUDA driver.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    /// The driver's function; empty if the call was refused before it reached the driver.
    pub function: &'static str,
    /// The code that it returned.
    pub code: Code,
    /// The driver's log, such as a compiler's messages.
    pub log: String,
}

impl Failure {
    /// A call that was refused before it reached the driver.
    pub(crate) fn refused(code: Code) -> Self {
        Failure {
            function: "",
            code,
            log: String::new(),
        }
    }
}

/// Result of a call of the driver.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

/// The process's CUDA driver. There is at most one: the driver's state, such as primary contexts, belongs to the
/// process.
pub(crate) struct Driver {
    library: Library,
    name: String,
    addresses: [AtomicPtr<c_void>; COUNT],
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

macro_rules! functions {
    ($(fn $name:ident($($arg:ident: $type:ty),*);)*) => {
        #[allow(non_camel_case_types, clippy::enum_variant_names)]
        #[derive(Clone, Copy)]
        enum Function { $($name,)* }

        const NAMES: &[&str] = &[$(stringify!($name),)*];
        const COUNT: usize = NAMES.len();

        /// The driver's functions.
        ///
        /// # Safety
        /// As the driver documents.
        #[allow(clippy::too_many_arguments, clippy::missing_safety_doc)]
        impl Driver {
            $(
                pub(crate) unsafe fn $name(&self, $($arg: $type),*) -> Outcome {
                    type Signature = unsafe extern "C" fn($($type),*) -> Code;
                    let address = self.address(Function::$name as usize);
                    if address.is_null() {
                        return Err(Failure {
                            function: stringify!($name),
                            code: NOT_SUPPORTED,
                            log: format!("{} has no such function", self.name),
                        });
                    }
                    // SAFETY: the address is that of the function of this name and signature.
                    let function = unsafe { core::mem::transmute::<*mut c_void, Signature>(address) };
                    // SAFETY: the caller keeps the function's contract.
                    match unsafe { function($($arg),*) } {
                        0 => Ok(()),
                        code => Err(Failure { function: stringify!($name), code, log: String::new() }),
                    }
                }
            )*
        }
    };
}

// Where a function has several versions, the symbol names the one with this signature: `cuda.h` renames the plain
// name to it. Plain `cuEventElapsedTime` is older than its `_v2` and in every driver.
functions! {
    fn cuInit(flags: c_uint);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuGetErrorName(code: Code, text: *mut *const c_char);
    fn cuGetErrorString(code: Code, text: *mut *const c_char);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGet(device: *mut Device, ordinal: c_int);
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: Device);
    fn cuDeviceGetUuid_v2(uuid: *mut c_char, device: Device);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: Device);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: Device);
    fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: Device);
    fn cuDevicePrimaryCtxRelease_v2(device: Device);
    fn cuDevicePrimaryCtxReset_v2(device: Device);
    fn cuCtxSetCurrent(context: Handle);
    fn cuCtxGetDevice(device: *mut Device);
    fn cuCtxSynchronize();
    fn cuMemAlloc_v2(address: *mut Address, size: usize);
    fn cuMemFree_v2(address: Address);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemHostAlloc(pointer: *mut *mut c_void, size: usize, flags: c_uint);
    fn cuMemFreeHost(pointer: *mut c_void);
    fn cuMemcpy(destination: Address, source: Address, size: usize);
    fn cuMemcpyHtoD_v2(destination: Address, source: *const c_void, size: usize);
    fn cuMemcpyDtoH_v2(destination: *mut c_void, source: Address, size: usize);
    fn cuMemcpyDtoD_v2(destination: Address, source: Address, size: usize);
    fn cuMemcpyAsync(destination: Address, source: Address, size: usize, stream: Handle);
    fn cuMemcpyHtoDAsync_v2(destination: Address, source: *const c_void, size: usize, stream: Handle);
    fn cuMemcpyDtoHAsync_v2(destination: *mut c_void, source: Address, size: usize, stream: Handle);
    fn cuMemcpyDtoDAsync_v2(destination: Address, source: Address, size: usize, stream: Handle);
    fn cuMemsetD8_v2(destination: Address, value: u8, count: usize);
    fn cuMemsetD8Async(destination: Address, value: u8, count: usize, stream: Handle);
    fn cuMemsetD32Async(destination: Address, value: c_uint, count: usize, stream: Handle);
    fn cuPointerGetAttributes(count: c_uint, attributes: *const c_uint, values: *mut *mut c_void, pointer: Address);
    fn cuStreamCreate(stream: *mut Handle, flags: c_uint);
    fn cuStreamDestroy_v2(stream: Handle);
    fn cuStreamSynchronize(stream: Handle);
    fn cuStreamQuery(stream: Handle);
    fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint);
    fn cuStreamGetCtx(stream: Handle, context: *mut Handle);
    fn cuStreamBeginCapture_v2(stream: Handle, mode: c_uint);
    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle);
    fn cuStreamIsCapturing(stream: Handle, status: *mut c_uint);
    fn cuGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, flags: u64);
    fn cuGraphLaunch(executable: Handle, stream: Handle);
    fn cuGraphDestroy(graph: Handle);
    fn cuGraphExecDestroy(executable: Handle);
    fn cuEventCreate(event: *mut Handle, flags: c_uint);
    fn cuEventRecord(event: Handle, stream: Handle);
    fn cuEventSynchronize(event: Handle);
    fn cuEventQuery(event: Handle);
    fn cuEventElapsedTime(milliseconds: *mut f32, start: Handle, stop: Handle);
    fn cuEventDestroy_v2(event: Handle);
    fn cuModuleLoadDataEx(module: *mut Handle, image: *const c_void, count: c_uint, options: *mut c_uint, values: *mut *mut c_void);
    fn cuModuleUnload(module: Handle);
    fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char);
    fn cuModuleGetGlobal_v2(address: *mut Address, size: *mut usize, module: Handle, name: *const c_char);
    fn cuFuncGetAttribute(value: *mut c_int, attribute: c_uint, function: Handle);
    fn cuFuncSetAttribute(function: Handle, attribute: c_uint, value: c_int);
    fn cuLaunchKernel(function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void);
    fn cuLaunchKernelEx(config: *const LaunchConfig, function: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void);
    fn cuTensorMapEncodeTiled(map: *mut c_void, data_type: c_uint, rank: c_uint, address: *mut c_void, dimensions: *const u64, strides: *const u64, of_box: *const c_uint, element_strides: *const c_uint, interleave: c_uint, swizzle: c_uint, promotion: c_uint, fill: c_uint);
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut c_int, function: Handle, block_size: c_int, dynamic_shared_bytes: usize);
}

impl Driver {
    /// The driver, if one has been adopted.
    pub(crate) fn get() -> Option<&'static Driver> {
        DRIVER.get()
    }

    /// Makes a library the process's driver. If there is one already, it must be the same; the error is the name of the
    /// one that is loaded.
    pub(crate) fn adopt(library: Library, name: &str) -> Result<&'static Driver, &'static str> {
        let entry = |library: &Library| {
            // SAFETY: the symbol is only read as an address here.
            unsafe { library.get::<*mut c_void>(b"cuInit") }.map_or(null_mut(), |found| *found)
        };
        let given = entry(&library);
        // Never unloaded: the driver's threads and exit handlers outlive any user.
        let driver = DRIVER.get_or_init(|| Driver {
            library,
            name: name.to_owned(),
            addresses: [const { AtomicPtr::new(null_mut()) }; COUNT],
        });
        if entry(&driver.library) == given {
            Ok(driver)
        } else {
            Err(&driver.name)
        }
    }

    /// Name or path that the driver was loaded by.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether the driver has function `name` of the list above.
    pub(crate) fn has(&self, name: &str) -> bool {
        let index = NAMES.iter().position(|n| *n == name);
        index.is_some_and(|index| !self.address(index).is_null())
    }

    fn address(&self, index: usize) -> *mut c_void {
        let known = self.addresses[index].load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: the symbol is only read as an address here.
        let found = unsafe { self.library.get::<*mut c_void>(NAMES[index].as_bytes()) };
        let address = found.map_or(null_mut(), |found| *found);
        self.addresses[index].store(address, Ordering::Relaxed);
        address
    }
}
