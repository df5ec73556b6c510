//! HIP functions for modules, kernels and launches, on the CUDA driver.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use super::driver::{
    Address, Driver, Failure, Handle, INVALID_VALUE, LaunchAttribute, LaunchConfig, Outcome,
    PROGRAMMATIC_STREAM_SERIALIZATION,
};
use super::state::{given, hip_functions, in_context};
use crate::types::*;

hip_functions! {
    // PTX, which ends with a null byte, or a cubin or fat binary.
    in_context fn hipModuleLoadData(module: *mut hipModule_t, image: *const c_void) needs [cuModuleLoadDataEx] |driver| {
        load(driver, given(module)?.cast(), given(image.cast_mut())?)
    }
    in_context fn hipModuleUnload(module: hipModule_t) needs [cuModuleUnload] |driver| {
        driver.cuModuleUnload(module.0)
    }
    in_context fn hipModuleGetFunction(function: *mut hipFunction_t, module: hipModule_t, name: *const c_char)
        needs [cuModuleGetFunction] |driver| {
        driver.cuModuleGetFunction(given(function)?.cast(), module.0, given(name.cast_mut())?)
    }
    in_context fn hipModuleGetGlobal(pointer: *mut hipDeviceptr_t, size: *mut usize, module: hipModule_t, name: *const c_char)
        needs [cuModuleGetGlobal_v2] |driver| {
        let mut found: Address = 0;
        // Either may be null, for the driver too.
        driver.cuModuleGetGlobal_v2(&mut found, size, module.0, given(name.cast_mut())?)?;
        if !pointer.is_null() {
            *pointer = core::ptr::with_exposed_provenance_mut(found as usize);
        }
        Ok(())
    }
    // The attributes' numbers are the driver's.
    in_context fn hipFuncGetAttribute(value: *mut c_int, attribute: hipFunction_attribute, function: hipFunction_t)
        needs [cuFuncGetAttribute] |driver| {
        driver.cuFuncGetAttribute(given(value)?, attribute.0, function.0)
    }
    in_context fn hipFuncSetAttribute(function: *const c_void, attribute: hipFuncAttribute, value: c_int)
        needs [cuFuncSetAttribute] |driver| {
        driver.cuFuncSetAttribute(function.cast_mut(), attribute.0, value)
    }
    in_context fn hipModuleLaunchKernel(
        function: hipFunction_t,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: hipStream_t,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void
    ) needs [cuLaunchKernel] |driver| {
        let mut packed = Packed::read(extra)?;
        driver.cuLaunchKernel(
            function.0,
            grid_x,
            grid_y,
            grid_z,
            block_x,
            block_y,
            block_z,
            shared_bytes,
            stream.0,
            parameters,
            packed.as_mut().map_or(null_mut(), |packed| packed.0.as_mut_ptr()),
        )
    }
    in_context fn hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int,
        function: hipFunction_t,
        block_size: c_int,
        dynamic_shared_bytes: usize
    ) needs [cuOccupancyMaxActiveBlocksPerMultiprocessor] |driver| {
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(given(blocks)?, function.0, block_size, dynamic_shared_bytes)
    }
}

/// Implements [`Hip::launch_overlapping`](crate::Hip::launch_overlapping).
///
/// # Safety
/// As for `hipModuleLaunchKernel`. The kernel itself waits for the kernel before it.
pub(crate) unsafe fn launch_overlapping(
    function: hipFunction_t,
    workgroups: c_uint,
    threads: c_uint,
    shared_bytes: c_uint,
    stream: hipStream_t,
    parameters: *mut *mut c_void,
) -> crate::hipError_t {
    let attribute = LaunchAttribute {
        id: PROGRAMMATIC_STREAM_SERIALIZATION,
        padding: 0,
        value: 1,
        rest: [0; 15],
    };
    let config = LaunchConfig {
        grid: [workgroups, 1, 1],
        block: [threads, 1, 1],
        shared_bytes,
        stream: stream.0,
        attributes: &attribute,
        attribute_count: 1,
    };
    // SAFETY: the caller keeps the function's contract; the driver copies the configuration.
    in_context(|driver| unsafe {
        driver.cuLaunchKernelEx(&config, function.0, parameters, null_mut())
    })
}

/// Loads a module. A failure carries the log of the driver's compiler.
///
/// # Safety
/// As the driver documents.
unsafe fn load(driver: &Driver, module: *mut Handle, image: *const c_void) -> Outcome {
    // `CU_JIT_ERROR_LOG_BUFFER` and `_SIZE_BYTES` of cuda.h.
    let mut options: [c_uint; 2] = [5, 6];
    let mut log = vec![0u8; 16 << 10];
    // The second value is a number where the driver's interface has a pointer.
    let mut values = [
        log.as_mut_ptr().cast::<c_void>(),
        core::ptr::without_provenance_mut(log.len()),
    ];
    // SAFETY: the log is as long as said; the caller answers for module and image.
    let loaded = unsafe {
        driver.cuModuleLoadDataEx(
            module,
            image,
            options.len() as c_uint,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    loaded.map_err(|failure| {
        let text = CStr::from_bytes_until_nul(&log).unwrap_or_default();
        Failure {
            log: text.to_string_lossy().into_owned(),
            ..failure
        }
    })
}

/// Packed kernel arguments, in the form that the driver takes in `extra`.
struct Packed([*mut c_void; 5]);

impl Packed {
    /// Converts HIP's `extra`. Pointer and size have the same keys in both interfaces; the end of the list is 3 in HIP,
    /// 0 in CUDA.
    ///
    /// # Safety
    /// `extra` is null, or a list as HIP defines it.
    unsafe fn read(extra: *mut *mut c_void) -> Outcome<Option<Self>> {
        if extra.is_null() {
            return Ok(None);
        }
        let mut packed = [
            HIP_LAUNCH_PARAM_BUFFER_POINTER,
            null_mut(),
            HIP_LAUNCH_PARAM_BUFFER_SIZE,
            null_mut(),
            null_mut(),
        ];
        let mut next = extra;
        for _ in 0..=packed.len() / 2 {
            // SAFETY: the list goes on until its end was read.
            let (name, value) = unsafe {
                let name = *next;
                if name == HIP_LAUNCH_PARAM_END {
                    let whole = !packed[1].is_null() && !packed[3].is_null();
                    return match whole {
                        true => Ok(Some(Packed(packed))),
                        false => Err(Failure::refused(INVALID_VALUE)),
                    };
                }
                (name, *next.add(1))
            };
            match name {
                HIP_LAUNCH_PARAM_BUFFER_POINTER => packed[1] = value,
                HIP_LAUNCH_PARAM_BUFFER_SIZE => packed[3] = value,
                _ => return Err(Failure::refused(INVALID_VALUE)),
            }
            // SAFETY: as above.
            next = unsafe { next.add(2) };
        }
        Err(Failure::refused(INVALID_VALUE))
    }
}
