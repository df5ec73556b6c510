//! HIP functions for the device and its memory.
#![allow(non_snake_case, missing_docs)]
// each is documented in the table it is listed in
// As HIP documents them: pointers are null or valid.
#![allow(clippy::missing_safety_doc)]

use super::device;
use super::state::{Outcome, call, device as state, last_error, put, working};
use super::work::{Operation, enqueue};
use core::ffi::{c_char, c_int, c_uint, c_void};
use hip_sys::{hipDeviceProp_tR0600, hipError_t, types::*};

const INVALID: hipError_t = hipError_t::hipErrorInvalidValue;

/// Fails for any device number but 0, the only device.
pub(super) fn only_device(device: c_int) -> Outcome {
    if device == 0 {
        Ok(())
    } else {
        Err(hipError_t::hipErrorInvalidDevice)
    }
}

pub unsafe extern "C" fn hipInit(flags: c_uint) -> hipError_t {
    call(|| if flags == 0 { Ok(()) } else { Err(INVALID) })
}

pub unsafe extern "C" fn hipDriverGetVersion(version: *mut c_int) -> hipError_t {
    // SAFETY: null or valid.
    call(|| unsafe { put(version, device::VERSION) })
}

pub unsafe extern "C" fn hipRuntimeGetVersion(version: *mut c_int) -> hipError_t {
    // SAFETY: null or valid.
    call(|| unsafe { put(version, device::VERSION) })
}

pub unsafe extern "C" fn hipGetDeviceCount(count: *mut c_int) -> hipError_t {
    // SAFETY: null or valid.
    call(|| unsafe { put(count, 1) })
}

pub unsafe extern "C" fn hipSetDevice(device: c_int) -> hipError_t {
    call(|| only_device(device))
}

pub unsafe extern "C" fn hipGetDevice(device: *mut c_int) -> hipError_t {
    // SAFETY: null or valid.
    call(|| unsafe { put(device, 0) })
}

pub unsafe extern "C" fn hipGetDevicePropertiesR0600(
    properties: *mut hipDeviceProp_tR0600,
    device: c_int,
) -> hipError_t {
    call(|| {
        only_device(device)?;
        // SAFETY: null or valid.
        unsafe { put(properties, device::properties()) }
    })
}

pub unsafe extern "C" fn hipDeviceGetAttribute(
    value: *mut c_int,
    attribute: hipDeviceAttribute_t,
    device: c_int,
) -> hipError_t {
    call(|| {
        only_device(device)?;
        let found = device::attribute(attribute).ok_or(INVALID)?;
        // SAFETY: null or valid.
        unsafe { put(value, found) }
    })
}

pub unsafe extern "C" fn hipDeviceSynchronize() -> hipError_t {
    call(|| {
        let _work = working();
        let mut state = state();
        state.outside_captures()?;
        state.alive()
    })
}

pub unsafe extern "C" fn hipDeviceReset() -> hipError_t {
    call(|| {
        let _work = working();
        state().reset();
        Ok(())
    })
}

pub unsafe extern "C" fn hipGetLastError() -> hipError_t {
    last_error(true)
}

pub unsafe extern "C" fn hipGetErrorName(code: hipError_t) -> *const c_char {
    code.c_name().unwrap_or(c"hipErrorUnknown").as_ptr()
}

pub unsafe extern "C" fn hipGetErrorString(code: hipError_t) -> *const c_char {
    let text = match code {
        hipError_t::hipSuccess => c"no error",
        hipError_t::hipErrorInvalidValue => c"invalid argument",
        hipError_t::hipErrorOutOfMemory => c"out of memory",
        hipError_t::hipErrorInvalidConfiguration => c"invalid configuration argument",
        hipError_t::hipErrorNoDevice => c"no ROCm-capable device is detected",
        hipError_t::hipErrorInvalidDevice => c"invalid device ordinal",
        hipError_t::hipErrorInvalidImage => c"device kernel image is invalid",
        hipError_t::hipErrorNoBinaryForGpu => c"no kernel image is available for the device",
        hipError_t::hipErrorInvalidHandle => c"invalid resource handle",
        hipError_t::hipErrorNotFound => c"named symbol not found",
        hipError_t::hipErrorNotReady => c"device not ready",
        hipError_t::hipErrorIllegalAddress => c"a kernel accessed memory outside every allocation",
        hipError_t::hipErrorLaunchOutOfResources => c"too many resources requested for launch",
        hipError_t::hipErrorLaunchFailure => c"a kernel failed",
        hipError_t::hipErrorNotSupported => c"operation not supported",
        hipError_t::hipErrorStreamCaptureUnsupported => {
            c"operation not permitted when stream is capturing"
        }
        hipError_t::hipErrorStreamCaptureInvalidated => {
            c"operation failed due to a previous error during capture"
        }
        // SAFETY: any integer is a valid argument.
        _ => return unsafe { hipGetErrorName(code) },
    };
    text.as_ptr()
}

/// Allocates memory and writes its address through `pointer`.
///
/// # Safety
/// `pointer` is null or valid for a write.
pub(super) unsafe fn allocate(
    pointer: *mut *mut c_void,
    size: usize,
    kind: hipMemoryType,
    flags: c_uint,
) -> Outcome {
    if pointer.is_null() {
        return Err(INVALID);
    }
    let mut state = state();
    state.alive()?;
    state.outside_captures()?;
    let address = state.heap.allocate(size, kind, flags)?;
    if state.options.checks.uninitialized && kind == hipMemoryType::hipMemoryTypeDevice {
        state.heap.track(address);
    }
    // SAFETY: null or valid.
    unsafe { put(pointer, address as *mut c_void) }
}

/// Frees memory once no work runs. A device that faulted still frees, but returns its error.
pub(super) fn free(pointer: *mut c_void, kind: hipMemoryType) -> Outcome {
    let _work = working();
    let mut state = state();
    state.outside_captures()?;
    if !pointer.is_null() {
        state.heap.free(pointer as u64, kind)?;
    }
    state.alive()
}

pub unsafe extern "C" fn hipMalloc(pointer: *mut *mut c_void, size: usize) -> hipError_t {
    // SAFETY: null or valid.
    call(|| unsafe { allocate(pointer, size, hipMemoryType::hipMemoryTypeDevice, 0) })
}

pub unsafe extern "C" fn hipFree(pointer: *mut c_void) -> hipError_t {
    call(|| free(pointer, hipMemoryType::hipMemoryTypeDevice))
}

pub unsafe extern "C" fn hipHostMalloc(
    pointer: *mut *mut c_void,
    size: usize,
    flags: c_uint,
) -> hipError_t {
    // SAFETY: null or valid.
    call(|| unsafe { allocate(pointer, size, hipMemoryType::hipMemoryTypeHost, flags) })
}

pub unsafe extern "C" fn hipHostFree(pointer: *mut c_void) -> hipError_t {
    call(|| free(pointer, hipMemoryType::hipMemoryTypeHost))
}

pub unsafe extern "C" fn hipMemGetInfo(free: *mut usize, total: *mut usize) -> hipError_t {
    call(|| {
        let used = state().heap.used();
        // SAFETY: null or valid.
        unsafe {
            put(free, device::total_memory() - used)?;
            put(total, device::total_memory())
        }
    })
}

pub unsafe extern "C" fn hipPointerGetAttributes(
    attributes: *mut hipPointerAttribute_t,
    pointer: *const c_void,
) -> hipError_t {
    call(|| {
        if pointer.is_null() {
            return Err(INVALID);
        }
        let state = state();
        let mut found = hipPointerAttribute_t::default();
        if let Some((_, allocation)) = state.heap.find(pointer as u64) {
            found.r#type = allocation.kind;
            found.devicePointer = pointer.cast_mut();
            if allocation.kind == hipMemoryType::hipMemoryTypeHost {
                found.hostPointer = pointer.cast_mut();
            }
            found.allocationFlags = allocation.flags;
        }
        // SAFETY: null or valid.
        unsafe { put(attributes, found) }
    })
}

/// A copy operation; `None` for 0 bytes.
pub(super) fn copy(
    destination: *mut c_void,
    source: *const c_void,
    size: usize,
    kind: hipMemcpyKind,
) -> Outcome<Option<Operation>> {
    if size == 0 {
        return Ok(None);
    }
    if destination.is_null() || source.is_null() {
        return Err(INVALID);
    }
    Ok(Some(Operation::Copy {
        destination: destination as u64,
        source: source as u64,
        size,
        kind,
    }))
}

/// A fill operation; `None` for 0 elements.
pub(super) fn fill(
    destination: *mut c_void,
    value: c_int,
    width: usize,
    count: usize,
) -> Outcome<Option<Operation>> {
    if count == 0 {
        return Ok(None);
    }
    if destination.is_null() || !destination.addr().is_multiple_of(width) {
        return Err(INVALID);
    }
    Ok(Some(Operation::Fill {
        destination: destination as u64,
        value: value as u32,
        width,
        count,
    }))
}

/// Runs an operation in the default stream and waits for it.
pub(super) fn synchronous(operation: Outcome<Option<Operation>>) -> Outcome {
    state().outside_captures()?;
    enqueue(hipStream_t::NULL, |_| operation)
}

pub unsafe extern "C" fn hipMemcpy(
    destination: *mut c_void,
    source: *const c_void,
    size: usize,
    kind: hipMemcpyKind,
) -> hipError_t {
    call(|| synchronous(copy(destination, source, size, kind)))
}

pub unsafe extern "C" fn hipMemcpyAsync(
    destination: *mut c_void,
    source: *const c_void,
    size: usize,
    kind: hipMemcpyKind,
    stream: hipStream_t,
) -> hipError_t {
    call(|| enqueue(stream, |_| copy(destination, source, size, kind)))
}

pub unsafe extern "C" fn hipMemset(
    destination: *mut c_void,
    value: c_int,
    size: usize,
) -> hipError_t {
    call(|| synchronous(fill(destination, value, 1, size)))
}

pub unsafe extern "C" fn hipMemsetAsync(
    destination: *mut c_void,
    value: c_int,
    size: usize,
    stream: hipStream_t,
) -> hipError_t {
    call(|| enqueue(stream, |_| fill(destination, value, 1, size)))
}

pub unsafe extern "C" fn hipMemsetD32Async(
    destination: hipDeviceptr_t,
    value: c_int,
    count: usize,
    stream: hipStream_t,
) -> hipError_t {
    call(|| enqueue(stream, |_| fill(destination, value, 4, count)))
}
