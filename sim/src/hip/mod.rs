//! The HIP runtime on the simulated device.
//!
//! Implements the functions of [`hip_sys::for_each_function!`], and some more that programs use
//! ([`for_each_extra!`](crate::for_each_extra), [`for_each_registration!`](crate::for_each_registration)), with HIP's
//! semantics: device memory, pinned memory, streams, events, modules, launches, stream capture and graphs. A program in
//! the same process binds to it:
//!
//! ```no_run
//! let hip = deltawave_sim::hip::runtime();
//! ```
//!
//! Other programs load the drop-in `libamdhip64.so` (package `deltawave-sim-dropin`).
//!
//! Work is done when it is enqueued, in the order of the calls: one legal execution of every program. As on a real
//! device, a kernel's fault is not an error of its launch, but of the calls after it: each fails with
//! `hipErrorIllegalAddress` or `hipErrorLaunchFailure` until `hipDeviceReset` or [`clear_fault`]. [`last_fault`]
//! describes the fault and its place. Users in one process that must not share a fault each create a [`Session`].
//!
//! | content | file |
//! |---|---|
//! | functions of the table | `api.rs`, `api_stream.rs`, `api_module.rs` |
//! | further functions | `extras.rs` |
//! | embedded kernels, `<<<>>>`, HIP 5's properties | `registration.rs` |
//! | state of the device, errors, locking | `state.rs` |
//! | device memory and pinned memory | `heap.rs` |
//! | operations: copies, fills, launches | `work.rs` |
//! | stream capture, graphs | `capture.rs` |
//! | launches with counters | `counted.rs` |
//! | properties and attributes | `device.rs` |

mod api;
mod api_module;
mod api_stream;
mod capture;
mod counted;
mod device;
mod extras;
mod heap;
mod registration;
mod state;
mod work;

pub use counted::CountedLaunch;
pub use hip_sys;
pub use state::Session;

use core::ffi::c_void;
use hip_sys::address_of_function;
use std::collections::BTreeMap;

/// All functions by name, for direct calls.
pub mod functions {
    pub use super::api::*;
    pub use super::api_module::*;
    pub use super::api_stream::*;
    pub use super::extras::*;
    pub use super::registration::*;
}

macro_rules! resolve_extra {
    ($name:expr; $(fn $extra:ident($($arg:ident: $type:ty),*);)*) => {{
        use core::ffi::{c_char, c_int, c_uint};
        use hip_sys::{hipError_t, types::*};
        match $name {
            $(stringify!($extra) => {
                (functions::$extra as unsafe extern "C" fn($($type),*) -> hipError_t) as *const c_void
            })*
            name => registration(name),
        }
    }};
}

macro_rules! resolve_registration {
    ($name:expr; $(fn $function:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {{
        use core::ffi::{c_char, c_int, c_uint};
        use functions::{dim3, hipDeviceProp_tR0000, hipFuncAttributes};
        use hip_sys::{hipError_t, types::*};
        match $name {
            $(stringify!($function) => {
                (functions::$function as unsafe extern "C" fn($($type),*) -> $result) as *const c_void
            })*
            _ => core::ptr::null(),
        }
    }};
}

/// Address of function `name` of the simulated runtime; null if there is none.
pub fn resolver(name: &str) -> *const c_void {
    hip_sys::for_each_function!(address_of_function, functions, name, extra(name))
}

/// The simulated runtime, bound to the functions of this process.
pub fn runtime() -> hip_sys::Hip {
    // SAFETY: the casts in `resolver` check that the functions have the signatures of the table.
    unsafe { hip_sys::Hip::from_resolver("simulator", resolver) }
}

fn registration(name: &str) -> *const c_void {
    crate::for_each_registration!(resolve_registration, name)
}

fn extra(name: &str) -> *const c_void {
    crate::for_each_extra!(resolve_extra, name)
}

/// Statistics of one kernel's launches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KernelStatistics {
    /// Number of launches.
    pub launches: u64,
    /// Instructions executed, counted once per wave.
    pub wave_instructions: u64,
    /// Host time in seconds.
    pub seconds: f64,
}

/// Returns the launches with counters since the start or the last call, in order, and removes them.
pub fn take_counted_launches() -> Vec<CountedLaunch> {
    state::device().counted.take()
}

/// Statistics of launches since the start or the last [`reset_statistics`], by kernel name.
pub fn statistics() -> BTreeMap<String, KernelStatistics> {
    state::device().statistics.clone()
}

/// Clears the statistics.
pub fn reset_statistics() {
    state::device().statistics.clear();
}

/// Sets the options for launches from now on. The defaults come from the environment ([`options_from_environment`]).
pub fn set_options(options: crate::launch::Options) {
    state::device().options = options;
}

/// Options for launches.
pub fn options() -> crate::launch::Options {
    state::device().options
}

/// Selects the GPU that the device reports from now on. The default is an MI300X, or the GPU that `DELTAWAVE_SIM_GPU`
/// names.
pub fn set_gpu(gpu: crate::gpu::Gpu) {
    device::set_gpu(gpu);
    state::device().options.xccs = gpu.xcds;
}

/// Text of the first kernel fault since the last `hipDeviceReset` or [`clear_fault`]. If several [`Session`]s faulted,
/// the fault of the session that faulted last.
pub fn last_fault() -> Option<String> {
    let state = state::device();
    state.faults.last().map(|(_, fault)| fault.text.clone())
}

/// Clears the faults of all sessions, so that the device works again. Unlike with `hipDeviceReset`, memory, streams and
/// modules stay.
pub fn clear_fault() {
    state::device().faults.clear();
}

/// Reason why the calling thread's last call failed, if the simulator knows more than the status code.
pub fn last_message() -> Option<String> {
    state::message()
}

pub use work::options_from_environment;
