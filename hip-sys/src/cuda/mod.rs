//! The table's functions on top of the CUDA driver, so that an NVIDIA GPU runs what was written for HIP.
//!
//! | what | file |
//! |---|---|
//! | the driver's functions, opened at run time | `driver.rs` |
//! | what a call needs around it: context, last error | `state.rs` |
//! | the functions of the table | `device.rs`, `memory.rs`, `stream.rs`, `module.rs` |
//! | attributes and properties of devices | `attributes.rs` |
//!
//! Handles are the driver's own: a `hipStream_t` is a `CUstream`, device memory a `CUdeviceptr`, so that they can be
//! exchanged with other users of the device's primary context (the CUDA runtime, and what is built on it). HIP's
//! current device is a property of the thread; before each call the primary context of that device is made the
//! thread's current one.
//!
//! Status codes are those of the driver: where both interfaces have a code, number and meaning are the same (a test
//! lists them), and codes that HIP lacks keep the driver's number and name.

mod attributes;
mod device;
mod driver;
mod memory;
mod module;
mod state;
mod stream;

use core::ffi::c_void;

pub(crate) use driver::{Driver, LIBRARY};
pub(crate) use state::last_failure;

/// Every function, in one place for the table.
mod functions {
    pub use super::device::*;
    pub use super::memory::*;
    pub use super::module::*;
    pub use super::stream::*;
}

macro_rules! resolve {
    ($name:expr;
        status { $($(#[$meta:meta])* fn $status:ident($($arg:ident: $type:ty),*);)* }
        other { $($(#[$other_meta:meta])* fn $other:ident($($other_arg:ident: $other_type:ty),*) -> $result:ty;)* }
    ) => {{
        // The casts to function pointers check every signature against the table.
        use core::ffi::{c_char, c_int, c_uint};
        use crate::{hipDeviceProp_tR0600, hipError_t, types::*};
        match $name {
            $(stringify!($status) => {
                (functions::$status as unsafe extern "C" fn($($type),*) -> hipError_t) as *const c_void
            })*
            $(stringify!($other) => {
                (functions::$other as unsafe extern "C" fn($($other_type),*) -> $result) as *const c_void
            })*
            _ => core::ptr::null(),
        }
    }};
}

/// The address of a function of the table; null if the driver lacks what is behind it.
pub(crate) fn resolver(name: &str) -> *const c_void {
    match missing(name) {
        None => crate::for_each_function!(resolve, name),
        Some(_) => core::ptr::null(),
    }
}

/// The first driver function behind a function of the table that the driver lacks.
pub(crate) fn missing(name: &str) -> Option<&'static str> {
    let driver = Driver::get()?;
    let behind = device::BEHIND
        .iter()
        .chain(memory::BEHIND)
        .chain(stream::BEHIND)
        .chain(module::BEHIND);
    let (_, symbols) = behind.into_iter().find(|(hip, _)| *hip == name)?;
    symbols.iter().copied().find(|symbol| !driver.has(symbol))
}
