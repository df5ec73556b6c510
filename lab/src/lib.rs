//! Reference results, test inputs and error figures for the operations of deltawave.
//!
//! | concept | file |
//! |---|---|
//! | the f64 reference of every operation, and the unfused chunk form with its roundings | `oracle/` |
//! | standard test inputs | `inputs.rs` |
//! | error figures and their limits | `metrics.rs` |
//! | tensors in safetensors files | `safetensors_io.rs` |
//!
//! Tests, benches and the program `deltawave` use this crate. The crate `deltawave` does not, so an engine links none
//! of it.

pub mod inputs;
pub mod metrics;
pub mod oracle;
pub mod safetensors_io;
