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

use crate::address_of_function;

pub(crate) use driver::{Driver, LIBRARY};
pub(crate) use module::launch_overlapping;
pub(crate) use state::last_failure;

/// Every function, in one place for the table.
mod functions {
    pub use super::device::*;
    pub use super::memory::*;
    pub use super::module::*;
    pub use super::stream::*;
}

/// The address of a function of the table; null if the driver lacks what is behind it.
pub(crate) fn resolver(name: &str) -> *const c_void {
    match missing(name) {
        None => {
            crate::for_each_function!(address_of_function, functions, name, core::ptr::null())
        }
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
