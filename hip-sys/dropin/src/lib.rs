//! Drop-in `libamdhip64.so` on top of the CUDA driver: exports the HIP runtime's functions, so that a HIP program that
//! loads its kernels as modules runs on an NVIDIA GPU.
#![allow(non_snake_case)]
// As HIP documents them.
#![allow(clippy::missing_safety_doc, clippy::too_many_arguments)]

use core::ffi::{c_char, c_int, c_uint, c_void};
use std::error::Error as _;
use std::path::Path;
use std::sync::OnceLock;

use hip_sys::{
    CUDA, Hip, HipError, hipDeviceProp_tR0000, hipDeviceProp_tR0600, hipError_t, types::*,
};

/// The functions on top of the CUDA driver. `None` if the driver cannot be loaded: stderr then says why, once.
fn table() -> Option<&'static Hip> {
    static TABLE: OnceLock<Option<Hip>> = OnceLock::new();
    let load = || match Hip::load(Some(Path::new(CUDA))) {
        Ok(hip) => Some(hip),
        Err(error) => {
            // A HIP program gets only a status number.
            let cause = error.source().map(|cause| format!(": {cause}"));
            eprintln!("libamdhip64 on CUDA: {error}{}", cause.unwrap_or_default());
            None
        }
    };
    TABLE.get_or_init(load).as_ref()
}

/// The HIP status of an outcome.
fn status(outcome: Result<(), HipError>) -> hipError_t {
    match outcome {
        Ok(()) => hipError_t::hipSuccess,
        Err(HipError::Status { code, .. }) => code,
        Err(_) => hipError_t::hipErrorNotSupported,
    }
}

macro_rules! export {
    (;
        status { $($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),*);)* }
        other { $($(#[$other_meta:meta])* fn $other:ident($($other_arg:ident: $other_type:ty),*) -> $result:ty;)* }
    ) => {
        $(
            $(#[$meta])*
            // SAFETY: the name is that of a function of the HIP runtime, which this library stands for.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> hipError_t {
                match table() {
                    // SAFETY: the caller keeps the function's contract, which is passed on.
                    Some(hip) => status(unsafe { hip.$name($($arg),*) }),
                    None => hipError_t::hipErrorNoDevice,
                }
            }
        )*
        $(
            $(#[$other_meta])*
            // SAFETY: as above.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $other($($other_arg: $other_type),*) -> $result {
                // SAFETY: as above.
                let answer = table().map(|hip| unsafe { hip.$other($($other_arg),*) });
                answer.and_then(Result::ok).unwrap_or_else(|| Unanswered::$other($($other_arg),*))
            }
        )*
    };
}
hip_sys::for_each_function!(export);

/// Return values of the functions without a status, for when no driver is loaded.
struct Unanswered;

impl Unanswered {
    fn hipGetLastError() -> hipError_t {
        hipError_t::hipErrorNoDevice
    }

    fn hipGetErrorName(code: hipError_t) -> *const c_char {
        match code {
            hipError_t::hipErrorNoDevice => c"hipErrorNoDevice",
            _ => c"hipErrorUnknown",
        }
        .as_ptr()
    }

    fn hipGetErrorString(code: hipError_t) -> *const c_char {
        match code {
            hipError_t::hipErrorNoDevice => c"no CUDA driver could be loaded",
            _ => c"unknown error",
        }
        .as_ptr()
    }
}

/// Properties of a device in HIP 5's layout.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDeviceProperties(
    properties: *mut hipDeviceProp_tR0000,
    device: c_int,
) -> hipError_t {
    if properties.is_null() {
        return hipError_t::hipErrorInvalidValue;
    }
    let mut new = hipDeviceProp_tR0600::zeroed();
    // SAFETY: `new` is valid for a write of that struct.
    let code = unsafe { hipGetDevicePropertiesR0600(&mut new, device) };
    if code == hipError_t::hipSuccess {
        // SAFETY: not null, and the caller says that it is valid for a write.
        unsafe { properties.write((&new).into()) };
    }
    code
}
