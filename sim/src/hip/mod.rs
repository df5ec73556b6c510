//! The HIP runtime of the simulated device.
//!
//! It offers the functions of [`hip_sys::for_each_function!`], and some more that programs use
//! ([`for_each_extra!`](crate::for_each_extra), [`for_each_registration!`](crate::for_each_registration)), with HIP's semantics: device memory, pinned memory,
//! streams, events, modules, launches, stream capture and graphs. A program in the same process binds
//! to it by
//!
//! ```no_run
//! let hip = deltawave_sim::hip::runtime();
//! ```
//!
//! and others load the drop-in `libamdhip64.so` (package `deltawave-sim-dropin`).
//!
//! Work is done when it is enqueued, in the order of the calls: one legal execution of every program.
//! As on a real device, a kernel's fault is not an error of the launch but of what follows it:
//! every later call fails with `hipErrorIllegalAddress` or `hipErrorLaunchFailure` until
//! `hipDeviceReset` or [`clear_fault`]. [`last_fault`] tells what happened where. Users of one process that must not
//! share a fault each make a [`Session`].
//!
//! | what | file |
//! |---|---|
//! | the functions of the table | `api.rs`, `api_stream.rs`, `api_module.rs` |
//! | the other functions | `extras.rs` |
//! | embedded kernels, `<<<>>>`, HIP 5's properties | `registration.rs` |
//! | state of the device, errors, locking | `state.rs` |
//! | device memory and pinned memory | `heap.rs` |
//! | operations: copies, fills, launches | `work.rs` |
//! | stream capture, graphs | `capture.rs` |
//! | counters of launches | `counted.rs` |
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

/// The functions by name, for direct calls.
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

/// The address of a function of the simulated runtime, null if it has no function of this name.
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

/// What was launched of one kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KernelStatistics {
    /// Launches.
    pub launches: u64,
    /// Instructions executed, counted once per wave.
    pub wave_instructions: u64,
    /// Host seconds spent in them.
    pub seconds: f64,
}

/// The launches that were counted since the start or the last call, in order; they are forgotten.
pub fn take_counted_launches() -> Vec<CountedLaunch> {
    state::device().counted.take()
}

/// What was launched since the start or the last [`reset_statistics`], by kernel name.
pub fn statistics() -> BTreeMap<String, KernelStatistics> {
    state::device().statistics.clone()
}

/// Forgets what was launched.
pub fn reset_statistics() {
    state::device().statistics.clear();
}

/// How kernels are executed from now on. The defaults come from the environment
/// ([`options_from_environment`]).
pub fn set_options(options: crate::launch::Options) {
    state::device().options = options;
}

/// How kernels are executed.
pub fn options() -> crate::launch::Options {
    state::device().options
}

/// Makes the device this GPU, for those who ask for its properties from now on: an MI300X unless `DELTAWAVE_SIM_GPU` names
/// another.
pub fn set_gpu(gpu: crate::gpu::Gpu) {
    device::set_gpu(gpu);
    state::device().options.xccs = gpu.xcds;
}

/// The first fault of a kernel since the last `hipDeviceReset` or [`clear_fault`]; of several [`Session`]s, that of the
/// one that faulted last.
pub fn last_fault() -> Option<String> {
    let state = state::device();
    state.faults.last().map(|(_, fault)| fault.text.clone())
}

/// Forgets the faults of all sessions, so that the device works again. Unlike `hipDeviceReset`, memory, streams and
/// modules stay as they are.
pub fn clear_fault() {
    state::device().faults.clear();
}

/// Why the calling thread's last call failed, where the simulator knows more than the status code.
pub fn last_message() -> Option<String> {
    state::message()
}

pub use work::options_from_environment;
