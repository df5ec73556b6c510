//! C library: the functions that `include/deltawave.h` declares.
//!
//! Every function checks its pointers and structs (`read.rs`), calls the Rust API, and turns errors into a status and a
//! text (`status.rs`). No panic leaves it.
#![allow(non_camel_case_types)]
// Callers promise what the header says: pointers are valid, or null where null is allowed.
#![allow(clippy::missing_safety_doc)]

#[doc(hidden)]
pub mod abi;
mod backward;
mod communicator;
mod context;
mod conv;
mod conv_backward;
mod decode;
mod gate;
mod layer;
mod layer_backward;
mod lengths;
mod norm;
mod parallel;
mod parallel_backward;
mod prefill;
mod read;
mod states;
mod status;

pub use backward::*;
pub use communicator::*;
pub use context::*;
pub use conv::*;
pub use conv_backward::*;
pub use decode::*;
pub use gate::*;
pub use layer::*;
pub use layer_backward::*;
pub use norm::*;
pub use parallel::*;
pub use parallel_backward::*;
pub use prefill::*;
pub use status::{dw_abi_version, dw_archs, dw_last_error, dw_version};
