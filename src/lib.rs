//! HIP kernels for Gated DeltaNet inference on AMD Instinct MI300 (gfx942), behind a safe API.
//!
//! | concept | type | file |
//! |---|---|---|
//! | chunked prefill | [`prefill::Prefill`], [`prefill::DevicePrefill`] | `prefill.rs`, `hip/kernels/prefill_*.hip` |
//! | decode, one or a few tokens at a time | [`decode::Decode`] | `decode.rs`, `hip/kernels/decode.hip` |
//! | what accepted tokens leave behind | [`commit::Commit`] | `commit.rs`, `hip/kernels/commit.hip` |
//! | convolution of q, k and v | [`conv::Conv`], [`conv::DeviceConv`] | `conv.rs`, `hip/kernels/conv.hip` |
//! | gated norm of the outputs | [`norm::GatedNorm`] | `norm.rs`, `hip/kernels/norm.hip` |
//! | a whole layer | [`layer::Layer`] | `layer.rs` |
//! | gates | [`gate::Gate`] | `gate.rs`, `hip/kernels/gate.hip` |
//! | device with its kernels loaded | [`runtime::Context`] | `runtime.rs` |
//! | streams, events, graphs | [`runtime::Stream`], [`runtime::Event`], [`runtime::Graph`] | `runtime.rs` |
//! | memory and views of it | [`tensor::Buffer`], [`tensor::Tensor`] | `tensor.rs` |
//! | lengths, and numbers per sequence | [`sequences`] | `sequences.rs` |
//! | element types, head maps, state layouts | [`types`] | `types.rs` |
//! | code objects in this build | [`code_objects`] | `code_objects.rs`, `build.rs` |
//! | errors | [`error::Error`], [`error::ArgumentError`] | `error.rs` |
//! | the f64 reference | [`oracle`] | `oracle/` |
//! | standard test inputs | [`inputs`] | `inputs.rs` |
//! | error figures | [`metrics`] | `metrics.rs` |
//! | tensors in files | [`safetensors_io`] | `safetensors_io.rs` |

#[doc(hidden)]
pub mod abi;
mod check;
pub mod code_objects;
pub mod commit;
pub mod conv;
pub mod decode;
pub mod error;
pub mod gate;
mod gating;
pub mod inputs;
mod launch;
pub mod layer;
pub mod metrics;
pub mod norm;
pub mod oracle;
pub mod prefill;
pub mod runtime;
pub mod safetensors_io;
pub mod sequences;
pub mod tensor;
pub mod types;

pub use error::{ArgumentError, Error, Result};

/// The README's example, run by the tests. `scripts/check-docs` wants each page with Rust in it included here.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
