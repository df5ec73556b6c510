//! HIP kernels for Gated DeltaNet inference on AMD Instinct MI300 (gfx942), behind a safe API.
//!
//! | concept | type | file |
//! |---|---|---|
//! | chunked prefill | [`prefill::Prefill`] | `ops/prefill/`, `hip/kernels/prefill_*.hip` |
//! | gradients of a prefill | [`prefill::PrefillBackward`] | `ops/prefill/backward.rs`, `hip/kernels/prefill_backward_*.hip` |
//! | prefill of sequences that ranks share | [`prefill::ParallelPrefill`], [`parallel::Communicator`] | `ops/prefill/parallel.rs`, `parallel.rs` |
//! | gradients of such a prefill | [`prefill::ParallelPrefillBackward`] | `ops/prefill/parallel_backward.rs` |
//! | decode, one or a few tokens at a time | [`decode::Decode`] | `ops/decode/`, `hip/kernels/decode.hip` |
//! | states after accepted tokens | [`commit::Commit`] | `ops/commit.rs`, `hip/kernels/commit.hip` |
//! | convolution of q, k and v | [`conv::Conv`] | `ops/conv/`, `hip/kernels/conv.hip` |
//! | gated norm of the outputs | [`norm::GatedNorm`] | `ops/norm.rs`, `hip/kernels/norm.hip` |
//! | gates as values | [`gate::Gate`] | `ops/gate.rs`, `hip/kernels/gate.hip` |
//! | a whole layer | [`layer::Layer`] | `ops/layer/` |
//! | heads and dimensions | [`model::Heads`] | `model.rs` |
//! | gates of the recurrence | [`gates::Gating`] | `gates.rs` |
//! | recurrent states: tensors, pools | [`state::States`], [`state::StatePool`] | `state.rs` |
//! | lengths, and numbers per sequence | [`batch::CuSeqlens`], [`batch::PerSequence`] | `batch.rs` |
//! | scratch memory of launches | [`workspace::Workspace`] | `workspace.rs` |
//! | memory and views of it | [`tensor::Buffer`], [`tensor::Tensor`] | `tensor.rs` |
//! | element types, head maps, state layouts | [`types`] | `types.rs` |
//! | device with its kernels loaded | [`runtime::Context`] | `runtime/context.rs` |
//! | streams, events, graphs | [`runtime::Stream`], [`runtime::Event`], [`runtime::Graph`] | `runtime/stream.rs`, `runtime/graph.rs` |
//! | table of kernels | `kernels::Kernel`, `kernels::TABLE` | `kernels.rs` |
//! | code objects in this build | [`code_objects`] | `code_objects.rs`, `build.rs` |
//! | outputs that share memory with other arguments | `alias::check` | `alias.rs` |
//! | errors | [`error::Error`], [`error::ArgumentError`] | `error.rs` |
//!
//! [`Backend::Simulator`](runtime::Backend::Simulator) needs the feature `simulator`, which is on by default. Without
//! it neither the simulator nor its dependencies are compiled. The repository's crate `deltawave-lab` has references,
//! test inputs and error measures; `deltawave-cli` has the program `deltawave`.

#[doc(hidden)]
pub mod abi;
mod alias;
pub mod batch;
mod check;
pub mod code_objects;
pub mod error;
pub mod gates;
#[doc(hidden)]
pub mod kernels;
pub mod model;
mod ops;
pub mod parallel;
pub mod runtime;
pub mod state;
pub mod tensor;
pub mod types;
pub mod workspace;

pub use ops::{commit, conv, decode, gate, layer, norm, prefill};

pub use error::{ArgumentError, Error, Result};

/// Example of the README, run by the tests. `scripts/check-docs` requires every page with Rust code to be included
/// here.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
