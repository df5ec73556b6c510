//! Reference results, test inputs and error figures for the operations of deltawave.
//!
//! | concept | file |
//! |---|---|
//! | the f64 reference of every operation, and the unfused chunk form with its roundings | `oracle/` |
//! | standard test inputs | `inputs.rs` |
//! | error figures, and how large they may be | `metrics.rs` |
//! | tensors of a whole operation, drawn; the least that any implementation moves | `workload.rs` |
//! | results of a whole operation beside its reference | `judge.rs` |
//! | the memory that an operation and its reference take, and that a process holds | `memory.rs` |
//! | times of launches on a GPU | `replay.rs` |
//! | models, by the shape of a layer | `models.rs` |
//! | tensors in safetensors files | `safetensors_io.rs` |
//!
//! Tests, benches and the program `deltawave` use this crate. The crate `deltawave` does not, so an engine links none
//! of it.

pub mod inputs;
pub mod judge;
pub mod memory;
pub mod metrics;
pub mod models;
pub mod oracle;
pub mod replay;
pub mod safetensors_io;
pub mod workload;
