//! HIP kernels for Gated DeltaNet.

pub mod inputs;
pub mod metrics;
pub mod oracle;
pub mod safetensors_io;
pub mod types;
