//! HIP functions that programs commonly call and the table of `hip_sys` lacks.
#![allow(non_snake_case, missing_docs)]
// each is documented in the table it is listed in
// As HIP documents them: pointers are null or valid, names are C strings.
#![allow(clippy::missing_safety_doc)]

use super::api::*;
use super::api_module::{hipModuleLoadData, load, text};
use super::api_stream::*;
use super::device;
use super::state::{call, last_error, put};
use super::work::enqueue;
use core::ffi::{c_char, c_int, c_uint, c_void};
use hip_sys::{hipError_t, types::*};

/// Calls a macro with every function that the simulator offers beyond `hip_sys::for_each_function!`:
/// `$callback! { $($extra)* ; fn name(..); .. }`. All of them return `hipError_t`.
#[macro_export]
macro_rules! for_each_extra {
    ($callback:ident $(, $($extra:tt)*)?) => {
        $callback! {
            $($($extra)*)? ;
            fn hipPeekAtLastError();
            fn hipDeviceGet(device: *mut hipDevice_t, ordinal: c_int);
            fn hipDeviceGetName(name: *mut c_char, size: c_int, device: hipDevice_t);
            fn hipDeviceTotalMem(bytes: *mut usize, device: hipDevice_t);
            fn hipDeviceComputeCapability(major: *mut c_int, minor: *mut c_int, device: hipDevice_t);
            fn hipDeviceGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
            fn hipMallocAsync(pointer: *mut *mut c_void, size: usize, stream: hipStream_t);
            fn hipFreeAsync(pointer: *mut c_void, stream: hipStream_t);
            fn hipExtMallocWithFlags(pointer: *mut *mut c_void, size: usize, flags: c_uint);
            fn hipMallocHost(pointer: *mut *mut c_void, size: usize);
            fn hipHostAlloc(pointer: *mut *mut c_void, size: usize, flags: c_uint);
            fn hipFreeHost(pointer: *mut c_void);
            fn hipHostGetDevicePointer(pointer: *mut *mut c_void, host: *mut c_void, flags: c_uint);
            fn hipMemcpyWithStream(destination: *mut c_void, source: *const c_void, size: usize, kind: hipMemcpyKind, stream: hipStream_t);
            fn hipMemcpyHtoD(destination: hipDeviceptr_t, source: *const c_void, size: usize);
            fn hipMemcpyDtoH(destination: *mut c_void, source: hipDeviceptr_t, size: usize);
            fn hipMemcpyDtoD(destination: hipDeviceptr_t, source: hipDeviceptr_t, size: usize);
            fn hipMemcpyHtoDAsync(destination: hipDeviceptr_t, source: *const c_void, size: usize, stream: hipStream_t);
            fn hipMemcpyDtoHAsync(destination: *mut c_void, source: hipDeviceptr_t, size: usize, stream: hipStream_t);
            fn hipMemcpyDtoDAsync(destination: hipDeviceptr_t, source: hipDeviceptr_t, size: usize, stream: hipStream_t);
            fn hipMemsetD8(destination: hipDeviceptr_t, value: u8, count: usize);
            fn hipMemsetD16(destination: hipDeviceptr_t, value: u16, count: usize);
            fn hipMemsetD32(destination: hipDeviceptr_t, value: c_int, count: usize);
            fn hipMemsetD8Async(destination: hipDeviceptr_t, value: u8, count: usize, stream: hipStream_t);
            fn hipMemsetD16Async(destination: hipDeviceptr_t, value: u16, count: usize, stream: hipStream_t);
            fn hipStreamCreate(stream: *mut hipStream_t);
            fn hipStreamCreateWithPriority(stream: *mut hipStream_t, flags: c_uint, priority: c_int);
            fn hipStreamGetFlags(stream: hipStream_t, flags: *mut c_uint);
            fn hipEventCreate(event: *mut hipEvent_t);
            fn hipEventRecordWithFlags(event: hipEvent_t, stream: hipStream_t, flags: c_uint);
            fn hipGraphInstantiateWithFlags(executable: *mut hipGraphExec_t, graph: hipGraph_t, flags: u64);
            fn hipModuleLoad(module: *mut hipModule_t, path: *const c_char);
            fn hipModuleLoadDataEx(module: *mut hipModule_t, image: *const c_void, count: c_uint, options: *mut c_int, values: *mut *mut c_void);
        }
    };
}

pub unsafe extern "C" fn hipPeekAtLastError() -> hipError_t {
    last_error(false)
}

pub unsafe extern "C" fn hipDeviceGet(device: *mut hipDevice_t, ordinal: c_int) -> hipError_t {
    call(|| {
        only_device(ordinal)?;
        // SAFETY: null or valid.
        unsafe { put(device, ordinal) }
    })
}

pub unsafe extern "C" fn hipDeviceGetName(
    name: *mut c_char,
    size: c_int,
    device: hipDevice_t,
) -> hipError_t {
    call(|| {
        only_device(device)?;
        let Some(room) = usize::try_from(size).ok().filter(|s| *s > 0) else {
            return Err(hipError_t::hipErrorInvalidValue);
        };
        let own = device::name();
        let bytes = own.as_bytes();
        let length = bytes.len().min(room - 1);
        for (i, byte) in bytes[..length].iter().chain(&[0]).enumerate() {
            // SAFETY: null or valid for `size` bytes, of which this is one.
            unsafe { put(name.wrapping_add(i), *byte as c_char)? };
        }
        Ok(())
    })
}

pub unsafe extern "C" fn hipDeviceTotalMem(bytes: *mut usize, device: hipDevice_t) -> hipError_t {
    call(|| {
        only_device(device)?;
        // SAFETY: null or valid.
        unsafe { put(bytes, device::total_memory()) }
    })
}

pub unsafe extern "C" fn hipDeviceComputeCapability(
    major: *mut c_int,
    minor: *mut c_int,
    device: hipDevice_t,
) -> hipError_t {
    call(|| {
        only_device(device)?;
        // SAFETY: null or valid.
        unsafe {
            put(major, 9)?;
            put(minor, 4)
        }
    })
}

pub unsafe extern "C" fn hipDeviceGetStreamPriorityRange(
    least: *mut c_int,
    greatest: *mut c_int,
) -> hipError_t {
    call(|| {
        for (to, value) in [least, greatest].into_iter().zip(PRIORITIES) {
            if !to.is_null() {
                // SAFETY: not null, so valid.
                unsafe { put(to, value)? };
            }
        }
        Ok(())
    })
}

pub unsafe extern "C" fn hipMallocAsync(
    pointer: *mut *mut c_void,
    size: usize,
    stream: hipStream_t,
) -> hipError_t {
    call(|| {
        super::state::device().stream(stream)?;
        // SAFETY: null or valid.
        unsafe { allocate(pointer, size, hipMemoryType::hipMemoryTypeDevice, 0) }
    })
}

pub unsafe extern "C" fn hipFreeAsync(pointer: *mut c_void, stream: hipStream_t) -> hipError_t {
    call(|| {
        super::state::device().stream(stream)?;
        free(pointer, hipMemoryType::hipMemoryTypeDevice)
    })
}

pub unsafe extern "C" fn hipExtMallocWithFlags(
    pointer: *mut *mut c_void,
    size: usize,
    flags: c_uint,
) -> hipError_t {
    // SAFETY: null or valid.
    call(|| unsafe { allocate(pointer, size, hipMemoryType::hipMemoryTypeDevice, flags) })
}

pub unsafe extern "C" fn hipMallocHost(pointer: *mut *mut c_void, size: usize) -> hipError_t {
    // SAFETY: passed on.
    unsafe { hipHostMalloc(pointer, size, 0) }
}

pub unsafe extern "C" fn hipHostAlloc(
    pointer: *mut *mut c_void,
    size: usize,
    flags: c_uint,
) -> hipError_t {
    // SAFETY: passed on.
    unsafe { hipHostMalloc(pointer, size, flags) }
}

pub unsafe extern "C" fn hipFreeHost(pointer: *mut c_void) -> hipError_t {
    // SAFETY: passed on.
    unsafe { hipHostFree(pointer) }
}

pub unsafe extern "C" fn hipHostGetDevicePointer(
    pointer: *mut *mut c_void,
    host: *mut c_void,
    flags: c_uint,
) -> hipError_t {
    call(|| {
        let state = super::state::device();
        match state.heap.find(host as u64) {
            // SAFETY: null or valid.
            Some((_, a)) if flags == 0 && a.kind == hipMemoryType::hipMemoryTypeHost => unsafe {
                put(pointer, host)
            },
            _ => Err(hipError_t::hipErrorInvalidValue),
        }
    })
}

pub unsafe extern "C" fn hipMemcpyWithStream(
    destination: *mut c_void,
    source: *const c_void,
    size: usize,
    kind: hipMemcpyKind,
    stream: hipStream_t,
) -> hipError_t {
    call(|| {
        {
            let mut state = super::state::device();
            let key = state.stream(stream)?;
            state.may_wait(key)?;
        }
        enqueue(stream, |_| copy(destination, source, size, kind))
    })
}

const TO_DEVICE: hipMemcpyKind = hipMemcpyKind::hipMemcpyHostToDevice;
const TO_HOST: hipMemcpyKind = hipMemcpyKind::hipMemcpyDeviceToHost;
const ON_DEVICE: hipMemcpyKind = hipMemcpyKind::hipMemcpyDeviceToDevice;

pub unsafe extern "C" fn hipMemcpyHtoD(
    destination: hipDeviceptr_t,
    source: *const c_void,
    size: usize,
) -> hipError_t {
    // SAFETY: passed on.
    unsafe { hipMemcpy(destination, source, size, TO_DEVICE) }
}

pub unsafe extern "C" fn hipMemcpyDtoH(
    destination: *mut c_void,
    source: hipDeviceptr_t,
    size: usize,
) -> hipError_t {
    // SAFETY: passed on.
    unsafe { hipMemcpy(destination, source, size, TO_HOST) }
}

pub unsafe extern "C" fn hipMemcpyDtoD(
    destination: hipDeviceptr_t,
    source: hipDeviceptr_t,
    size: usize,
) -> hipError_t {
    // SAFETY: passed on.
    unsafe { hipMemcpy(destination, source, size, ON_DEVICE) }
}

pub unsafe extern "C" fn hipMemcpyHtoDAsync(
    destination: hipDeviceptr_t,
    source: *const c_void,
    size: usize,
    stream: hipStream_t,
) -> hipError_t {
    // SAFETY: passed on.
    unsafe { hipMemcpyAsync(destination, source, size, TO_DEVICE, stream) }
}

pub unsafe extern "C" fn hipMemcpyDtoHAsync(
    destination: *mut c_void,
    source: hipDeviceptr_t,
    size: usize,
    stream: hipStream_t,
) -> hipError_t {
    // SAFETY: passed on.
    unsafe { hipMemcpyAsync(destination, source, size, TO_HOST, stream) }
}

pub unsafe extern "C" fn hipMemcpyDtoDAsync(
    destination: hipDeviceptr_t,
    source: hipDeviceptr_t,
    size: usize,
    stream: hipStream_t,
) -> hipError_t {
    // SAFETY: passed on.
    unsafe { hipMemcpyAsync(destination, source, size, ON_DEVICE, stream) }
}

pub unsafe extern "C" fn hipMemsetD8(
    destination: hipDeviceptr_t,
    value: u8,
    count: usize,
) -> hipError_t {
    call(|| synchronous(fill(destination, value.into(), 1, count)))
}

pub unsafe extern "C" fn hipMemsetD16(
    destination: hipDeviceptr_t,
    value: u16,
    count: usize,
) -> hipError_t {
    call(|| synchronous(fill(destination, value.into(), 2, count)))
}

pub unsafe extern "C" fn hipMemsetD32(
    destination: hipDeviceptr_t,
    value: c_int,
    count: usize,
) -> hipError_t {
    call(|| synchronous(fill(destination, value, 4, count)))
}

pub unsafe extern "C" fn hipMemsetD8Async(
    destination: hipDeviceptr_t,
    value: u8,
    count: usize,
    stream: hipStream_t,
) -> hipError_t {
    call(|| enqueue(stream, |_| fill(destination, value.into(), 1, count)))
}

pub unsafe extern "C" fn hipMemsetD16Async(
    destination: hipDeviceptr_t,
    value: u16,
    count: usize,
    stream: hipStream_t,
) -> hipError_t {
    call(|| enqueue(stream, |_| fill(destination, value.into(), 2, count)))
}

pub unsafe extern "C" fn hipStreamCreate(stream: *mut hipStream_t) -> hipError_t {
    // SAFETY: passed on.
    unsafe { hipStreamCreateWithFlags(stream, 0) }
}

/// Priorities have no effect on the work.
pub unsafe extern "C" fn hipStreamCreateWithPriority(
    stream: *mut hipStream_t,
    flags: c_uint,
    _priority: c_int,
) -> hipError_t {
    // SAFETY: passed on.
    unsafe { hipStreamCreateWithFlags(stream, flags) }
}

pub unsafe extern "C" fn hipStreamGetFlags(stream: hipStream_t, flags: *mut c_uint) -> hipError_t {
    call(|| {
        let state = super::state::device();
        let key = state.stream(stream)?;
        let found = state.streams.get(&key).map_or(0, |s| s.flags);
        // SAFETY: null or valid.
        unsafe { put(flags, found) }
    })
}

pub unsafe extern "C" fn hipEventCreate(event: *mut hipEvent_t) -> hipError_t {
    // SAFETY: passed on.
    unsafe { hipEventCreateWithFlags(event, 0) }
}

pub unsafe extern "C" fn hipEventRecordWithFlags(
    event: hipEvent_t,
    stream: hipStream_t,
    _flags: c_uint,
) -> hipError_t {
    // SAFETY: passed on.
    unsafe { hipEventRecord(event, stream) }
}

pub unsafe extern "C" fn hipGraphInstantiateWithFlags(
    executable: *mut hipGraphExec_t,
    graph: hipGraph_t,
    _flags: u64,
) -> hipError_t {
    let (node, log) = (core::ptr::null_mut(), core::ptr::null_mut());
    // SAFETY: passed on.
    unsafe { hipGraphInstantiate(executable, graph, node, log, 0) }
}

pub unsafe extern "C" fn hipModuleLoad(
    module: *mut hipModule_t,
    path: *const c_char,
) -> hipError_t {
    call(|| {
        if module.is_null() {
            return Err(hipError_t::hipErrorInvalidValue);
        }
        // SAFETY: null or a C string.
        let path = unsafe { text(path)? };
        let bytes = std::fs::read(path).map_err(|_| hipError_t::hipErrorFileNotFound)?;
        let loaded = load(&bytes)?;
        // SAFETY: valid.
        unsafe { put(module, loaded) }
    })
}

/// The options are ignored: they concern a just-in-time compiler, and there is none.
pub unsafe extern "C" fn hipModuleLoadDataEx(
    module: *mut hipModule_t,
    image: *const c_void,
    _count: c_uint,
    _options: *mut c_int,
    _values: *mut *mut c_void,
) -> hipError_t {
    // SAFETY: passed on.
    unsafe { hipModuleLoadData(module, image) }
}
