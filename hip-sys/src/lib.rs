//! Raw bindings of the HIP runtime, loaded at run time and never linked.
//!
//! | concept | item | file |
//! |---|---|---|
//! | the functions, each with its C signature | [`for_each_function!`] | `table.rs` |
//! | a runtime whose functions can be called | [`Hip`] | `hip.rs` |
//! | the same functions on top of the CUDA driver | [`Hip::is_cuda`] | `cuda/` |
//! | where a runtime is looked for | [`Hip::load`], [`LoadError`] | `load.rs` |
//! | status codes | [`hipError_t`] | `status.rs` |
//! | what a failed call says | [`HipError`] | `error.rs` |
//! | handles, flags, argument structs | [`types`] | `types.rs` |
//! | properties of devices, and HIP 5's | [`hipDeviceProp_tR0600`], [`hipDeviceProp_tR0000`] | `properties.rs` |
//!
//! Nothing here is safe to call with wrong pointers; everything here is safe to load. A runtime that
//! lacks a function still loads: the call that needs the function fails, and says so.
//!
//! ```no_run
//! let hip = hip_sys::Hip::load(None)?;
//! let mut count = 0;
//! // SAFETY: `count` is valid for the call.
//! unsafe { hip.hipGetDeviceCount(&mut count)? };
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cuda;
mod error;
mod hip;
mod load;
mod properties;
mod status;
mod table;
pub mod types;

pub use error::{Attempt, HipError, LoadError};
pub use hip::{Hip, Resolver};
pub use load::{CUDA, LIBRARY_VARIABLE};
pub use properties::{hipDeviceProp_tR0000, hipDeviceProp_tR0600};
pub use status::hipError_t;
pub use types::*;
