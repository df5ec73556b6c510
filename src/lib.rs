//! HIP kernels for Gated DeltaNet.

pub mod code_objects;
pub mod inputs;
pub mod metrics;
pub mod oracle;
pub mod types;
