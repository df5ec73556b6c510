//! Raw bindings of the HIP runtime, loaded at run time and never linked.
//!
//! | concept | item | file |
//! |---|---|---|
//! | the functions, each with its C signature | [`for_each_function!`] | `table.rs` |
//! | a loaded runtime, and calls of its functions | [`Hip`] | `hip.rs` |
//! | the same functions on top of the CUDA driver | [`Hip::is_cuda`] | `cuda/` |
//! | collectives of RCCL or NCCL | [`Ccl`] | `ccl.rs` |
//! | search for a runtime | [`Hip::load`], [`LoadError`] | `load.rs` |
//! | status codes | [`hipError_t`] | `status.rs` |
//! | errors of calls | [`HipError`] | `error.rs` |
//! | handles, flags, argument structs | [`types`] | `types.rs` |
//! | device properties of HIP 6 and 7, and of HIP 5 | [`hipDeviceProp_tR0600`], [`hipDeviceProp_tR0000`] | `properties.rs` |
//!
//! Calls with wrong pointers are undefined behaviour; loading is safe. A runtime that lacks a function still loads: a
//! call of that function returns an error that names it.
//!
//! ```no_run
//! let hip = hip_sys::Hip::load(None)?;
//! let mut count = 0;
//! // SAFETY: `count` is valid for the call.
//! unsafe { hip.hipGetDeviceCount(&mut count)? };
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod ccl;
mod cuda;
mod error;
mod hip;
mod load;
mod properties;
mod status;
mod table;
pub mod types;

pub use ccl::{
    CCL_VARIABLE, Ccl, CclError, NCCL_IN_PROGRESS, NCCL_SUCCESS, NCCL_UINT8, ncclComm_t,
    ncclConfig_t, ncclUniqueId,
};
pub use cuda::{BoxedTensor, TensorMap};
pub use error::{Attempt, HipError, LoadError};
pub use hip::{Hip, Resolver};
pub use load::{CUDA, LIBRARY_VARIABLE};
pub use properties::{hipDeviceProp_tR0000, hipDeviceProp_tR0600};
pub use status::hipError_t;
pub use types::*;
