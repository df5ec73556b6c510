//! HIP functions on top of the CUDA driver, so that programs written for HIP run on an NVIDIA GPU.
//!
//! | what | file |
//! |---|---|
//! | the driver's functions, opened at run time | `driver.rs` |
//! | a call's surroundings: initialisation, context, last error | `state.rs` |
//! | the HIP functions | `device.rs`, `memory.rs`, `stream.rs`, `module.rs` |
//! | attributes and properties of devices | `attributes.rs` |
//! | tensors of which kernels copy boxes | `boxes.rs` |
//!
//! Handles are the driver's own: a `hipStream_t` is a `CUstream`, device memory a `CUdeviceptr`. They can be exchanged
//! with other users of the device's primary context, such as the CUDA runtime and libraries built on it. HIP's current
//! device is a property of the thread. Before each call, the primary context of that device becomes the thread's
//! current context.
//!
//! Status codes are the driver's. A code that both interfaces have means the same in both; a test lists these codes. A
//! code that HIP lacks keeps the driver's number and name.

mod attributes;
mod boxes;
mod device;
mod driver;
mod memory;
mod module;
mod state;
mod stream;

use core::ffi::c_void;

use crate::address_of_function;

pub(crate) use boxes::tensor_map;
pub use boxes::{BoxedTensor, TensorMap};
pub(crate) use driver::{Driver, LIBRARY};
pub(crate) use module::launch_overlapping;
pub(crate) use state::last_failure;

/// All HIP functions, in one module for the table.
mod functions {
    pub use super::device::*;
    pub use super::memory::*;
    pub use super::module::*;
    pub use super::stream::*;
}

/// Address of HIP function `name`; null if the driver lacks a function that it needs.
pub(crate) fn resolver(name: &str) -> *const c_void {
    match missing(name) {
        None => {
            crate::for_each_function!(address_of_function, functions, name, core::ptr::null())
        }
        Some(_) => core::ptr::null(),
    }
}

/// The first driver function that HIP function `name` needs and the driver lacks.
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
