//! The table of HIP functions that are used, with their C signatures.

/// Calls a macro with every function: `$callback! { $($extra)* ; status {..} other {..} }`.
///
/// Functions in `status` return [`hipError_t`](crate::hipError_t), functions in `other` something else. The caller
/// needs [`types`](crate::types), [`hipError_t`](crate::hipError_t),
/// [`hipDeviceProp_tR0600`](crate::hipDeviceProp_tR0600) and `core::ffi::*` in scope. Signatures are those of ROCm 6.2
/// to 7.
#[macro_export]
macro_rules! for_each_function {
    ($callback:ident $(, $($extra:tt)*)?) => {
        $callback! {
            $($($extra)*)? ;
            status {
                /// Initialises the runtime. `flags` must be 0.
                fn hipInit(flags: c_uint);
                /// The driver's version.
                fn hipDriverGetVersion(version: *mut c_int);
                /// The runtime's version: major * 10,000,000 + minor * 100,000 + patch.
                fn hipRuntimeGetVersion(version: *mut c_int);
                /// Number of devices.
                fn hipGetDeviceCount(count: *mut c_int);
                /// Makes a device the calling thread's current one.
                fn hipSetDevice(device: c_int);
                /// The calling thread's current device.
                fn hipGetDevice(device: *mut c_int);
                /// A device's properties.
                fn hipGetDevicePropertiesR0600(properties: *mut hipDeviceProp_tR0600, device: c_int);
                /// One attribute of a device.
                fn hipDeviceGetAttribute(value: *mut c_int, attribute: hipDeviceAttribute_t, device: c_int);
                /// Waits for all work of the current device.
                fn hipDeviceSynchronize();
                /// Destroys everything on the current device.
                fn hipDeviceReset();

                /// Allocates device memory.
                fn hipMalloc(pointer: *mut *mut c_void, size: usize);
                /// Frees device memory, after waiting for the device.
                fn hipFree(pointer: *mut c_void);
                /// Free and total bytes of the current device.
                fn hipMemGetInfo(free: *mut usize, total: *mut usize);
                /// Allocates pinned host memory.
                fn hipHostMalloc(pointer: *mut *mut c_void, size: usize, flags: c_uint);
                /// Frees pinned host memory.
                fn hipHostFree(pointer: *mut c_void);
                /// Copies memory and waits.
                fn hipMemcpy(destination: *mut c_void, source: *const c_void, size: usize, kind: hipMemcpyKind);
                /// Copies memory in stream order.
                fn hipMemcpyAsync(destination: *mut c_void, source: *const c_void, size: usize, kind: hipMemcpyKind, stream: hipStream_t);
                /// Fills bytes of device memory.
                fn hipMemset(destination: *mut c_void, value: c_int, size: usize);
                /// Fills bytes in stream order.
                fn hipMemsetAsync(destination: *mut c_void, value: c_int, size: usize, stream: hipStream_t);
                /// Fills 32-bit words in stream order.
                fn hipMemsetD32Async(destination: hipDeviceptr_t, value: c_int, count: usize, stream: hipStream_t);
                /// Kind and device of the memory at a pointer.
                fn hipPointerGetAttributes(attributes: *mut hipPointerAttribute_t, pointer: *const c_void);

                /// Creates a stream.
                fn hipStreamCreateWithFlags(stream: *mut hipStream_t, flags: c_uint);
                /// Destroys a stream once its work is done.
                fn hipStreamDestroy(stream: hipStream_t);
                /// Waits for a stream's work.
                fn hipStreamSynchronize(stream: hipStream_t);
                /// Whether a stream's work is done (`hipSuccess`) or not (`hipErrorNotReady`).
                fn hipStreamQuery(stream: hipStream_t);
                /// Makes later work of a stream wait for an event.
                fn hipStreamWaitEvent(stream: hipStream_t, event: hipEvent_t, flags: c_uint);
                /// The device of a stream.
                fn hipStreamGetDevice(stream: hipStream_t, device: *mut hipDevice_t);
                /// Begins to record a stream's work instead of running it.
                fn hipStreamBeginCapture(stream: hipStream_t, mode: hipStreamCaptureMode);
                /// Ends a capture and returns the graph.
                fn hipStreamEndCapture(stream: hipStream_t, graph: *mut hipGraph_t);
                /// Whether a stream is being captured.
                fn hipStreamIsCapturing(stream: hipStream_t, status: *mut hipStreamCaptureStatus);

                /// Makes a graph launchable.
                fn hipGraphInstantiate(executable: *mut hipGraphExec_t, graph: hipGraph_t, error_node: *mut hipGraphNode_t, log: *mut c_char, log_size: usize);
                /// Launches a graph in stream order.
                fn hipGraphLaunch(executable: hipGraphExec_t, stream: hipStream_t);
                /// Destroys a graph.
                fn hipGraphDestroy(graph: hipGraph_t);
                /// Destroys a launchable graph.
                fn hipGraphExecDestroy(executable: hipGraphExec_t);

                /// Creates an event.
                fn hipEventCreateWithFlags(event: *mut hipEvent_t, flags: c_uint);
                /// Records an event in stream order.
                fn hipEventRecord(event: hipEvent_t, stream: hipStream_t);
                /// Waits for an event.
                fn hipEventSynchronize(event: hipEvent_t);
                /// Whether an event has happened (`hipSuccess`) or not (`hipErrorNotReady`).
                fn hipEventQuery(event: hipEvent_t);
                /// Milliseconds between two events.
                fn hipEventElapsedTime(milliseconds: *mut f32, start: hipEvent_t, stop: hipEvent_t);
                /// Destroys an event.
                fn hipEventDestroy(event: hipEvent_t);

                /// Loads a code object or an offload bundle from memory.
                fn hipModuleLoadData(module: *mut hipModule_t, image: *const c_void);
                /// Unloads a module.
                fn hipModuleUnload(module: hipModule_t);
                /// Finds a kernel.
                fn hipModuleGetFunction(function: *mut hipFunction_t, module: hipModule_t, name: *const c_char);
                /// Finds a global variable.
                fn hipModuleGetGlobal(pointer: *mut hipDeviceptr_t, size: *mut usize, module: hipModule_t, name: *const c_char);
                /// One attribute of a kernel.
                fn hipFuncGetAttribute(value: *mut c_int, attribute: hipFunction_attribute, function: hipFunction_t);
                /// Sets one attribute of a kernel.
                fn hipFuncSetAttribute(function: *const c_void, attribute: hipFuncAttribute, value: c_int);
                /// Launches a kernel in stream order: a grid of `grid_*` workgroups of `block_*` work items.
                fn hipModuleLaunchKernel(function: hipFunction_t, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: hipStream_t, parameters: *mut *mut c_void, extra: *mut *mut c_void);
                /// Number of workgroups of a kernel that fit on a compute unit at once.
                fn hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut c_int, function: hipFunction_t, block_size: c_int, dynamic_shared_bytes: usize);
            }
            other {
                /// Returns the calling thread's last error and clears it.
                fn hipGetLastError() -> hipError_t;
                /// The name of a status code.
                fn hipGetErrorName(code: hipError_t) -> *const c_char;
                /// Description of a status code.
                fn hipGetErrorString(code: hipError_t) -> *const c_char;
            }
        }
    };
}

/// Finds a function by its name for [`for_each_function`](crate::for_each_function). The result is the address of the
/// function in module `$functions`, whose signature is checked against the table, or else `$other`, a `*const c_void`.
#[doc(hidden)]
#[macro_export]
macro_rules! address_of_function {
    ($functions:ident, $name:expr, $other:expr;
        status { $($(#[$a:meta])* fn $status:ident($($arg:ident: $type:ty),*);)* }
        other { $($(#[$b:meta])* fn $of:ident($($of_arg:ident: $of_type:ty),*) -> $result:ty;)* }
    ) => {{
        use core::ffi::{c_char, c_int, c_uint, c_void};
        use $crate::{hipDeviceProp_tR0600, hipError_t, types::*};
        match $name {
            $(stringify!($status) => {
                ($functions::$status as unsafe extern "C" fn($($type),*) -> hipError_t) as *const c_void
            })*
            $(stringify!($of) => {
                ($functions::$of as unsafe extern "C" fn($($of_type),*) -> $result) as *const c_void
            })*
            _ => $other,
        }
    }};
}
