//! HIP functions for devices and errors, on the CUDA driver.

#![allow(non_snake_case)]

use core::ffi::{CStr, c_char, c_int, c_uint};

use super::attributes;
use super::driver::{Driver, Failure, INVALID_VALUE};
use super::state::{self, current_device, device, given, hip_functions};
use crate::{hipDeviceAttribute_t, hipDeviceProp_tR0600, hipError_t};

hip_functions! {
    without_context fn hipInit(flags: c_uint) needs [cuInit] |_driver| {
        match flags {
            0 => Ok(()),
            _ => Err(Failure::refused(INVALID_VALUE)),
        }
    }
    without_context fn hipDriverGetVersion(version: *mut c_int) needs [cuDriverGetVersion] |driver| {
        driver.cuDriverGetVersion(given(version)?)
    }
    // There is no HIP runtime: the version of CUDA that the driver implements, 1000 * major + 10 * minor.
    without_context fn hipRuntimeGetVersion(version: *mut c_int) needs [cuDriverGetVersion] |driver| {
        driver.cuDriverGetVersion(given(version)?)
    }
    without_context fn hipGetDeviceCount(count: *mut c_int) needs [cuDeviceGetCount] |driver| {
        driver.cuDeviceGetCount(given(count)?)
    }
    without_context fn hipSetDevice(ordinal: c_int) needs [cuDeviceGet, cuDevicePrimaryCtxRetain, cuCtxSetCurrent] |driver| {
        state::set_device(driver, ordinal)
    }
    without_context fn hipGetDevice(ordinal: *mut c_int) needs [] |_driver| {
        *given(ordinal)? = current_device();
        Ok(())
    }
    without_context fn hipGetDevicePropertiesR0600(properties: *mut hipDeviceProp_tR0600, ordinal: c_int)
        needs [cuDeviceGet, cuDeviceGetName, cuDeviceTotalMem_v2, cuDeviceGetAttribute] |driver| {
        *given(properties)? = attributes::properties(driver, device(driver, ordinal)?)?;
        Ok(())
    }
    without_context fn hipDeviceGetAttribute(value: *mut c_int, attribute: hipDeviceAttribute_t, ordinal: c_int)
        needs [cuDeviceGet, cuDeviceTotalMem_v2, cuDeviceGetAttribute] |driver| {
        *given(value)? = attributes::attribute(driver, attribute, device(driver, ordinal)?)?;
        Ok(())
    }
    in_context fn hipDeviceSynchronize() needs [cuCtxSynchronize] |driver| {
        driver.cuCtxSynchronize()
    }
    without_context fn hipDeviceReset() needs [cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxReset_v2] |driver| {
        state::reset(driver)
    }
}

/// Returns the calling thread's last error and clears it.
pub unsafe extern "C" fn hipGetLastError() -> hipError_t {
    state::take_last_error()
}

/// The name of a status code: HIP's, or the CUDA driver's if HIP has none.
pub unsafe extern "C" fn hipGetErrorName(code: hipError_t) -> *const c_char {
    let name = code
        .c_name()
        .or_else(|| state::text(code.0, Driver::cuGetErrorName));
    name.map_or(c"unknown error".as_ptr(), CStr::as_ptr)
}

/// The CUDA driver's description of a status code.
pub unsafe extern "C" fn hipGetErrorString(code: hipError_t) -> *const c_char {
    let meaning = state::text(code.0, Driver::cuGetErrorString).or_else(|| code.c_name());
    meaning.map_or(c"unknown error".as_ptr(), CStr::as_ptr)
}
